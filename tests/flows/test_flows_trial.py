"""Trials before a run: made once, cancelled with the run, and blocking it when they fail."""

from collections.abc import Callable
from typing import Any

import pytest
from control_fakes import FakeAgent, make_spec
from harness import ControllerHarness, live, undisturbed
from kill_points import Killed

from rlhf_core.control import stages
from rlhf_core.control.cancel import cancel_run
from rlhf_core.control.controller import Controller
from rlhf_core.control.steps import drive, steps
from rlhf_core.control.views.timeline import trials_of
from rlhf_core.errors import LeaseLost, PreflightBlocked, RunCancelled, RunFailed
from rlhf_core.files.whole import write_model
from rlhf_core.history import queries
from rlhf_core.launch import prepare
from rlhf_core.launch.journal import read_record
from rlhf_core.preflight.trial import Rung, trial_spec
from rlhf_core.run_dir.run import RunDir, new_run_id, run_dirs
from rlhf_core.scheduler.base import JobRequest, JobState
from rlhf_core.schemas.attempts import AttemptState, Role, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import TrialPlanned
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.run import RunSpec

NUM_NODES = 4
CHANGED = CheckResult(id="trial.needed", status=CheckStatus.WARNING, found="data changed", expected="a trial")


@pytest.fixture
def site(harness: ControllerHarness, checks: list[CheckResult], monkeypatch: pytest.MonkeyPatch) -> ControllerHarness:
    """A cluster of four nodes, on which something has changed since the last successful run."""
    harness.scheduler.nodes = tuple(f"n{number}" for number in range(1, NUM_NODES + 1))
    checks.append(CHANGED)
    monkeypatch.setattr("rlhf_core.control.cancel.CANCEL_TIMEOUT_S", 0.0)
    return harness


def wanted(trial: str = "run", num_nodes: int = NUM_NODES, **sections: Any) -> RunSpec:
    resources = {"num_nodes": num_nodes, "ranks_per_node": 2}
    return make_spec(resources=resources, preflight={"trial": trial}, train={"num_steps": 500}, **sections)


def agent_of(harness: ControllerHarness, request: JobRequest) -> FakeAgent:
    return FakeAgent(RunDir.of(harness.site.runs_dir, request.run_id), attempt=request.placement.attempt)


def behaves(harness: ControllerHarness, act: Callable[[FakeAgent, int], None]) -> None:
    """Define the behaviour of the agents of every job, given its number of nodes."""
    harness.scheduler.on_submit = lambda request: act(agent_of(harness, request), request.placement.num_nodes)


def ready(harness: ControllerHarness, act: Callable[[FakeAgent, int], None], spec: RunSpec | None = None) -> RunDir:
    """A run, of which the agents of every job behave like this."""
    behaves(harness, act)
    return harness.run(spec or wanted())


def goes_well(agent: FakeAgent, num_nodes: int) -> None:
    agent.start()
    for step in (1, 2, 3):
        agent.step(step, **{"time/step_s": 2.0 * num_nodes})
    agent.checkpoint(3)
    agent.role(Role.EVALUATOR)
    agent.end(AttemptState.COMPLETED)


def breaks(agent: FakeAgent, num_nodes: int) -> None:
    agent.start()
    agent.fail(FailureKind.REWARD_FUNCTION)


def trains_for_ever(agent: FakeAgent, num_nodes: int) -> None:
    agent.start()


def sizes(harness: ControllerHarness) -> list[int]:
    return [request.placement.num_nodes for request in harness.scheduler.submitted]


def verdicts(harness: ControllerHarness, run_dir: RunDir) -> dict[str, tuple[str, str]]:
    checks = queries.show_run(harness.store, run_dir.run_id).checks
    return {
        one["id"]: (one["status"], one["found"]) for one in checks if one["id"] in ("trial.one_node", "trial.all_nodes")
    }


# ---------------------------------------------------------------------------------------------------------------------
# The ladder


