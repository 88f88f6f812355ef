"""A run as a Prefect flow: its representation in Prefect, and its independence of a lost server."""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest
from control_fakes import FakeAgent, make_spec
from harness import ControllerHarness
from made_reports import decision_of
from prefect.artifacts import Artifact
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import TaskRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import emit_event
from prefect.exceptions import FailedRun
from prefect.flow_engine import run_flow
from prefect.logging.handlers import APILogWorker
from prefect.logging.loggers import flow_run_logger
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Crashed
from sites import START_TIMEOUT_S, Site

from flows import reconcile
from flows.publishing import artifacts, publisher
from flows.publishing.artifacts import artifact_key
from flows.publishing.events import FlowRunRef, events_of, publish_events, unpublished
from flows.run import rlhf_run, run_in_prefect
from flows.server.clients import api_client
from flows.tasks import MAX_TITLE, TaskRunner, shorten
from rlhf_core.control.controller import Controller
from rlhf_core.control.reconcile.actions import ActionResult
from rlhf_core.control.steps import Step, drive, steps
from rlhf_core.control.views import progress
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.diagnosis.reconcile.decisions import ActionKind, ReconcileAction
from rlhf_core.errors import PreflightBlocked, RunCancelled, RunFailed
from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import write_model
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.attempts import AttemptState, RunState, StageName
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.journal import ControllerStarted, JournalLine
from rlhf_core.schemas.resources import Placement

# ---------------------------------------------------------------------------------------------------------------------
# Without a server


class PrefectError(Exception):
    """The error that Prefect raises when its server is gone."""


def test_finished_work_is_not_repeated_when_prefect_fails_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done, messages = [], []

    def fails_afterwards(step: Step) -> None:
        step.run()
        raise PrefectError("gone")

    monkeypatch.setattr("flows.tasks.as_task_run", fails_afterwards)
    TaskRunner(messages.append).run(Step(StageName.TRAIN, "train attempt 1", lambda: done.append(1)))
    assert done == [1]
    assert "continues without it" in messages[0]


def test_work_is_done_without_prefect_when_prefect_fails_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done, started, messages = [], [], []

    def fails_at_once(step: Step) -> None:
        started.append(step.title)
        raise PrefectError("gone")

    monkeypatch.setattr("flows.tasks.as_task_run", fails_at_once)
    tasks = TaskRunner(messages.append)
    tasks.run(Step(StageName.TRAIN, "train attempt 1", lambda: done.append(1)))
    tasks.run(Step(StageName.EVALUATE, "evaluate", lambda: done.append(2)))
    assert done == [1, 2]
    assert started == ["train attempt 1"], "a server that does not answer is not asked again"


def test_our_own_errors_pass_through_and_do_not_look_like_a_lost_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise RunFailed("the diagnosis")

    monkeypatch.setattr("flows.tasks.as_task_run", Step.run)
    tasks, step = TaskRunner(lambda text: pytest.fail(text)), Step(StageName.TRAIN, "train attempt 1", breaks)
    tasks.run(step)
    with pytest.raises(RunFailed, match="the diagnosis"):
        step.result()
    assert not tasks.lost


def test_a_skipped_step_is_not_taken_for_done(harness: ControllerHarness) -> None:
    """A loop that skips a step must not continue as if a stage had succeeded."""
    pending = steps(harness.controller(harness.run()))
    next(pending)
    with pytest.raises(RuntimeError, match="'preflight' was taken from the loop and not carried out"):
        next(pending)


# ---------------------------------------------------------------------------------------------------------------------
# With a server


