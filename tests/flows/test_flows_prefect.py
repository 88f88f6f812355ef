"""The run as a Prefect flow: what is seen there, and that a server that is lost does not matter."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from control_fakes import FakeAgent, make_spec
from desk import Desk

from flows import view
from flows.run import RESULT_KEY, rlhf_run, run_in_prefect
from flows.session import Session
from flows.stages import drive
from flows.tasks import MAX_TITLE, TaskCaller, Work, shorten
from flows.view import artifact_key
from rlhf_core.errors import RunCancelled, RunFailed
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir import RunDir, read_models
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.attempts import AttemptState, RunState, StageName
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import JournalLine
from rlhf_core.schemas.resources import Placement, Role

# ---------------------------------------------------------------------------------------------------------------------
# Without a server


class PrefectError(Exception):
    """What Prefect raises when its server is gone."""


def test_work_that_was_done_is_not_done_again_when_prefect_fails_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done, said = [], []

    def fails_afterwards(title: str, name: StageName, work: Work) -> None:
        work()
        raise PrefectError("gone")

    monkeypatch.setattr("flows.tasks.as_task", fails_afterwards)
    call = TaskCaller(said.append)
    call("train attempt 1", StageName.TRAIN, lambda: done.append(1))
    assert done == [1]
    assert "goes on without it" in said[0]


def test_work_is_done_plainly_when_prefect_fails_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done, asked, said = [], [], []

    def fails_at_once(title: str, name: StageName, work: Work) -> None:
        asked.append(title)
        raise PrefectError("gone")

    monkeypatch.setattr("flows.tasks.as_task", fails_at_once)
    call = TaskCaller(said.append)
    call("train attempt 1", StageName.TRAIN, lambda: done.append(1))
    call("evaluate", StageName.EVALUATE, lambda: done.append(2))
    assert done == [1, 2]
    assert asked == ["train attempt 1"], "a server that does not answer is not asked again"


def test_our_own_errors_pass_through_and_do_not_look_like_a_lost_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def carries_out(title: str, name: StageName, work: Work) -> None:
        work()

    def breaks() -> None:
        raise RunFailed("the diagnosis")

    monkeypatch.setattr("flows.tasks.as_task", carries_out)
    call = TaskCaller(lambda text: pytest.fail(text))
    with pytest.raises(RunFailed, match="the diagnosis"):
        call("train attempt 1", StageName.TRAIN, breaks)
    assert not call.lost


# ---------------------------------------------------------------------------------------------------------------------
# With Prefect's own test server


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


def flow_runs() -> dict[str, str]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return {one.name: one.state_name for one in client.read_flow_runs()}


def task_runs(flow_run: str) -> dict[str, str]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    with get_client(sync_client=True) as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[flow_run])))
        return {one.name: one.state_name for one in found}


@pytest.mark.usefixtures("server")
def test_a_run_is_seen_in_prefect_stage_by_stage(desk: Desk) -> None:
    from prefect.artifacts import Artifact

    run_dir = desk.run()
    desk.scheduler.on_submit = lambda request: FakeAgent(run_dir).whole_run()
    run_in_prefect(desk.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert flow_runs()[run_dir.run_id] == "Completed"
    artifact = Artifact.get(RESULT_KEY)
    assert artifact is not None
    assert run_dir.run_id in str(artifact.data)
    assert "+0.700" in str(artifact.data)


@pytest.mark.usefixtures("server")
def test_a_failed_run_raises_its_diagnosis_and_is_failed_in_prefect(desk: Desk) -> None:
    run_dir = desk.run()

    def fails(request: object) -> None:
        FakeAgent(run_dir).begin()
        FakeAgent(run_dir).end(AttemptState.FAILED, FailureKind.SHAPE)

    desk.scheduler.on_submit = fails
    with pytest.raises(RunFailed, match="shape"):
        run_in_prefect(desk.controller(run_dir))
    assert flow_runs()[run_dir.run_id] == "Failed"


@pytest.mark.usefixtures("server")
def test_a_cancelled_run_is_cancelled_in_prefect(desk: Desk) -> None:
    run_dir = desk.run()

    def trains(request: object) -> None:
        FakeAgent(run_dir).begin()
        FakeAgent(run_dir).role(Role.TRAINER)

    desk.scheduler.on_submit = trains
    desk.notes.stop = lambda: len(desk.notes.looks) > 2
    with pytest.raises(RunCancelled):
        run_in_prefect(desk.controller(run_dir))
    assert flow_runs()[run_dir.run_id] == "Cancelled"


@pytest.mark.usefixtures("server")
def test_a_server_that_is_lost_in_the_middle_does_not_stop_the_run(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import tasks

    run_dir = desk.run()
    desk.scheduler.on_submit = lambda request: FakeAgent(run_dir).whole_run()
    as_task = tasks.as_task

    def lost_at_training(title: str, name: StageName, work: Work) -> None:
        if name is StageName.TRAIN:
            raise ConnectionError("no server")
        as_task(title, name, work)

    monkeypatch.setattr("flows.tasks.as_task", lost_at_training)
    run_in_prefect(desk.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert any("goes on without it" in text for text in desk.notes.sayings)
    seen = task_runs(run_dir.run_id)
    assert "train attempt 1" not in seen
    assert seen["evaluate"] == "Completed", "a server that is back is used again"


@pytest.mark.usefixtures("server")
def test_a_trial_is_a_task_run_with_its_own_name(desk: Desk, checks: list[CheckResult]) -> None:
    checks.append(CheckResult(id="trial.needed", status=CheckStatus.WARNING, found="data changed"))
    run_dir = desk.run(make_spec(preflight={"trial": "run"}))
    desk.scheduler.on_submit = lambda request: FakeAgent(RunDir.of(desk.site.runs_dir, request.run_id)).whole_run()
    run_in_prefect(desk.controller(run_dir))
    assert task_runs(run_dir.run_id)["trial on one node"] == "Completed"
    assert flow_runs()[run_dir.run_id] == "Completed"
    assert len(desk.scheduler.submitted) == 2


@pytest.mark.usefixtures("server")
def test_a_deployment_starts_a_run_from_its_parameters(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a session handed over, as under a Prefect worker."""
    monkeypatch.setenv("RLHF_HOME", str(desk.site.home))

    def whole(request: object) -> None:
        (path,) = desk.site.runs_dir.iterdir()
        FakeAgent(RunDir(path)).whole_run()

    desk.scheduler.on_submit = whole
    rlhf_run(config="quickstart", overrides="train.num_steps=3\nsft.num_steps=1")
    (path,) = desk.site.runs_dir.iterdir()
    assert flow_runs()[path.name] == "Completed"


