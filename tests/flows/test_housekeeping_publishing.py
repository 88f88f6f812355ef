"""Publication by the site daemon: late, complete and once, of everything that a controller could not publish."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from control_fakes import FakeAgent
from harness import ControllerHarness
from prefect import task
from prefect.artifacts import Artifact
from prefect.automations import Automation
from prefect.client.schemas.actions import ArtifactCreate
from prefect.events import DoNothing, Event, EventTrigger, Posture, Resource
from prefect.states import Crashed, Running
from process_tools import ASKING_INTERVAL_S, until
from sites import Site

from flows.flow_runs.facts import PrefectFlowRuns
from flows.publishing.artifacts import Publication, artifact_key, publication_of, publish
from flows.publishing.events import FlowRunRef, events_of, unpublished
from flows.run import rlhf_run
from flows.server.clients import api_client
from rlhf_core.control.reconcile.actions import Reconciler
from rlhf_core.control.steps import drive
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.diagnosis.reconcile.decisions import ActionKind, ReconcileAction
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import ControllerStarted, PromotionMoved
from rlhf_core.watchdog.watcher import record

EVENTS = [f"rlhf.run.{state}" for state in ("preflight", "queued", "evaluating", "completed")]
ARTIFACTS = ["progress", "checks", "result", "curves"]


@pytest.fixture(autouse=True)
def _server(
    real_prefect: Site, harness: ControllerHarness, blank_curves: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr("rlhf_core.control.reconcile.actions.get_scheduler", lambda name: harness.scheduler)
    with real_prefect.in_use():
        yield


def completed(harness: ControllerHarness, *with_prefect: bool) -> RunDir:
    """A run whose controllers could not publish anything; each was a flow run or none."""
    run_dir = harness.good_run()
    session = harness.controller(run_dir)
    for as_flow_run in with_prefect:
        flow_run_id = flow_run(run_dir.run_id) if as_flow_run else ""
        session.journal.append(ControllerStarted(controller="user@elsewhere:1:1.00", flow_run_id=flow_run_id))
    drive(session)
    harness._stack.close()
    harness.scheduler.end_all()
    return run_dir


def flow_run(name: str) -> str:
    """A flow run that the server knows."""
    with api_client() as client:
        return str(client.create_flow_run(rlhf_run, name=name, state=Running()).id)


def later(harness: ControllerHarness) -> Reconciler:
    return Reconciler(
        harness.site,
        harness.store,
        flow_runs=PrefectFlowRuns(harness.site),
        now=lambda: utc_now() + timedelta(seconds=90),
    )


def of_publishing(actions: list[ReconcileAction]) -> list[ReconcileAction]:
    return [one for one in actions if one.kind is ActionKind.PUBLISH]


def is_known(run_dir: RunDir) -> bool:
    """True if the server lists every event of the run."""
    with api_client() as client:
        return not unpublished(client, events_of(read_timeline(run_dir), run_dir.read_spec(), FlowRunRef("", "")))


@pytest.mark.usefixtures("drawn_curves")
def test_the_daemon_publishes_missing_parts_once(harness: ControllerHarness) -> None:
    run_dir = completed(harness, True)
    daemon = later(harness)
    (deed,) = daemon.carry_out(of_publishing(daemon.poll()))
    assert deed.done
    assert deed.message == f"published: {', '.join([*EVENTS, *(f'artifact {name}' for name in ARTIFACTS)])}"
    assert of_publishing(daemon.poll()) == [], "also before the server lists it"
    until(lambda: is_known(run_dir), "the server has it all", interval_s=ASKING_INTERVAL_S)
    assert of_publishing(later(harness).poll()) == [], "another daemon finds nothing to publish"


def test_the_end_under_a_controller_without_prefect_is_published_too(harness: ControllerHarness) -> None:
    """Such a controller took over during an outage of the server, or `rlhf cancel` ended a run without a controller."""
    completed(harness, True, False)
    daemon = later(harness)
    assert len(of_publishing(daemon.poll())) == 1


def test_a_run_that_was_never_a_flow_run_is_not_published(harness: ControllerHarness) -> None:
    run_dir = completed(harness, False)
    one_round = later(harness)
    actions = one_round.poll()
    assert of_publishing(actions) == []
    one_round.carry_out(actions)
    assert page(run_dir, "result") is None


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def publish_all(harness: ControllerHarness, run_dir: RunDir) -> None:
    """Publish everything, as the run's controller would have done."""
    publish(whole(harness, run_dir))
    until(lambda: is_known(run_dir), "the server has it all", interval_s=ASKING_INTERVAL_S)