@pytest.fixture
def server(server: Site, blank_curves: None, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A server, with enough time for the last publication on a busy machine: these tests read its results."""
    monkeypatch.setattr(publisher, "SHUTDOWN_TIMEOUT_S", START_TIMEOUT_S)
    return server


def state_of(flow_run: str) -> str:
    with api_client() as client:
        (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[flow_run])))
        return found.state_name or ""


def task_runs_of(flow_run: str) -> list[TaskRun]:
    with api_client() as client:
        return client.read_task_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[flow_run])))


def task_runs(flow_run: str) -> dict[str, str]:
    return {one.name: one.state_name for one in task_runs_of(flow_run)}


@pytest.mark.usefixtures("server")
def test_a_cancelled_run_is_cancelled_in_prefect(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)
    harness.notes.stop = lambda: len(harness.notes.snapshots) > 2
    with pytest.raises(RunCancelled):
        run_in_prefect(harness.controller(run_dir))
    assert state_of(run_dir.run_id) == "Cancelled"


@pytest.mark.usefixtures("server")
def test_a_server_that_is_lost_in_the_middle_does_not_stop_the_run(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import tasks

    run_dir = harness.good_run()
    as_task_run = tasks.as_task_run

    def lost_at_training(step: Step) -> None:
        if step.name is StageName.TRAIN:
            raise ConnectionError("no server")
        as_task_run(step)

    monkeypatch.setattr("flows.tasks.as_task_run", lost_at_training)
    run_in_prefect(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert any("continues without it" in text for text in harness.notes.messages)
    seen = task_runs(run_dir.run_id)
    assert "train attempt 1" not in seen
    assert seen["evaluate"] == "Completed", "a server that is back is used again"


@pytest.mark.usefixtures("server")
def test_a_trial_is_a_task_run_with_its_own_name(harness: ControllerHarness, checks: list[CheckResult]) -> None:
    checks.append(CheckResult(id="trial.needed", status=CheckStatus.WARNING, found="data changed"))
    run_dir = harness.run(make_spec(preflight={"trial": "run"}))
    harness.scheduler.on_submit = lambda request: FakeAgent(
        RunDir.of(harness.site.runs_dir, request.run_id)
    ).whole_run()
    run_in_prefect(harness.controller(run_dir))
    assert task_runs(run_dir.run_id)["trial on one node"] == "Completed"
    assert state_of(run_dir.run_id) == "Completed"
    assert len(harness.scheduler.submitted) == 2


@pytest.mark.usefixtures("server")
def test_a_deployment_starts_a_run_from_its_parameters(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an existing controller, as under a Prefect worker."""
    monkeypatch.setenv("RLHF_HOME", str(harness.site.home))

    def whole(request: object) -> None:
        (path,) = harness.site.runs_dir.iterdir()
        FakeAgent(RunDir(path)).whole_run()

    harness.scheduler.on_submit = whole
    rlhf_run(config="quickstart", overrides="loops.main.num_steps=3\nloops.warm_start.num_steps=1")
    (path,) = harness.site.runs_dir.iterdir()
    assert state_of(path.name) == "Completed"


# ---------------------------------------------------------------------------------------------------------------------
# Wrong input


@contextmanager
def logged() -> Iterator[Callable[[], tuple[str, str, str]]]:
    """Name and message of the state, and the log, of the newest flow run that was due in the block, as the server has
    them. Other tests leave some that are due tomorrow."""
    begun = datetime.now(UTC)

    def read() -> tuple[str, str, str]:
        APILogWorker.drain_all(timeout=30)  # log lines are sent in batches, a few seconds late
        due = {"after_": begun, "before_": datetime.now(UTC)}
        wanted = {"state": {"type": {"not_any_": ["SCHEDULED"]}}, "expected_start_time": due}
        with api_client() as client:
            (newest,) = client.read_flow_runs(
                flow_run_filter=FlowRunFilter.model_validate(wanted), sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1
            )
            lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[newest.id])), limit=200)
        assert newest.state is not None
        text = "\n".join(line.message for line in lines)
        assert "Finished in state" in text, "nothing of the log is missing"
        return newest.state.name or "", newest.state.message or "", text

    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: True}):
        yield read