# ---------------------------------------------------------------------------------------------------------------------
# What went wrong, as seen in Prefect


def fails_once(desk: Desk, run_dir: RunDir) -> None:
    """The first attempt ends with an incident and evidence; the second one runs well."""

    def behave(request: JobRequest) -> None:
        agent = FakeAgent(run_dir, request.placement.attempt)
        if request.placement.attempt > 1:
            agent.whole_run()
            return
        agent.begin()
        agent.role(Role.TRAINER)
        agent.incident(FailureKind.NODE_LOST)
        folder = run_dir.attempt(1).restart(0).incident_dir
        (folder / "stack of rank 1.txt").write_text("in all_reduce")
        agent.end(AttemptState.FAILED, FailureKind.NODE_LOST)

    desk.scheduler.on_submit = behave


def without_node3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt is planned to go without a node."""
    from flows import stages

    plan = stages.plan

    def planned(*arguments: Any, **options: Any) -> Placement:
        found = plan(*arguments, **options)
        return found.model_copy(update={"excluded_nodes": ("node3",)}) if found.attempt > 1 else found

    monkeypatch.setattr("flows.stages.plan", planned)


def events_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """Events about a run, as the server gives them back."""
    from prefect.client.orchestration import get_client

    wanted = {"filter": {"resource": {"id": [f"rlhf.run.{run_dir.run_id}"]}, "order": "ASC"}, "limit": 50}
    with get_client(sync_client=True) as client:
        found: list[dict[str, Any]] = client.request("POST", "/events/filter", json=wanted).json()["events"]
        return found


def events_when_all_are_there(run_dir: RunDir, number: int) -> dict[str, dict[str, Any]]:
    """The server writes events in batches, some seconds late."""
    for _ in range(600):
        found = events_of(run_dir)
        if len(found) >= number:
            break
        time.sleep(0.1)
    assert len(found) == number
    return {event["event"]: event for event in found}


@pytest.mark.usefixtures("server")
def test_a_failure_and_its_recovery_are_told_in_prefect(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.artifacts import Artifact
    from prefect.events import emit_event

    run_dir = desk.run(make_spec(supervise={"backoff_s": 40}))
    fails_once(desk, run_dir)
    without_node3(monkeypatch)
    run_in_prefect(desk.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED

    runs = task_runs(run_dir.run_id)
    assert runs["train attempt 1"] == "Failed"
    assert runs["train attempt 2 - excluding node3"] == "Completed"
    (wait,) = [name for name in runs if name.startswith("wait ")]
    decision = read_record(run_dir).attempts[1].decision
    assert decision is not None
    assert wait.endswith(f"s before attempt 2 - {decision.reason}"[-60:])
    assert runs[wait] == "Completed"

    artifact = Artifact.get(artifact_key(run_dir.run_id))
    assert artifact is not None
    text = str(artifact.data)
    assert "## node_lost" in text
    assert "> it was node_lost" in text
    assert "rank 1 on n1" in text
    assert "decided (controller) | **new_attempt**" in text
    assert (run_dir.attempt(1).restart(0).incident_dir / "stack of rank 1.txt").as_uri() in text

    events = events_when_all_are_there(run_dir, 2)
    incident, made = events["rlhf.incident.node_lost"], events["rlhf.decision.new_attempt"]
    assert incident["payload"]["suspect_ranks"] == "1"
    assert made["payload"]["reason"] == decision.reason
    assert all(isinstance(value, str) for event in (incident, made) for value in event["payload"].values())
    assert any(one["prefect.resource.role"] == "flow-run" for one in incident["related"])

    # A controller that comes later, in a flow run of its own, tells nothing twice.
    desk.scheduler.end_all()
    run_in_prefect(desk.controller(run_dir, resumed=True))
    emit_event("rlhf.test.after", {"prefect.resource.id": f"rlhf.run.{run_dir.run_id}"})
    assert "rlhf.test.after" in events_when_all_are_there(run_dir, 3), "no more than the two and this one"


@pytest.mark.usefixtures("server")
def test_a_run_without_incidents_has_no_artifact_of_them_and_no_events(desk: Desk) -> None:
    """Negative control of the test before."""
    from prefect.artifacts import Artifact

    run_dir = desk.run()
    desk.scheduler.on_submit = lambda request: FakeAgent(run_dir).whole_run()
    run_in_prefect(desk.controller(run_dir))
    assert Artifact.get(artifact_key(run_dir.run_id)) is None
    table = Artifact.get(artifact_key(run_dir.run_id, "checks"))
    assert table is not None
    rows = json.loads(str(table.data))
    assert {row["check"] for row in rows} == {"a.check"}
    assert not any(name.startswith("wait ") for name in task_runs(run_dir.run_id))
    assert events_of(run_dir) == []


@pytest.mark.usefixtures("server")
def test_what_a_server_that_was_away_missed_is_told_when_it_is_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.artifacts import Artifact

    tries = []
    create = view.create_markdown_artifact

    def away_twice(text: str, **artifact: str) -> Any:
        tries.append(text)
        if len(tries) <= 2:
            raise ConnectionError("no server")
        return create(text, **artifact)

    monkeypatch.setattr(view, "AGAIN_S", 0.05)
    monkeypatch.setattr(view, "create_markdown_artifact", away_twice)
    run_dir = desk.run()
    fails_once(desk, run_dir)
    desk.scheduler.on_status = lambda: time.sleep(0.2)
    run_in_prefect(desk.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert Artifact.get(artifact_key(run_dir.run_id)) is not None
    said = [text for text in desk.notes.sayings if "could not be told of an incident" in text]
    assert len(said) == 1, "once per outage"
    assert set(events_when_all_are_there(run_dir, 2)) == {"rlhf.incident.node_lost", "rlhf.decision.new_attempt"}


def story_of(desk: Desk, run: Callable[[Session], None]) -> list[str]:
    """The journal of a run with a failure and a recovery, line by line."""
    desk.scheduler.submitted.clear()
    run_dir = desk.run()
    fails_once(desk, run_dir)
    run(desk.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    return [line.event.kind for line in read_models(run_dir.control, JournalLine)]


def test_a_dead_server_changes_nothing(desk: Desk) -> None:
    """Nothing listens at the address: the run is the same, line by line, as without Prefect."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    plain = story_of(desk, drive)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert story_of(desk, run_in_prefect) == plain


@pytest.mark.usefixtures("server")
def test_a_server_that_dies_or_never_answers_when_an_incident_is_told_changes_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = story_of(desk, drive)
    tried: set[str] = set()
    never = threading.Event()

    def silent(text: str, **artifact: str) -> None:
        tried.add("silent")
        never.wait()

    def dead(text: str, **artifact: str) -> None:
        tried.add("dead")
        raise ConnectionError("no server")

    monkeypatch.setattr(view, "FAREWELL_S", 0.2)
    for broken in (silent, dead):
        monkeypatch.setattr(view, "create_markdown_artifact", broken)
        assert story_of(desk, run_in_prefect) == plain, broken.__name__
    never.set()
    assert tried == {"silent", "dead"}


def test_names_of_task_runs_fit_a_list_and_hold_no_template() -> None:
    assert shorten("train attempt 2") == "train attempt 2"
    assert len(shorten("x" * 1000)) == MAX_TITLE
    assert shorten("wait 3 s - first line\nsecond line") == "wait 3 s - first line..."


def test_the_artifact_key_is_one_that_prefect_takes() -> None:
    assert re.fullmatch(r"[a-z0-9-]+", artifact_key("my_run-20260101-000000-abcdef"))
