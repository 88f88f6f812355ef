"""Events about a run, for automations.

Each event id is derived from the event's subject, and the server is asked for the ids it already has, so any controller
may publish the same event without duplicating it. Events are posted and acknowledged; Prefect's own sender only queues
and loses those that an unavailable server does not accept.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.events import Event, RelatedResource, Resource
from prefect.utilities.urls import url_for

from rlhf_core.render.timeline import Timeline
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RUN_ENDS, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, Decision, FailureKind, Incident
from rlhf_core.schemas.journal import CancelStarted, DecisionMade, JournalLine, PromotionMoved, RunMoved
from rlhf_core.schemas.regression import regression_text
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.watchdog.evidence import regressed

MAX_AGE = timedelta(days=3)
"""Age above which events are not published: a run resumed after a holiday must not send alerts about the time before.
Prefect keeps events longer by default, so the server knows all that were published."""

DECISION_TIMEOUT = timedelta(seconds=60)
"""Age up to which an incident waits for its decision before it is published: messages say whether it is retried."""

STOPPED = {"rlhf.action": "stop"}
"""Label of the resource of a failed run whose last failure is not retried. Checks that refuse a run are no failure."""

CANCELLED_OUTSIDE = {"rlhf.cancelled_by": "scheduler"}
"""Label of the resource of a run that was cancelled without a request to rlhf-flows."""

WITHOUT_NODES = {"rlhf.reminder": "no_nodes"}
"""Label of the resource of an incident that reminds of a run whose nodes do not start: of the first attempt without
them, and then of one a day. Such attempts may follow each other every ten minutes, without an end."""

REMINDER_INTERVAL = timedelta(days=1)
"""Time between two reminders of the same wait."""

_PAGE_SIZE = 50
"""Events per query: the server's own limit."""

_NAMESPACE = uuid.UUID("6a1f3a52-3c0e-4b52-9d5e-5d9a1f0c7e11")


@dataclass(frozen=True)
class FlowRunRef:
    """The flow run in whose name something is published."""

    id: str
    name: str

    @property
    def url(self) -> str:
        """Its page in the UI; empty if the UI's address is unknown."""
        return (url_for("flow-run", obj_id=self.id) if self.id else None) or ""


@dataclass(frozen=True)
class PrefectEvent:
    """An event about a run, before it is published."""

    id: uuid.UUID
    name: str
    occurred: datetime
    payload: Mapping[str, str]
    """Strings only: a number would break the templates of an automation whose parameters are strings."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of its resource, by which automations can select it."""


def events_of(
    timeline: Timeline, stored: StoredSpec, flow_run: FlowRunRef, now: datetime | None = None
) -> list[PrefectEvent]:
    """Build the recent events of a run, oldest first."""
    now = now or utc_now()
    run = {
        "run_id": timeline.run_id,
        "name": stored.spec.name,
        "owner": stored.owner,
        "url": timeline.flow_run_url() or flow_run.url,
        "run_dir": str(timeline.run_dir.root),
    }
    found = [*_incidents(timeline, run, now), *_decisions(timeline, run), *_moves(timeline, run, flow_run.url)]
    return sorted((one for one in found if one.occurred >= now - MAX_AGE), key=lambda one: one.occurred)


def unpublished(client: SyncPrefectClient, events: Sequence[PrefectEvent]) -> list[PrefectEvent]:
    """Events that the server does not have yet."""
    known: set[str] = set()
    # By default the server's query ends at the server's current time, and a controller's clock may be ahead of it.
    until = (utc_now() + timedelta(days=1)).isoformat()
    for start in range(0, len(events), _PAGE_SIZE):
        ids = [str(one.id) for one in events[start : start + _PAGE_SIZE]]
        query = {"filter": {"id": {"id": ids}, "occurred": {"until": until}}, "limit": _PAGE_SIZE}
        known |= {event["id"] for event in client.request("POST", "/events/filter", json=query).json()["events"]}
    return [one for one in events if str(one.id) not in known]


def publish_events(
    client: SyncPrefectClient, events: Sequence[PrefectEvent], run_id: str, flow_run: FlowRunRef
) -> list[str]:
    """Post the events that the server lacks, and return their names.

    The server lists an event some seconds after accepting it. An event posted twice in between is still stored once,
    and automations act on it once: the server remembers processed ids for half an hour.
    """
    new = unpublished(client, events)
    if new:
        client.request("POST", "/events", json=[_as_json(one, run_id, flow_run) for one in new])
    return [one.name for one in new]


def _as_json(event: PrefectEvent, run_id: str, flow_run: FlowRunRef) -> dict[str, object]:
    return Event(
        id=event.id,
        event=event.name,
        occurred=event.occurred,
        resource=Resource(
            {"prefect.resource.id": f"rlhf.run.{run_id}", "prefect.resource.name": run_id, **event.labels}
        ),
        related=[RelatedResource(flow_run_resource(flow_run.id, flow_run.name))] if flow_run.id else [],
        payload=dict(event.payload),
    ).model_dump(mode="json")


def flow_run_resource(id: object, name: str) -> dict[str, str]:
    """A flow run as a related resource of an event."""
    return {
        "prefect.resource.id": f"prefect.flow-run.{id}",
        "prefect.resource.role": "flow-run",
        "prefect.resource.name": name,
    }


# ---------------------------------------------------------------------------------------------------------------------