def as_a_worker_does(given: dict[str, Any]) -> None:
    """Create a flow run and execute it like the process that a worker starts: with Prefect's engine and its logging."""
    with api_client() as client:
        flow_run = client.create_flow_run(rlhf_run, parameters=given)
    run_flow(rlhf_run, flow_run=flow_run, error_logger=flow_run_logger(flow_run))  # type: ignore[arg-type]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"config": "quickstart", "overrides": "loops.main.num_steps=banana"},
            "1 problem in the field overrides of the form:\n  loops.main.num_steps: found 'banana'",
        ),
        (
            {"config": "quickstart", "overrides": "seed=1\nlops.main.num_stepps=5"},
            'unknown setting "lops.main.num_stepps" (lops.main.num_stepps=5); did you mean "loops.main.num_steps"?',
        ),
        ({"config": "quickstart", "name": "MyRun"}, """name (name): found 'MyRun', expected at most 63 lower-case"""),
        ({"config": "no-such-config"}, "no-such-config"),
        ({"config": "quickstart", "steps": -3}, "steps (loops.main.num_steps): found -3"),
    ],
)
def test_wrong_input_is_reported_without_a_traceback(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: str
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(harness.site.home))
    with logged() as read:
        with pytest.raises(FailedRun):
            as_a_worker_does(given)
        name, message, log = read()
    assert name == "Failed"
    assert expected in message
    assert "quickstart.toml" not in message, "the form is to blame"
    assert expected in log, "whole, not as one line with escapes"
    assert "Traceback" not in log
    assert not harness.site.runs_dir.exists() or not any(harness.site.runs_dir.iterdir())


@pytest.mark.usefixtures("server")
def test_a_reconcile_flow_started_by_hand_refers_to_the_site_daemon() -> None:
    with logged() as read:
        with pytest.raises(FailedRun):
            reconcile.rlhf_reconcile()
        name, message, log = read()
    assert (name, "carried out by the site daemon" in message) == ("Failed", True)
    assert "Traceback" not in log


@pytest.mark.usefixtures("server")
def test_of_the_rounds_that_find_nothing_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: one that repairs something stays too. Otherwise the runs of people would be on the second page."""
    reconcile.register()
    action = ReconcileAction(ActionKind.ADOPT, "a-run", "nothing drives it")
    repaired = [ActionResult(action, done=True, message="adopted")]
    with api_client() as client:
        deployment = client.read_deployment_by_name(reconcile.DEPLOYMENT)
        due = []
        for results in ([], [], repaired, []):
            due.append(client.create_flow_run_from_deployment(deployment.id))
            monkeypatch.setattr(reconcile, "_due", lambda: due[-1])
            reconciler = Mock(poll=Mock(return_value=[]), carry_out=Mock(return_value=results))
            assert reconcile.carry_out_round(reconciler, lambda: True, False) == results
        found = {one.id: one.state_name for one in client.read_flow_runs() if one.deployment_id == deployment.id}
    left = [found.get(one.id) for one in due]
    assert left == [None, None, "Completed", reconcile.AGREED]


@pytest.mark.usefixtures("server")
def test_a_failed_run_has_its_diagnosis_and_no_traceback_in_its_states(harness: ControllerHarness) -> None:
    run_dir, cause = harness.run(), "rank 1 brought 3 rows, rank 0 4"
    harness.attempts(run_dir, lambda agent: (agent.begin(), agent.end(AttemptState.FAILED, FailureKind.SHAPE, cause)))
    with logged() as read:
        with pytest.raises(RunFailed, match="shape") as failed:
            run_in_prefect(harness.controller(run_dir))
        name, message, log = read()
    assert (name, message) == ("Failed", str(failed.value))
    assert "Traceback" not in log
    messages = {one.name: one.state.message for one in task_runs_of(run_dir.run_id) if one.state is not None}
    assert messages["train attempt 1"] == cause, "the task run of the failed stage"


@pytest.mark.usefixtures("server")
def test_any_other_error_keeps_its_traceback(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the previous test: such errors must be located in our program."""

    def breaks(*arguments: Any) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setenv("RLHF_HOME", str(harness.site.home))
    monkeypatch.setattr("flows.run.run_of_the_form", breaks)
    with logged() as read:
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            rlhf_run(config="quickstart")
        name, message, log = read()
    assert name == "Failed"
    assert "a mistake of ours" in message
    assert "Traceback" in log
    assert "in _of_the_form" in log