def test_a_run_is_tried_on_one_node_and_then_on_all_before_it_starts(site: ControllerHarness) -> None:
    run_dir = ready(site, goes_well)
    drive(site.controller(run_dir))
    assert sizes(site) == [1, NUM_NODES, NUM_NODES]
    one, all_nodes = trials_of(run_dir)
    assert [request.run_id for request in site.scheduler.submitted] == [one.run_id, all_nodes.run_id, run_dir.run_id]
    assert verdicts(site, run_dir) == {
        "trial.one_node": ("passed", f"{one.run_id}: 3 steps on 1 node, 2 s per step"),
        "trial.all_nodes": ("passed", f"{all_nodes.run_id}: 3 steps on 4 nodes, 8 s per step"),
    }
    shown = queries.show_run(site.store, run_dir.run_id)
    assert [check["id"] for check in shown.checks] == ["a.check", "trial.needed", *verdicts(site, run_dir)]
    stages = [(stage["name"], stage["state"], stage["message"]) for stage in shown.stages]
    assert stages == [
        ("preflight", "completed", ""),
        ("preflight", "completed", "trial on one node"),
        ("preflight", "completed", "trial on all 4 nodes"),
        ("allocate", "completed", ""),
        ("train", "completed", ""),
        ("evaluate", "completed", ""),
    ]
    for trial in (one, all_nodes):
        row = queries.show_run(site.store, trial.run_id).run
        assert (row["name"], row["state"], row["trial_of"]) == ("small", "completed", run_dir.run_id)
    assert [run["run_id"] for run in queries.list_runs(site.store)] == [run_dir.run_id]
    assert "trial on all 4 nodes: train attempt 1" in site.notes.titles
    assert site.notes.totals == [5, 502, 5, 502], "the steps shown are those of the trial, then again of the run"


@pytest.mark.parametrize(
    ("problem", "is_skipped"), [("memory.trainer", True), ("disk.space", False)], ids=["memory", "control: disk"]
)
def test_a_model_that_needs_the_memory_of_all_nodes_is_only_tried_on_all(
    site: ControllerHarness, monkeypatch: pytest.MonkeyPatch, problem: str, is_skipped: bool
) -> None:
    made = stages.make_checks

    def checked(spec: RunSpec, *arguments: Any, **options: Any) -> list[CheckResult]:
        results = made(spec, *arguments, **options)
        lacks = CheckResult(id=problem, status=CheckStatus.BLOCKED, found="80 GiB", expected="less")
        return [*results, lacks] if spec.resources.num_nodes == 1 else results

    monkeypatch.setattr(stages, "make_checks", checked)
    run_dir = ready(site, goes_well)
    if not is_skipped:
        with pytest.raises(PreflightBlocked, match="trial on one node failed"):
            drive(site.controller(run_dir))
        return
    drive(site.controller(run_dir))
    assert sizes(site) == [NUM_NODES, NUM_NODES]
    assert verdicts(site, run_dir)["trial.one_node"] == ("skipped", "not possible on one node: 80 GiB")
    assert verdicts(site, run_dir)["trial.all_nodes"][0] == "passed"


def test_each_trial_is_carried_out_under_its_own_name(site: ControllerHarness) -> None:
    """Prefect shows a task run for each."""
    run_dir = ready(site, goes_well)
    called: list[tuple[str, str]] = []

    for step in steps(site.controller(run_dir)):
        called.append((step.title, step.name))
        step.run()
    assert called[:4] == [
        ("preflight", "preflight"),
        ("trial on one node", "trial"),
        ("trial on all 4 nodes", "trial"),
        ("allocate attempt 1", "allocate"),
    ]


def test_one_node_is_tried_once(site: ControllerHarness) -> None:
    run_dir = ready(site, goes_well, wanted(num_nodes=1))
    drive(site.controller(run_dir))
    assert sizes(site) == [1, 1]
    assert list(verdicts(site, run_dir)) == ["trial.all_nodes"]


@pytest.mark.parametrize("trial", ["off", "propose"])
def test_no_trial_is_made_unless_requested(site: ControllerHarness, trial: str) -> None:
    run_dir = ready(site, goes_well, wanted(trial))
    drive(site.controller(run_dir))
    assert sizes(site) == [NUM_NODES]
    assert trials_of(run_dir) == []


def test_no_trial_is_made_if_nothing_has_changed(site: ControllerHarness, checks: list[CheckResult]) -> None:
    checks.remove(CHANGED)
    run_dir = ready(site, goes_well)
    drive(site.controller(run_dir))
    assert sizes(site) == [NUM_NODES]


# ---------------------------------------------------------------------------------------------------------------------
# A trial that fails


def test_a_failed_trial_keeps_the_run_from_its_nodes(site: ControllerHarness) -> None:
    run_dir = ready(site, breaks)
    with pytest.raises(PreflightBlocked, match=r"trial\.one_node: found trial on one node failed") as caught:
        drive(site.controller(run_dir))
    assert sizes(site) == [1], "one node was lent, and no more"
    (trial,) = trials_of(run_dir)
    for text in (trial.run_id, "reward_function", "suspect ranks: 1 on n1", f"rlhf resume {run_dir.run_id}"):
        assert text in str(caught.value)
    record = read_record(run_dir)
    assert (record.state, record.attempts) == (RunState.FAILED, {})
    assert verdicts(site, run_dir)["trial.one_node"][0] == "blocked"


def test_without_a_trial_the_same_config_wastes_all_nodes(site: ControllerHarness) -> None:
    """Negative control."""
    run_dir = ready(site, breaks, wanted("off"))
    with pytest.raises(RunFailed):
        drive(site.controller(run_dir))
    assert sizes(site) == [NUM_NODES]