def _incidents(timeline: Timeline, run: Mapping[str, str], now: datetime) -> Iterator[PrefectEvent]:
    reminders = _reminders(timeline)
    for found in timeline.incidents:
        incident = found.incident
        decisions = timeline.decisions_on(found)
        # Clocks of nodes may be ahead: such an incident does not wait.
        is_new = timedelta(0) <= now - incident.seen_at < DECISION_TIMEOUT
        if not decisions and is_new and not timeline.ended:
            continue
        payload = {
            "failure_kind": incident.failure_kind.value,
            "message": incident.message,
            "phase": incident.phase,
            "step": "" if incident.step is None else str(incident.step),
            "suspect_ranks": ",".join(map(str, incident.suspect_ranks)),
            "suspect_nodes": ",".join(incident.suspect_nodes),
            "collective": incident.collective,
            "evidence_dir": incident.evidence_dir,
            "seen_at": incident.seen_at.isoformat(),
            **_answer(decisions[-1] if decisions else None),
        }
        name = f"rlhf.incident.{incident.failure_kind.value}"
        event = _of_attempt(name, timeline, found.run_dir, incident, incident.seen_at, {**run, **payload})
        yield replace(event, labels=WITHOUT_NODES) if (found.run_dir, incident.attempt) in reminders else event


def _reminders(timeline: Timeline) -> set[tuple[RunDir, int]]:
    """Attempts without nodes whose incidents are reminders: the run or trial, and the number of the attempt."""
    found: set[tuple[RunDir, int]] = set()
    last: tuple[RunDir, int] | None = None
    reminded_at = datetime.min.replace(tzinfo=UTC)
    for one in timeline.incidents:
        attempt, seen_at = one.incident.attempt, one.incident.seen_at
        if one.incident.failure_kind is not FailureKind.NO_NODES:
            continue
        if last != (one.run_dir, attempt - 1) or seen_at - reminded_at >= REMINDER_INTERVAL:
            found.add((one.run_dir, attempt))
            reminded_at = seen_at
        last = (one.run_dir, attempt)
    return found


def _decisions(timeline: Timeline, run: Mapping[str, str]) -> Iterator[PrefectEvent]:
    for found in timeline.decisions:
        decision = found.decision
        payload = {
            **_answer(decision),
            "decided_by": decision.decided_by.value,
            "delay_s": f"{decision.delay_s:g}",
            "excluded_nodes": ",".join(decision.excluded_nodes),
            "config_diff": ", ".join(f"{name}={value}" for name, value in decision.config_diff.items()),
            "decided_at": decision.decided_at.isoformat(),
        }
        name = f"rlhf.decision.{decision.action.value}"
        yield _of_attempt(name, timeline, found.run_dir, decision, decision.decided_at, {**run, **payload})


def _answer(decision: Decision | None) -> dict[str, str]:
    """The response to an incident; empty texts while there is none."""
    if decision is None:
        return {"action": "", "reason": ""}
    return {"action": decision.action.value, "reason": decision.reason}


def _of_attempt(
    name: str,
    timeline: Timeline,
    run_dir: RunDir,
    about: Incident | Decision,
    occurred: datetime,
    payload: Mapping[str, str],
) -> PrefectEvent:
    """Build an event of a run, or of its trial: of the one in ``run_dir``."""
    place = {
        "trial_run_id": "" if run_dir == timeline.run_dir else run_dir.run_id,
        "attempt": str(about.attempt),
        "restart": str(about.restart),
    }
    subject = f"{run_dir.run_id}/{about.attempt}/{about.restart}/{name}/{occurred.isoformat()}"
    return PrefectEvent(uuid.uuid5(_NAMESPACE, subject), name, occurred, {**payload, **place})


def _moves(timeline: Timeline, run: Mapping[str, str], publisher_url: str) -> Iterator[PrefectEvent]:
    stop: Decision | None = None
    is_cancelling = False
    for line in timeline.lines:
        url = timeline.flow_run_url(line) or publisher_url
        match line.event:
            case DecisionMade(decision=decision):
                stop = decision if decision.action is Action.STOP else None
            case CancelStarted():
                is_cancelling = True
            case PromotionMoved(state=promotion, checkpoint_step=step, by=by, reason=reason, path=path):
                payload = {"message": reason, "checkpoint_step": str(step), "by": by, "path": path, "url": url}
                yield _of_line(f"promotion.{promotion.value}", line, {**run, "state": promotion.value, **payload})
            case RunMoved(state=state, cause=cause):
                worse = regression_text(regressed(timeline.run_dir)) if state is RunState.COMPLETED else ""
                payload = {"message": "; ".join(part for part in (cause, worse) if part), "url": url}
                labels: Mapping[str, str] = {}
                if state is RunState.FAILED and stop is not None:
                    payload, labels = payload | _answer(stop), STOPPED
                if state is RunState.CANCELLED and not is_cancelling:
                    labels = CANCELLED_OUTSIDE
                if state in RUN_ENDS:
                    stop, is_cancelling = None, False
                yield _of_line(f"run.{state.value}", line, {**run, "state": state.value, **payload}, labels)
            case _:
                pass


def _of_line(
    what: str, line: JournalLine, payload: Mapping[str, str], labels: Mapping[str, str] | None = None
) -> PrefectEvent:
    """Build the event of a line of the journal."""
    name = f"rlhf.{what}"
    subject = f"{payload['run_id']}/journal/{line.token}/{line.sequence}/{name}"
    return PrefectEvent(uuid.uuid5(_NAMESPACE, subject), name, line.time, payload, labels or {})