@pytest.mark.usefixtures("server")
def test_a_blocked_run_of_a_terminal_raises_its_findings_and_fails_in_prefect(
    harness: ControllerHarness, checks: list[CheckResult]
) -> None:
    checks.append(CheckResult(id="b.check", status=CheckStatus.BLOCKED, found="no room", advice="make some"))
    run_dir = harness.run()
    with logged() as read:
        with pytest.raises(PreflightBlocked, match=r"b\.check"):
            run_in_prefect(harness.controller(run_dir))
        name, message, log = read()
    assert (name, "b.check" in message) == ("Failed", True)
    assert "Traceback" not in log
    assert not any("Prefect failed" in text for text in harness.notes.messages)


# ---------------------------------------------------------------------------------------------------------------------
# Failures, as shown in Prefect


def fails_once(harness: ControllerHarness, run_dir: RunDir) -> None:
    """The first attempt ends with an incident and evidence; the second one succeeds."""

    def fail(agent: FakeAgent) -> None:
        agent.start()
        agent.incident(FailureKind.NODE_LOST)
        folder = run_dir.attempt(1).restart(0).evidence_dir
        (folder / "stack-n1-1.txt").write_text("in all_reduce")
        agent.end(AttemptState.FAILED, FailureKind.NODE_LOST)

    harness.runs_well(run_dir, 1, fail)


