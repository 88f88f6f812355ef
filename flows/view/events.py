"""What happened to a run as events, for automations.

Each event has an id made from what it is about, and the server is asked which of them it has: nothing is told twice,
whatever controller comes later. They are posted and answered; Prefect's own sender only queues, and loses what a server
that is away does not take.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import Event, RelatedResource, Resource
from prefect.utilities.urls import url_for

from flows.view.story import Story, ToldDecision, ToldIncident
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.journal import JournalLine, PromotionMoved, RunMoved
from rlhf_core.schemas.regression import regression_text
from rlhf_core.schemas.run import StoredSpec
from rlhf_core.watchdog.evidence import regressed

NEWS = timedelta(days=3)
"""What is older is no news: a run that is gone on with after a holiday does not call anybody for what was before. It is
less than Prefect keeps events by default, so what was told can be told from what was not."""

_PAGE = 50
"""Events asked for at once: the server's own limit."""

_NAMESPACE = uuid.UUID("6a1f3a52-3c0e-4b52-9d5e-5d9a1f0c7e11")


@dataclass(frozen=True)
class FlowRun:
    """The flow run that tells."""

    id: str
    name: str

    @property
    def url(self) -> str:
        """Its page in the UI; empty where nobody knows its address."""
        return (url_for("flow-run", obj_id=self.id) if self.id else None) or ""


@dataclass(frozen=True)
class Happening:
    """One event, before Prefect has it."""

    id: uuid.UUID
    name: str
    occurred: datetime
    payload: Mapping[str, str]
    """Texts alone: a number would break the templates of an automation whose parameters are texts."""


def happenings(story: Story, stored: StoredSpec, flow_run: FlowRun, now: datetime | None = None) -> list[Happening]:
    """Everything of the story that is news, in the order of time."""
    since = (now or utc_now()) - NEWS
    found = [*_incidents(story), *_decisions(story), *_moves(story, stored, flow_run)]
    return sorted((one for one in found if one.occurred >= since), key=lambda one: one.occurred)


def unknown_to_the_server(found: Sequence[Happening]) -> list[Happening]:
    """Those that nobody has told yet."""
    known: set[str] = set()
    with get_client(sync_client=True) as client:
        for start in range(0, len(found), _PAGE):
            known |= _known(client, found[start : start + _PAGE])
    return [one for one in found if str(one.id) not in known]


def _known(client: SyncPrefectClient, found: Sequence[Happening]) -> set[str]:
    ids = [str(one.id) for one in found]
    # By itself the server ends at its own now, and a controller's clock may be ahead of it.
    until = (utc_now() + timedelta(days=1)).isoformat()
    question = {"filter": {"id": {"id": ids}, "occurred": {"until": until}}, "limit": _PAGE}
    answer = client.request("POST", "/events/filter", json=question)
    return {event["id"] for event in answer.json()["events"]}


def tell(found: Iterable[Happening], run_id: str, flow_run: FlowRun) -> None:
    """Post events about a run, in the name of a flow run."""
    related = [
        RelatedResource(
            {
                "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
                "prefect.resource.role": "flow-run",
                "prefect.resource.name": flow_run.name,
            }
        )
    ]
    resource = Resource({"prefect.resource.id": f"rlhf.run.{run_id}", "prefect.resource.name": run_id})
    events = [
        Event(
            id=one.id,
            event=one.name,
            occurred=one.occurred,
            resource=resource,
            related=related if flow_run.id else [],
            payload=dict(one.payload),
        ).model_dump(mode="json")
        for one in found
    ]
    with get_client(sync_client=True) as client:
        client.request("POST", "/events", json=events)


# ---------------------------------------------------------------------------------------------------------------------


def _happening(name: str, about: str, occurred: datetime, payload: dict[str, str]) -> Happening:
    return Happening(uuid.uuid5(_NAMESPACE, about), name, occurred, payload)


def _incidents(story: Story) -> Iterator[Happening]:
    for told in story.incidents:
        incident = told.incident
        name = f"rlhf.incident.{incident.failure_kind.value}"
        about = f"{told.run_dir.run_id}/{incident.attempt}/{incident.restart}/{name}/{incident.seen_at.isoformat()}"
        yield _happening(name, about, incident.seen_at, _of_incident(story, told))


def _decisions(story: Story) -> Iterator[Happening]:
    for told in story.decisions:
        decision = told.decision
        name = f"rlhf.decision.{decision.action.value}"
        about = f"{told.run_dir.run_id}/{decision.attempt}/{decision.restart}/{name}/{decision.decided_at.isoformat()}"
        yield _happening(name, about, decision.decided_at, _of_decision(story, told))


def _moves(story: Story, stored: StoredSpec, flow_run: FlowRun) -> Iterator[Happening]:
    for line in story.lines:
        if isinstance(line.event, RunMoved | PromotionMoved):
            what = "run" if isinstance(line.event, RunMoved) else "promotion"
            name = f"rlhf.{what}.{line.event.state.value}"
            about = f"{story.run_id}/journal/{line.token}/{line.sequence}/{name}"
            payload = {
                "run_id": story.run_id,
                "name": stored.spec.name,
                "owner": stored.owner,
                "state": line.event.state.value,
                "url": story.flow_run_url(line) or flow_run.url,
                "run_dir": str(story.run_dir.root),
                **_of_move(line),
            }
            if isinstance(line.event, RunMoved) and line.event.state is RunState.COMPLETED:
                worse = regression_text(regressed(story.run_dir))
                payload["message"] = "; ".join(part for part in (payload["message"], worse) if part)
            yield _happening(name, about, line.time, payload)


def _of_move(line: JournalLine) -> dict[str, str]:
    match line.event:
        case RunMoved(cause=cause):
            return {"message": cause}
        case PromotionMoved(checkpoint_step=step, by=by, reason=reason, path=path):
            return {"message": reason, "checkpoint_step": str(step), "by": by, "path": path}
        case _:
            return {}


def _of_incident(story: Story, told: ToldIncident) -> dict[str, str]:
    incident = told.incident
    return {
        **_whose(story, told),
        "attempt": str(incident.attempt),
        "restart": str(incident.restart),
        "failure_kind": incident.failure_kind.value,
        "message": incident.message,
        "phase": incident.phase,
        "step": "" if incident.step is None else str(incident.step),
        "suspect_ranks": ",".join(map(str, incident.suspect_ranks)),
        "suspect_nodes": ",".join(incident.suspect_nodes),
        "collective": incident.collective,
        "evidence_dir": incident.evidence_dir,
        "seen_at": incident.seen_at.isoformat(),
    }


def _of_decision(story: Story, told: ToldDecision) -> dict[str, str]:
    decision = told.decision
    return {
        **_whose(story, told),
        "attempt": str(decision.attempt),
        "restart": str(decision.restart),
        "action": decision.action.value,
        "reason": decision.reason,
        "decided_by": decision.decided_by.value,
        "delay_s": f"{decision.delay_s:g}",
        "excluded_nodes": ",".join(decision.excluded_nodes),
        "config_diff": ", ".join(f"{name}={value}" for name, value in decision.config_diff.items()),
        "decided_at": decision.decided_at.isoformat(),
    }


def _whose(story: Story, told: ToldIncident | ToldDecision) -> dict[str, str]:
    trial = "" if told.run_dir == story.run_dir else told.run_dir.run_id
    return {"run_id": story.run_id, "trial_run_id": trial}