def test_a_failure_only_on_several_nodes_is_found_by_the_second_trial(site: ControllerHarness) -> None:
    run_dir = ready(site, lambda agent, num_nodes: (goes_well if num_nodes == 1 else breaks)(agent, num_nodes))
    with pytest.raises(PreflightBlocked, match=r"trial\.all_nodes"):
        drive(site.controller(run_dir))
    assert sizes(site) == [1, NUM_NODES]
    assert [status for status, _ in verdicts(site, run_dir).values()] == ["passed", "blocked"]


def test_a_trial_has_the_retries_of_any_run(site: ControllerHarness) -> None:
    run_dir = site.run(wanted(num_nodes=1))

    def lost_once(agent: FakeAgent, num_nodes: int) -> None:
        if agent.run_dir == run_dir or agent.attempt > 1:
            return goes_well(agent, num_nodes)
        agent.begin()
        return agent.fail(FailureKind.NODE_LOST)

    behaves(site, lost_once)
    drive(site.controller(run_dir))
    (trial,) = trials_of(run_dir)
    assert [request.run_id for request in site.scheduler.submitted] == [trial.run_id, trial.run_id, run_dir.run_id]
    assert "1 incident" in verdicts(site, run_dir)["trial.all_nodes"][1]


def test_after_a_fix_the_run_is_resumed_with_its_trial(site: ControllerHarness) -> None:
    run_dir = ready(site, breaks)
    with pytest.raises(PreflightBlocked):
        drive(site.controller(run_dir))
    behaves(site, goes_well)
    drive(site.controller(run_dir, resumed=True))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert sizes(site) == [1, 1, NUM_NODES, NUM_NODES]
    one, _ = trials_of(run_dir)
    assert sorted(read_record(one).attempts) == [1, 2], "the same trial was continued"
    assert {status for status, _ in verdicts(site, run_dir).values()} == {"passed"}


# ---------------------------------------------------------------------------------------------------------------------
# Cancelling


@pytest.mark.parametrize("way", ["rlhf cancel", "rlhf cancel --save", "Ctrl-C"])
def test_the_trial_is_cancelled_with_its_run(site: ControllerHarness, way: str) -> None:
    run_dir = ready(site, trains_for_ever)

    def cancel() -> None:
        if len(site.notes.snapshots) == 3 and way != "Ctrl-C":
            kind = "stop_after_step" if "save" in way else "cancel"
            write_model(run_dir.cancel_request, AgentCommand(kind=kind, reason="enough", time=utc_now()))

    site.scheduler.on_status = cancel
    site.notes.stop = lambda: way == "Ctrl-C" and len(site.notes.snapshots) >= 3
    with pytest.raises(RunCancelled, match=run_dir.run_id):
        drive(site.controller(run_dir))
    (trial,) = trials_of(run_dir)
    assert read_record(run_dir).state is read_record(trial).state is RunState.CANCELLED
    assert site.scheduler.cancelled == ["101"]
    assert sizes(site) == [1]
    states = [stage["state"] for stage in queries.show_run(site.store, run_dir.run_id).stages]
    assert states == ["completed", "cancelled"]


def left_in_a_trial(site: ControllerHarness) -> tuple[RunDir, RunDir]:
    """A run whose controller was killed while its first trial was training."""
    run_dir = ready(site, trains_for_ever)

    def killed() -> None:
        if len(site.notes.snapshots) == 3:
            raise Killed

    site.scheduler.on_status = killed
    with pytest.raises(Killed):
        drive(site.controller(run_dir))
    site.scheduler.on_status = lambda: None
    site._stack.close()
    (trial,) = trials_of(run_dir)
    assert (read_record(run_dir).state, read_record(trial).state) == (RunState.PREFLIGHT, RunState.TRAINING)
    return run_dir, trial


def test_without_a_controller_the_command_cancels_the_trial(site: ControllerHarness) -> None:
    run_dir, trial = left_in_a_trial(site)
    messages: list[str] = []
    found = cancel_run(run_dir, site.site, site.store, "enough", log=messages.append)
    assert (found.state, found.job_ended) == (RunState.CANCELLED, True)
    assert read_record(trial).state is RunState.CANCELLED
    assert site.scheduler.jobs["101"].state is JobState.ENDED


def test_an_unresponsive_controller_does_not_keep_a_trial_alive(site: ControllerHarness) -> None:
    run_dir, _ = left_in_a_trial(site)
    site.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 3600)
    clock = site.clock
    found = cancel_run(run_dir, site.site, site.store, "enough", log=lambda text: None, clock=clock, sleep=clock.sleep)
    assert found.job_ended
    assert site.scheduler.cancelled == ["101"]