def without_node3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt is planned without a node."""
    from rlhf_core.control.attempts import planning

    plan = planning.plan

    def planned(*arguments: Any, **options: Any) -> Placement:
        found = plan(*arguments, **options)
        return found.model_copy(update={"excluded_nodes": ("node3",)}) if found.attempt > 1 else found

    monkeypatch.setattr("rlhf_core.control.attempts.planning.plan", planned)


def listed_events(run_dir: RunDir) -> list[dict[str, Any]]:
    """Events about a run, as the server returns them."""
    wanted = {"filter": {"resource": {"id": [f"rlhf.run.{run_dir.run_id}"]}, "order": "ASC"}, "limit": 50}
    with api_client() as client:
        found: list[dict[str, Any]] = client.request("POST", "/events/filter", json=wanted).json()["events"]
        return found


def related_flow_run(event: dict[str, Any]) -> str:
    """Id of the flow run that an event is related to."""
    (flow_run,) = [one for one in event["related"] if one["prefect.resource.role"] == "flow-run"]
    return str(flow_run["prefect.resource.id"]).removeprefix("prefect.flow-run.")


def events_when_all_are_there(run_dir: RunDir, number: int) -> dict[str, dict[str, Any]]:
    """Wait for all events: the server writes them in batches, a few seconds late."""
    for _ in range(200):
        found = listed_events(run_dir)
        if len(found) >= number:
            break
        time.sleep(0.1)
    assert len(found) == number, [event["event"] for event in found]
    return {event["event"]: event for event in found}


@pytest.mark.usefixtures("server")
def test_a_failure_and_its_recovery_are_shown_in_prefect(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = harness.run(make_spec(supervise={"backoff_s": 40}))
    fails_once(harness, run_dir)
    without_node3(monkeypatch)
    run_in_prefect(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED

    runs = task_runs(run_dir.run_id)
    assert runs["train attempt 1"] == "Failed"
    assert runs["train attempt 2 - excluding node3"] == "Completed"
    (wait,) = [name for name in runs if name.startswith("wait ")]
    decision = read_record(run_dir).attempts[1].decision
    assert decision is not None
    assert wait.endswith(f"s before attempt 2 - {decision.reason}"[-60:])
    assert runs[wait] == "Completed"

    artifact = Artifact.get(artifact_key(run_dir.run_id, "incidents"))
    assert artifact is not None
    text = str(artifact.data)
    assert "## node_lost" in text
    assert "> it was node_lost" in text
    assert "rank 1 on node n1" in text
    assert "| decision | new attempt (by the controller)" in text
    assert "in all_reduce" in text, "a browser does not follow a link to a file: its content is shown here"
    assert f"`{run_dir.attempt(1).restart(0).evidence_dir}`" in text
    assert "file://" not in text

    moves = ["preflight", "queued", "evaluating", "completed"]
    found = events_when_all_are_there(run_dir, 2 + len(moves))
    assert {f"rlhf.run.{state}" for state in moves} < found.keys()
    end = found["rlhf.run.completed"]
    assert set(end["payload"]) == {"run_id", "name", "owner", "state", "url", "run_dir", "message"}
    assert end["payload"]["state"] == "completed"
    assert end["payload"]["url"].endswith(related_flow_run(end))
    incident, made = found["rlhf.incident.node_lost"], found["rlhf.decision.new_attempt"]
    assert incident["payload"]["suspect_ranks"] == "1"
    assert made["payload"]["reason"] == decision.reason
    assert all(isinstance(value, str) for event in (incident, made) for value in event["payload"].values())
    assert any(one["prefect.resource.role"] == "flow-run" for one in incident["related"])

    # A later controller, in a flow run of its own, publishes nothing twice.
    harness.scheduler.end_all()
    run_in_prefect(harness.controller(run_dir, resumed=True))
    emit_event("rlhf.test.after", {"prefect.resource.id": f"rlhf.run.{run_dir.run_id}"})
    number = 2 + len(moves) + 1
    assert "rlhf.test.after" in events_when_all_are_there(run_dir, number), "no more than before and this one"


@pytest.mark.usefixtures("server", "drawn_curves")
def test_a_run_without_incidents_has_all_pages_but_theirs_and_no_events_of_them(harness: ControllerHarness) -> None:
    """With the negative control of the previous test."""
    run_dir = harness.completed(run_in_prefect)
    assert read_record(run_dir).state is RunState.COMPLETED
    assert state_of(run_dir.run_id) == "Completed"
    names = ("progress", "curves", "checks", "result", "incidents")
    progress, curves, checks, result, incidents = (Artifact.get(artifact_key(run_dir.run_id, name)) for name in names)
    assert progress is not None
    assert (progress.type, progress.data) == ("progress", 100.0)
    assert str(progress.description).startswith("**completed**")
    assert curves is not None
    assert curves.type == "image"
    assert str(curves.data).startswith("data:image/png;base64,")
    assert len(versions(run_dir, "progress")) == len(versions(run_dir, "curves")) == 1, "changed in place"
    assert checks is not None
    assert str(checks.data) == "## Passed\n\n- **a.check** (preflight): well.\n"
    assert result is not None
    assert run_dir.run_id in str(result.data)
    assert "+0.700" in str(result.data)
    assert incidents is None
    assert not any(name.startswith("wait ") for name in task_runs(run_dir.run_id))
    found = events_when_all_are_there(run_dir, 4)
    assert not any(re.match(r"rlhf\.(incident|decision)", name) for name in found)


def versions(run_dir: RunDir, what: str) -> list[Any]:
    wanted = {"artifacts": {"key": {"any_": [artifact_key(run_dir.run_id, what)]}}}
    with api_client() as client:
        found: list[Any] = client.request("POST", "/artifacts/filter", json=wanted).json()
        return found


@pytest.mark.usefixtures("server")
def test_a_restart_in_place_is_a_task_run_and_the_log_has_it(harness: ControllerHarness) -> None:
    """It happens in the middle of a stage, which continues and succeeds."""
    run_dir = harness.run()

    def restarts(request: JobRequest) -> None:
        agent = FakeAgent(run_dir)
        agent.start()
        agent.step(1)
        agent.incident(FailureKind.HANG)
        made = decision_of(Action.RESTART_IN_PLACE, reason="it may go well {this} time")
        write_model(run_dir.attempt(1).restart(0).decision(0), made)
        FakeAgent(run_dir, restart=1).whole_run()

    harness.scheduler.on_submit = restarts
    # Opened like `rlhf run` does: the journal records which flow run drives, and since when.
    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: True}):
        run_in_prefect(harness.controller(run_dir, flow_run=None))
    assert [text for text in harness.notes.messages if "could not be published" in text] == []
    runs = task_runs(run_dir.run_id)
    assert runs["restart 1 in attempt 1 - it may go well {this} time"] == "Completed"
    assert runs["train attempt 1"] == "Completed"
    number = len(task_runs_of(run_dir.run_id))
    publish_again(harness, run_dir)
    assert len(task_runs_of(run_dir.run_id)) == number, "publishing twice makes one task run"
    lines = log_of(run_dir.run_id)
    assert "begins: train attempt 1" in lines
    assert "hang: it was hang" in lines
    assert any(line.startswith("decision: restart in place (by the agent): it may go well") for line in lines)
    states = [line for line in lines if line.startswith("run is ")]
    assert [line.split()[2] for line in states] == ["preflight:", "queued:", "evaluating:", "completed:"]


def publish_again(harness: ControllerHarness, run_dir: RunDir) -> None:
    """Publish everything about a run, like the site daemon."""
    started = [line.event for line in read_timeline(run_dir).lines if isinstance(line.event, ControllerStarted)]
    publication = artifacts.publication_of(run_dir, harness.store, FlowRunRef(started[-1].flow_run_id, run_dir.run_id))
    assert len(publication.restarts) == 1
    artifacts.publish(publication)


def log_of(flow_run: str) -> list[str]:
    """Log lines of a flow run, in order."""
    APILogWorker.drain_all(timeout=30)  # they are sent in batches, a few seconds late
    with api_client() as client:
        (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[flow_run])))
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[found.id])).model_dump(mode="json")
        answer = client.request("POST", "/logs/filter", json={"logs": wanted, "sort": "TIMESTAMP_ASC"})
        return [line["message"] for line in answer.json()]


@pytest.mark.usefixtures("server")
def test_files_that_the_publisher_cannot_read_do_not_stop_the_run(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(run_dir: RunDir) -> None:
        raise OSError("stale file handle")

    for reader in (publisher, progress):
        monkeypatch.setattr(reader, "read_timeline", unreadable)
    monkeypatch.setattr(publisher, "LAST_RETRY_INTERVAL_S", 0.05)
    run_dir = harness.completed(run_in_prefect)
    assert state_of(run_dir.run_id) == "Completed"
    assert any("stale file handle" in text for text in harness.notes.messages)


@pytest.mark.usefixtures("server")
def test_work_that_prefect_did_not_start_is_done_without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Prefect returns the state instead of raising, a task run that never began must not look like a started one."""
    monkeypatch.setattr("flows.tasks._task", lambda *arguments: lambda return_state: Crashed(message="no slot"))
    done, messages = [], []
    TaskRunner(messages.append).run(Step(StageName.TRAIN, "train attempt 1", lambda: done.append(1)))
    assert done == [1]
    assert "no slot" in messages[0]


