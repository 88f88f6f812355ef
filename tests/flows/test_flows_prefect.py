"""The run as a Prefect flow: what is seen there, and that a server that is lost does not matter."""

import json
from collections.abc import Iterator

import pytest
from control_fakes import FakeAgent
from desk import Desk

from flows.run import RESULT_KEY, rlhf_run, run_in_prefect
from flows.tasks import TaskCaller, Work
from rlhf_core.config import describe_fields
from rlhf_core.errors import RunFailed
from rlhf_core.launch.journal import read_record
from rlhf_core.schemas.attempts import AttemptState, RunState, StageName
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.resources import Role

# ---------------------------------------------------------------------------------------------------------------------
# Without a server


def test_the_form_is_flat_and_explains_every_setting() -> None:
    properties = rlhf_run.parameters.model_dump()["properties"]
    assert set(properties) == {"config", "overrides", "run_id"}
    assert {one["type"] for one in properties.values()} == {"string", "array"}
    assert not any("anyOf" in one or "$ref" in json.dumps(one) for one in properties.values())
    for field in describe_fields():
        assert f"`{field.name}`" in properties["overrides"]["description"]
        assert field.meaning in properties["overrides"]["description"]


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
    assert asked == ["train attempt 1"], "a server that was lost is not asked again"


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
    from rlhf_core.errors import RunCancelled

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


@pytest.mark.usefixtures("server")
def test_a_deployment_starts_a_run_from_its_parameters(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a session handed over, as under a Prefect worker."""
    monkeypatch.setenv("RLHF_HOME", str(desk.site.home))

    def whole(request: object) -> None:
        (path,) = desk.site.runs_dir.iterdir()
        from rlhf_core.run_dir import RunDir

        FakeAgent(RunDir(path)).whole_run()

    desk.scheduler.on_submit = whole
    rlhf_run(config="quickstart", overrides=["train.num_steps=3", "sft.num_steps=1"])
    (path,) = desk.site.runs_dir.iterdir()
    assert flow_runs()[path.name] == "Completed"