def test_a_trial_that_is_cancelled_by_itself_blocks_its_run(site: ControllerHarness) -> None:
    run_dir = ready(site, trains_for_ever)

    def cancel() -> None:
        if len(site.notes.snapshots) == 3:
            (trial,) = trials_of(run_dir)
            write_model(trial.cancel_request, AgentCommand(kind="cancel", reason="not this one", time=utc_now()))

    site.scheduler.on_status = cancel
    with pytest.raises(PreflightBlocked, match="was cancelled: not this one"):
        drive(site.controller(run_dir))
    assert read_record(run_dir).state is RunState.FAILED


# ---------------------------------------------------------------------------------------------------------------------
# Controllers that are killed


def test_a_running_trial_is_adopted(site: ControllerHarness) -> None:
    run_dir, trial = left_in_a_trial(site)
    goes_well(FakeAgent(trial), 1)
    behaves(site, goes_well)
    drive(site.controller(run_dir, resumed=True))
    assert sizes(site) == [1, NUM_NODES, NUM_NODES]
    assert read_record(run_dir).state is RunState.COMPLETED


def test_a_run_that_is_blocked_later_leaves_no_trial_running(
    site: ControllerHarness, checks: list[CheckResult]
) -> None:
    run_dir, trial = left_in_a_trial(site)
    checks.append(CheckResult(id="b.check", status=CheckStatus.BLOCKED, found="7", expected="8", advice="eight"))
    with pytest.raises(PreflightBlocked, match=r"b\.check"):
        drive(site.controller(run_dir, resumed=True))
    assert read_record(trial).state is RunState.CANCELLED
    assert site.scheduler.jobs["101"].state is JobState.ENDED


def test_a_controller_that_lost_the_run_leaves_its_trial_alone(site: ControllerHarness) -> None:
    run_dir = ready(site, trains_for_ever)
    controller = site.controller(run_dir)

    def taken_over() -> None:
        if len(site.notes.snapshots) == 3:
            site.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 60, takeover=lambda owner: True)
            controller.lease._renewed = -1e9

    site.scheduler.on_status = taken_over
    with pytest.raises(LeaseLost):
        drive(controller)
    site._stack.close()
    (trial,) = trials_of(run_dir)
    assert read_record(trial).state is RunState.TRAINING
    assert site.scheduler.cancelled == []


def begins_on_request(site: ControllerHarness) -> None:
    """Make agents start when their job is queried, as in the test of a whole run that is killed."""
    accepted: list[JobRequest] = []

    def begin() -> None:
        while accepted:
            request = accepted.pop(0)
            goes_well(agent_of(site, request), request.placement.num_nodes)

    site.scheduler.on_submit = accepted.append
    site.scheduler.on_status = begin


def test_killed_around_every_effect_every_trial_is_made_once(site: ControllerHarness) -> None:
    run_dir = site.run(wanted())
    begins_on_request(site)
    points = undisturbed(site, run_dir)
    assert points.passed >= 80, "lines, files, directories, searches, submissions"
    assert len(points.distinct) >= 60
    for point in points.distinct:
        site.scheduler.submitted.clear()
        present = len(run_dirs(site.site.runs_dir))
        run_dir = site.run(wanted())
        begins_on_request(site)
        assert live(site, run_dir, point) == point
        has_its_nodes = len(site.scheduler.submitted) == 3
        live(site, run_dir, None)
        assert read_record(run_dir).state is RunState.COMPLETED, point
        assert sizes(site) == [1, NUM_NODES, NUM_NODES], point
        assert len(run_dirs(site.site.runs_dir)) == present + 3, point
        assert [status for status, _ in verdicts(site, run_dir).values()] == ["passed"] * 2, point
        if has_its_nodes:
            return  # from here on, it is a run without trials: see test_flows_stages_killed.py
    pytest.fail("the run itself was never submitted")


def test_a_trial_that_is_recorded_too_late_is_made_twice(
    site: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the test above would detect it."""

    def too_late(controller: Controller, rung: Rung) -> RunDir:
        known = controller.journal.record.trials.get(rung.check_id)
        made = prepare.prepare_trial(
            controller.run_dir, known or new_run_id(controller.spec.name), trial_spec(controller.spec, rung)
        )
        if known is None:
            controller.journal.append(TrialPlanned(check_id=rung.check_id, run_id=made.run_id))
        return made

    monkeypatch.setattr("rlhf_core.control.trials._create", too_late)
    run_dir = site.run(wanted())
    begins_on_request(site)
    for point in [point for point in undisturbed(site, run_dir).distinct if point < 20]:
        present = len(run_dirs(site.site.runs_dir))
        run_dir = site.run(wanted())
        begins_on_request(site)
        live(site, run_dir, point)
        live(site, run_dir, None)
        if len(run_dirs(site.site.runs_dir)) > present + 3:
            return
    pytest.fail("no point made a third trial")