@pytest.mark.usefixtures("server")
def test_existing_events_are_queried_from_the_server(harness: ControllerHarness) -> None:
    """It forgets within minutes that it has seen an event, and would trigger an automation again."""
    run_dir = harness.completed()
    nobody = FlowRunRef("", "")
    found = events_of(read_timeline(run_dir), run_dir.read_spec(), nobody)
    with api_client() as client:
        assert unpublished(client, found) == found
        publish_events(client, found[:2], run_dir.run_id, nobody)
        events_when_all_are_there(run_dir, 2)
        assert unpublished(client, found) == found[2:]


@pytest.mark.usefixtures("server")
def test_a_part_refused_by_prefect_does_not_affect_the_others(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    upsert = artifacts._upsert

    def refuses(client: Any, publication: Any, artifact: artifacts.RunArtifact, newest: Any) -> list[str]:
        if artifact.name == "checks":
            raise ValueError("too large")
        return upsert(client, publication, artifact, newest)

    monkeypatch.setattr(artifacts, "_upsert", refuses)
    monkeypatch.setattr(publisher, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(publisher, "LAST_RETRY_INTERVAL_S", 0.05)
    run_dir = harness.completed(run_in_prefect)
    assert Artifact.get(artifact_key(run_dir.run_id, "checks")) is None
    assert Artifact.get(artifact_key(run_dir.run_id, "result")) is not None
    assert "rlhf.run.completed" in events_when_all_are_there(run_dir, 4)


def test_a_server_that_accepts_connections_and_never_answers_changes_nothing(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "SHUTDOWN_TIMEOUT_S", 0.2)
    plain = journal_of(harness, drive)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"http://127.0.0.1:{mute.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: address}):
            assert journal_of(harness, drive_with_a_publisher) == plain
        mute.settimeout(60)
        mute.accept()[0].close()  # control: it was asked


def drive_with_a_publisher(controller: Controller) -> None:
    """Publish the run while it is driven, without Prefect's engine."""
    flow_run = FlowRunRef("0d6f2a5e-0000-0000-0000-000000000000", controller.run_dir.run_id)
    at_work = publisher.Publisher(controller, flow_run, logging.getLogger("test"), lambda text: None)
    at_work.start()
    drive(controller)
    at_work.close()


@pytest.mark.usefixtures("server")
def test_everything_missed_by_a_server_is_published_when_it_is_back(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []
    publish = publisher.publish

    def away_twice(publication: artifacts.Publication) -> list[str]:
        tries.append(publication)
        if len(tries) <= 2:
            raise ConnectionError("no server")
        return publish(publication)

    monkeypatch.setattr(publisher, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(publisher, "publish", away_twice)
    run_dir = harness.run()
    fails_once(harness, run_dir)
    harness.scheduler.on_status = lambda: time.sleep(0.2)
    run_in_prefect(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert Artifact.get(artifact_key(run_dir.run_id, "incidents")) is not None
    messages = [text for text in harness.notes.messages if "could not be published" in text]
    assert len(messages) == 1, "once per outage"
    assert {"rlhf.incident.node_lost", "rlhf.decision.new_attempt"} < set(events_when_all_are_there(run_dir, 6))


def journal_of(harness: ControllerHarness, run: Callable[[Controller], None]) -> list[str]:
    """The journal of a run with a failure and a recovery, line by line."""
    harness.scheduler.submitted.clear()
    run_dir = harness.run()
    fails_once(harness, run_dir)
    run(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    return [line.event.kind for line in read_models(run_dir.control, JournalLine)]


def test_a_dead_server_changes_nothing(harness: ControllerHarness) -> None:
    """No process listens at the address: the run is the same, line by line, as without Prefect."""
    plain = journal_of(harness, drive)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert journal_of(harness, run_in_prefect) == plain


@pytest.mark.usefixtures("server")
def test_a_server_that_dies_or_never_answers_when_something_is_published_changes_nothing(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = journal_of(harness, drive)
    tried: set[str] = set()
    never = threading.Event()

    def silent(*arguments: Any) -> None:
        tried.add("silent")
        never.wait()

    def dead(*arguments: Any) -> None:
        tried.add("dead")
        raise ConnectionError("no server")

    monkeypatch.setattr(publisher, "SHUTDOWN_TIMEOUT_S", 0.2)
    for broken in (silent, dead):
        monkeypatch.setattr(artifacts, "_upsert", broken)
        assert journal_of(harness, run_in_prefect) == plain, broken.__name__
    never.set()
    assert tried == {"silent", "dead"}


def test_names_of_task_runs_fit_a_list_and_hold_no_template() -> None:
    assert shorten("train attempt 2") == "train attempt 2"
    assert len(shorten("x" * 1000)) == MAX_TITLE
    assert shorten("wait 3 s - first line\nsecond line") == "wait 3 s - first line..."


def test_the_artifact_key_is_one_that_prefect_takes() -> None:
    assert re.fullmatch(r"[a-z0-9-]+", artifact_key("my_run-20260101-000000-abcdef", "incidents"))