def whole(harness: ControllerHarness, run_dir: RunDir) -> Publication:
    """Everything about the run, in the name of its flow run."""
    return publication_of(run_dir, harness.store, FlowRunRef(driving_flow_run(run_dir), run_dir.run_id))


def driving_flow_run(run_dir: RunDir) -> str:
    """Id of the flow run that was the driver of the run."""
    found = [one.event for one in read_timeline(run_dir).lines if isinstance(one.event, ControllerStarted)]
    return next(one.flow_run_id for one in found if one.flow_run_id)


def page(run_dir: RunDir, what: str) -> Any:
    return Artifact.get(artifact_key(run_dir.run_id, what))


def put(run_dir: RunDir, what: str, kind: str, data: str | float, description: str) -> None:
    """Write a page as the controller would have left it."""
    with api_client() as client:
        key = artifact_key(run_dir.run_id, what)
        made = ArtifactCreate(
            key=key, type=kind, data=data, description=description, flow_run_id=UUID(driving_flow_run(run_dir))
        )
        client.create_artifact(made)


def test_artifacts_with_another_end_are_renewed_in_the_name_of_the_flow_run(harness: ControllerHarness) -> None:
    """The controller died during training; another one, without Prefect, finished the run."""
    run_dir = completed(harness, True)
    publish_all(harness, run_dir)
    assert of_publishing(later(harness).poll()) == [], "what was published in time is not published again"
    put(run_dir, "result", "markdown", f"# {run_dir.run_id}: training\n", "training: attempt 1")
    put(run_dir, "progress", "progress", 40.0, "**step 4 of 10 (grpo), 40 %** · 3 min left")
    daemon = later(harness)
    (deed,) = daemon.carry_out(of_publishing(daemon.poll()))
    assert deed.message == "published: artifact progress, artifact result"
    result, progress = page(run_dir, "result"), page(run_dir, "progress")
    assert result is not None
    assert progress is not None
    assert str(result.data).startswith(f"# {run_dir.run_id}: completed\n")
    assert "+0.700" in str(result.data)
    assert result.description == "completed: attempt 1 completed"
    assert str(result.flow_run_id) == driving_flow_run(run_dir), "on the tab Artifacts of the run's own flow run"
    assert (progress.data, str(progress.description).partition(" ")[0]) == (100.0, "**completed**")
    assert of_publishing(later(harness).poll()) == [], "another daemon finds nothing to renew"


def test_a_page_from_before_the_promotion_was_decided_is_renewed(harness: ControllerHarness) -> None:
    run_dir = completed(harness, True)
    publish_all(harness, run_dir)
    journal = harness.controller(run_dir).journal
    journal.append(PromotionMoved(state=PromotionState.REFUSED, by="ada", reason="not yet", checkpoint_step=10))
    harness._stack.close()
    daemon = later(harness)
    (deed,) = daemon.carry_out(of_publishing(daemon.poll()))
    assert deed.message == "published: rlhf.promotion.refused, artifact result"
    result = page(run_dir, "result")
    assert result is not None
    assert "**Promotion: refused**, step 10 · by ada · not yet" in str(result.data)


def test_an_incident_without_an_artifact_is_published(harness: ControllerHarness) -> None:
    """With the negative control of the next test: parts that have changed are published again."""
    run_dir = completed(harness, True)
    publish_all(harness, run_dir)
    FakeAgent(run_dir).incident(FailureKind.NODE_LOST)
    record(run_dir, harness.store)  # as the daemon does first: the result contains the lost time
    daemon = later(harness)
    (deed,) = daemon.carry_out(of_publishing(daemon.poll()))
    assert deed.message.startswith("published: rlhf.incident.node_lost, ")
    assert "artifact incidents" in deed.message
    found = page(run_dir, "incidents")
    assert found is not None
    assert "## node_lost" in str(found.data)
    until(lambda: is_known(run_dir), "the server has it all", interval_s=ASKING_INTERVAL_S)
    assert of_publishing(later(harness).poll()) == []
    assert versions(run_dir) == {"progress": 1, "curves": 1, "checks": 1, "result": 2, "incidents": 1}
    assert listed(run_dir, ["rlhf.incident.node_lost"]) == ["rlhf.incident.node_lost"]


# ---------------------------------------------------------------------------------------------------------------------
# Publishing twice publishes once


