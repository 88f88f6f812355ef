"""Flow runs that are retried or killed at any point: each continues its run, with one job per attempt."""

from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from control_fakes import FakeAgent
from harness import ControllerHarness, left_behind
from kill_points import Killed, Points

from flows import run as flow_module
from flows.form import read_form
from flows.run import run_of_the_form
from rlhf_core.control.controller import opened
from rlhf_core.control.driving_flow_run import DrivingFlowRun
from rlhf_core.control.steps import drive
from rlhf_core.errors import RunFailed
from rlhf_core.history.queries import show_run
from rlhf_core.history.queries.open_runs import runs_of_flow_runs
from rlhf_core.launch import prepare, start
from rlhf_core.launch.journal import read_record
from rlhf_core.launch.lease import IfHeld
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.attempts import AttemptState, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind

OVERRIDES = "loops.main.num_steps=8\nloops.warm_start.num_steps=2\nsupervise.backoff_s=0"


@pytest.fixture
def well(harness: ControllerHarness) -> ControllerHarness:
    """Every job succeeds; agents start when the job is queried."""
    accepted: list[JobRequest] = []

    def begin() -> None:
        while accepted:
            request = accepted.pop(0)
            FakeAgent(RunDir.of(harness.site.runs_dir, request.run_id), request.placement.attempt).whole_run()

    harness.scheduler.on_submit = accepted.append
    harness.scheduler.on_status = begin
    return harness


def a_flow_run() -> DrivingFlowRun:
    return DrivingFlowRun(str(uuid4()), "http://ui/runs/flow-run/1", utc_now())


def process(harness: ControllerHarness, flow_run: DrivingFlowRun) -> RunDir:
    """Do the work of a flow run's process, without Prefect around it."""
    form = read_form({"config": "quickstart", "overrides": OVERRIDES, "tags": "canary", "owner": "ann"})
    run_dir, resumed = run_of_the_form(form, harness.site, flow_run)
    with opened(
        run_dir, harness.site, harness.store, resumed=resumed, flow_run=flow_run, if_held=IfHeld.FAIL
    ) as controller:
        controller.clock, controller.sleep = harness.clock, harness.clock.sleep
        drive(controller)
    return run_dir


def runs_of(harness: ControllerHarness) -> list[Path]:
    return [path for path in harness.site.runs_dir.iterdir() if not path.name.startswith(".")]


def one_life(harness: ControllerHarness, flow_run: DrivingFlowRun, point: int | None) -> int:
    points = Points(point)
    with points.at_every_effect(harness.scheduler, start, prepare):
        try:
            process(harness, flow_run)
        except Killed:
            assert point is not None
    return points.passed


def test_killed_around_every_effect_a_flow_run_makes_one_run_and_one_job(well: ControllerHarness) -> None:
    """From before the creation of the run directory to after the last line of the journal."""
    points = Points(None, lambda: left_behind(well))
    with points.at_every_effect(well.scheduler, start, prepare):
        process(well, a_flow_run())
    assert points.passed >= 20
    for point in points.distinct:
        flow_run = a_flow_run()
        before, jobs = len(runs_of(well)), len(well.scheduler.submitted)
        assert one_life(well, flow_run, point) == point
        one_life(well, flow_run, None)
        assert len(runs_of(well)) == before + 1, point
        assert len(well.scheduler.submitted) == jobs + 1, point
        run_dir = flow_run.run_dir(well.site.runs_dir)
        assert run_dir is not None
        assert read_record(run_dir).state is RunState.COMPLETED, point
        assert runs_of_flow_runs(well.store, [flow_run.id])[flow_run.id][0] == run_dir.run_id, point


def test_without_the_link_a_kill_gives_two_runs(well: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the test above would detect it."""
    points = one_life(well, a_flow_run(), None)
    make = flow_module.new_run
    monkeypatch.setattr(flow_module, "new_run", lambda *given, flow_run, **more: make(*given, **more))
    before, jobs = len(runs_of(well)), len(well.scheduler.submitted)
    flow_run = a_flow_run()
    one_life(well, flow_run, points - 3)
    one_life(well, flow_run, None)
    assert len(runs_of(well)) == before + 2
    assert len(well.scheduler.submitted) == jobs + 2


def test_a_retried_failed_run_continues_with_its_next_attempt(harness: ControllerHarness) -> None:
    flow_run = a_flow_run()
    broken = [True]

    def behave(request: JobRequest) -> None:
        agent = FakeAgent(RunDir.of(harness.site.runs_dir, request.run_id), request.placement.attempt)
        if not broken:
            agent.whole_run()
            return
        agent.begin()
        agent.end(AttemptState.FAILED, FailureKind.SHAPE)

    harness.scheduler.on_submit = behave
    with pytest.raises(RunFailed, match="shape"):
        process(harness, flow_run)
    broken.clear()
    run_dir = process(harness, flow_run)
    assert runs_of(harness) == [run_dir.root]
    assert [request.placement.attempt for request in harness.scheduler.submitted] == [1, 2]
    record = read_record(run_dir)
    assert (record.state, record.first_attempt) == (RunState.COMPLETED, 2)
    shown = show_run(harness.store, run_dir.run_id)
    assert [one["flow_run_id"] for one in shown.controllers] == [flow_run.id, flow_run.id]
    assert {one["flow_run_url"] for one in shown.controllers} == {flow_run.url}
    assert (shown.run["owner"], shown.run["tags"]) == ("ann", ["canary"])


def test_a_run_continued_by_its_id_has_both_flow_runs(well: ControllerHarness) -> None:
    first, second = a_flow_run(), a_flow_run()
    one_life(well, first, 12)
    run_dir = first.run_dir(well.site.runs_dir)
    assert run_dir is not None
    found, resumed = run_of_the_form(read_form({"config": "quickstart", "run_id": run_dir.run_id}), well.site, second)
    assert (found, resumed) == (run_dir, True)
    drive(well.controller(found, resumed=True, flow_run=second))
    assert runs_of_flow_runs(well.store, [second.id])[second.id][0] == run_dir.run_id
    controllers = show_run(well.store, run_dir.run_id).controllers
    assert [one["flow_run_id"] for one in controllers] == [first.id, second.id]
    assert runs_of_flow_runs(well.store, ["unknown"]) == {}


def test_an_adoption_by_the_reconciler_does_not_count_as_a_resume(well: ControllerHarness) -> None:
    """Its retry budget continues, and a request to end it still counts.

    A user who presses Retry starts a new budget.
    """
    one_life(well, first := a_flow_run(), 12)
    run_dir = first.run_dir(well.site.runs_dir)
    assert run_dir is not None
    form = read_form({"run_id": run_dir.run_id})
    assert run_of_the_form(form, well.site, replace(a_flow_run(), adopts=True)) == (run_dir, False)
    assert run_of_the_form(form, well.site, replace(a_flow_run(), adopts=False)) == (run_dir, True)


def test_a_controller_that_learns_its_flow_run_late_is_in_the_journal_once(well: ControllerHarness) -> None:
    run_dir = well.run()
    flow_run = replace(a_flow_run(), url="")
    with opened(run_dir, well.site, well.store, flow_run=None, if_held=IfHeld.FAIL) as controller:
        assert show_run(well.store, run_dir.run_id).controllers == []
        controller.record_controller(flow_run)
        controller.record_controller(DrivingFlowRun())
        assert runs_of_flow_runs(well.store, [flow_run.id])[flow_run.id][0] == run_dir.run_id
    assert len(show_run(well.store, run_dir.run_id).controllers) == 1