def listed(run_dir: RunDir, events: list[str]) -> list[str]:
    """Those of the given event names that the server lists for the run."""
    query = {"filter": {"event": {"name": events}, "resource": {"id": [f"rlhf.run.{run_dir.run_id}"]}}, "limit": 50}
    with api_client() as client:
        found = client.request("POST", "/events/filter", json=query).json()["events"]
    return sorted(event["event"] for event in found)


def versions(run_dir: RunDir) -> dict[str, int]:
    """Number of versions of each artifact of the run."""
    filters = {name: artifact_key(run_dir.run_id, name) for name in (*ARTIFACTS, "incidents")}
    with api_client() as client:
        return {
            name: len(client.request("POST", "/artifacts/filter", json={"artifacts": {"key": {"any_": [key]}}}).json())
            for name, key in filters.items()
        }


def firings(automation_id: UUID | None) -> int:
    """Number of times that an automation has acted."""
    query = {"filter": {"resource": {"id": [f"prefect.automation.{automation_id}"]}}, "limit": 50}
    with api_client() as client:
        found = client.request("POST", "/events/filter", json=query).json()["events"]
    return sum(event["event"] == "prefect.automation.action.triggered" for event in found)


def test_publishing_twice_publishes_once(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, before the server lists the first events, and again afterwards; automations are triggered once."""
    run_dir = completed(harness, True)
    ends = Automation(
        name="ends",
        trigger=EventTrigger(expect={"rlhf.run.completed"}, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
        actions=[DoNothing()],
    ).create()
    publication = whole(harness, run_dir)
    assert publish(publication) == [*EVENTS, *(f"artifact {name}" for name in ARTIFACTS)]
    with monkeypatch.context() as unlisted:
        unlisted.setattr("flows.publishing.events.unpublished", lambda client, events: list(events))
        publish(publication)
    until(lambda: is_known(run_dir), "the server has it all", interval_s=ASKING_INTERVAL_S)
    assert publish(publication) == []
    until(lambda: firings(ends.id) > 0, "the automation acts", interval_s=ASKING_INTERVAL_S)
    # Posted after all others: once it is listed, the server has handled everything queued before it.
    with api_client() as client:
        client.request("POST", "/events", json=[marker(run_dir)])
    until(
        lambda: listed(run_dir, ["rlhf.test.after"]) == ["rlhf.test.after"],
        "the last event is listed",
        interval_s=ASKING_INTERVAL_S,
    )
    assert listed(run_dir, EVENTS) == sorted(EVENTS)
    assert firings(ends.id) == 1
    assert versions(run_dir) == {**dict.fromkeys(ARTIFACTS, 1), "incidents": 0}


def test_a_deleted_progress_artifact_is_recreated(harness: ControllerHarness) -> None:
    run_dir = completed(harness, True)
    publish_all(harness, run_dir)
    made = page(run_dir, "progress")
    assert made is not None
    with api_client() as client:
        client.delete_artifact(made.id)
    assert publish(whole(harness, run_dir)) == ["artifact progress"]
    assert versions(run_dir)["progress"] == 1


def marker(run_dir: RunDir) -> dict[str, object]:
    resource = Resource({"prefect.resource.id": f"rlhf.run.{run_dir.run_id}"})
    return Event(event="rlhf.test.after", resource=resource).model_dump(mode="json")


# ---------------------------------------------------------------------------------------------------------------------
# Ends that Prefect missed


def test_a_crashed_flow_run_and_its_open_task_runs_get_the_end_of_the_run(harness: ControllerHarness) -> None:
    """The server was away when the run ended: the process could not report it, and the worker marked it as crashed."""
    run_dir = completed(harness, True)
    flow_run_id = UUID(driving_flow_run(run_dir))
    with api_client() as client:
        open_ones = {
            title: client.create_task_run(
                task(lambda: None, name=title.split()[0]), flow_run_id, dynamic_key=title, name=title, state=Running()
            ).id
            for title in ("train attempt 1", "evaluate", "restart 1 in attempt 1")
        }
        client.set_flow_run_state(flow_run_id, Crashed(), force=True)
        one = later(harness)
        of_ends = [ActionKind.END_FLOW_RUN, ActionKind.END_TASK_RUN]
        deeds = one.carry_out([action for action in one.poll() if action.kind in of_ends])
        assert [deed.done for deed in deeds] == [True] * 4
        assert client.read_flow_run(flow_run_id).state_name == "Completed"
        states = {title: client.read_task_run(id_).state_name for title, id_ in open_ones.items()}
    assert set(states.values()) == {"Completed"}
    assert [action for action in later(harness).poll() if action.kind in of_ends] == []
