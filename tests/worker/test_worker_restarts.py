"""Restarts with real agents and workers: deaths and hangs are detected, explained and repaired without leftovers."""

import os
import resource
import signal
import time

import pytest
from agent_runs import MakeRun
from process_tools import is_alive, until

from rlhf_core.files.appended import read_models
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import Action, DecidedBy, FailureKind
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker import processes
from rlhf_core.worker.liveness.heartbeat import slots_folder

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]


ONE_IS_LEFT = """
import math
from rlhf_core.worker import processes
from rlhf_core.worker.agent import phases
phases.GPU_TIMEOUT_S = 2.0
end_descendants, calls = processes.end_descendants, []
def end(*args, **named):
    calls.append(args)
    return [*end_descendants(*args, **named), *["4711 (python)"] * (len(calls) <= {num_calls})]
processes.end_descendants = end
"""
"""Makes up a process that has not ended when the agent looks for it so many times."""


def test_beside_a_process_that_cannot_be_killed_nothing_is_restarted(agent_run: MakeRun) -> None:
    run = agent_run()
    run.change = ONE_IS_LEFT.format(num_calls="math.inf")
    run.script({"restart": 0, "rank": 1, "step": 3, "do": "kill"})
    code, output = run.run_through()
    assert (code, run.outcome().failure_kind) == (1, FailureKind.WORKER_KILLED), output
    assert (run.decision(0).action, run.outcome().num_restarts) == (Action.NEW_ATTEMPT, 0)
    assert "killed processes have not ended on" in run.decision(0).reason


def test_a_process_that_ends_late_is_waited_for(agent_run: MakeRun) -> None:
    """The kernel may take long to free pinned memory."""
    run = agent_run()
    run.change = ONE_IS_LEFT.format(num_calls=2)
    run.script({"restart": 0, "rank": 1, "step": 3, "do": "kill"})
    code, output = run.run_through()
    assert (code, run.decision(0).action) == (0, Action.RESTART_IN_PLACE), output


def test_killed_and_stopped_ranks_are_restarted_until_the_run_is_done(agent_run: MakeRun) -> None:
    """One long scenario: rank 1 is killed, then rank 0 is stopped, then training ends and the evaluator runs."""
    floor_s, setup_floor_s = 2.0, 60.0
    run = agent_run(
        evaluator=True,
        supervise={"floor_s": floor_s, "setup_floor_s": setup_floor_s, "max_restarts": 1},
        checkpoint={"every_num_steps": 5},
    )
    run.script(
        {"restart": 0, "rank": 1, "step": 3, "do": "children"},
        {"restart": 0, "rank": 1, "step": 8, "do": "kill"},
        {"restart": 1, "rank": 0, "step": 13, "do": "stop"},
    )
    code, output = run.run_through()

    outcome = run.outcome()
    assert (code, outcome.state, outcome.num_restarts, outcome.last_step) == (0, AttemptState.COMPLETED, 2, 20), output
    assert "fork server" not in output, "that of the first start has forked again"

    killed = run.incident(0)
    assert killed.failure_kind is FailureKind.WORKER_KILLED
    assert (killed.suspect_ranks, killed.phase, killed.step) == ((1,), "rollout", 8)
    assert "SIGKILL" in killed.message
    decision = run.decision(0)
    assert (decision.action, decision.decided_by) == (Action.RESTART_IN_PLACE, DecidedBy.AGENT)

    stopped = run.incident(1)
    assert stopped.failure_kind is FailureKind.HANG
    assert (stopped.suspect_ranks, stopped.step) == ((0,), 13)
    assert "state T" in stopped.message
    assert stopped.detected_after_s is not None
    assert floor_s < stopped.detected_after_s < setup_floor_s / 2, "by the limit of training, on a busy machine, too"
    evidence = run.run_dir.root / stopped.evidence_dir
    stacks = [path.read_text(encoding="utf-8") for path in sorted(evidence.glob("stack-*.txt"))]
    assert any("_do (" in stack for stack in stacks), stacks  # the rank that stopped itself
    assert any("sum (" in stack for stack in stacks), stacks  # its peer, waiting in the collective
    # The budget is 1: the second restart was possible because checkpoints 5 and 10 were made in between.
    assert run.decision(1).action is Action.RESTART_IN_PLACE

    # Restart numbers continue across roles, and the evaluator ran in the last one.
    assert [restart.restart for restart in run.dir.restarts()] == [0, 1, 2, 3]
    assert (run.run_dir.root / "evaluated-1").read_text(encoding="utf-8") == "3"
    roles = [event.role for number in range(4) for event in run.events(number, "role_started")]
    assert roles == [Role.TRAINER, Role.EVALUATOR]

    # From the checkpoint of step 5, then from that of step 10.
    steps = [line.step for number in range(3) for line in read_models(run.restart(number).metrics, MetricsLine)]
    assert steps == [*range(1, 8), *range(6, 13), *range(11, 21)]

    # The leftover of a worker of the first restart ended with it, although it had daemonised itself.
    for name in ("child", "daemon"):
        assert not is_alive(int((run.run_dir.root / name).read_text(encoding="utf-8")))
    log = run.restart(0).log("trainer", run.events(0)[0].node, 0)
    assert "Connection closed by peer" in log.read_text(encoding="utf-8")
    status = run.status(2)
    assert status is not None
    assert {"cpu_percent", "memory_used_gb", "workers_rss_gb"} <= set(status.telemetry)
    assert not list(slots_folder().glob(f"rlhf-{run.run_dir.run_id}-*"))
    assert not run.dir.reserve.exists()


def test_a_permanent_error_ends_the_attempt_at_once_with_its_message(agent_run: MakeRun) -> None:
    run = agent_run()
    run.script({"rank": 1, "step": 3, "do": "reward"})
    code, _ = run.run_through()
    outcome = run.outcome()
    assert (code, outcome.state, outcome.failure_kind) == (1, AttemptState.FAILED, FailureKind.REWARD_FUNCTION)
    assert "always answered 'x', expected a number" in outcome.message
    assert "Rank 1" in outcome.message
    assert len(run.dir.restarts()) == 1
    assert run.decision(0).action is Action.STOP


@pytest.mark.usefixtures("tiny_disk")
def test_a_full_disk_ends_the_attempt_and_still_leaves_incident_and_outcome(agent_run: MakeRun) -> None:
    """Nothing more fits on the disk, not even the worker's own outcome, which is passed through the node's memory."""
    run = agent_run()
    run.script({"rank": 1, "step": 3, "do": "full_disk"})
    code, _ = run.run_through()
    outcome = run.outcome()
    assert (code, outcome.state, outcome.failure_kind) == (1, AttemptState.FAILED, FailureKind.DISK_FULL)
    assert "no room for the checkpoint of step 3" in outcome.message
    assert run.incident(0).suspect_ranks == (1,)
    assert run.decision(0).action is Action.STOP
    assert not list(slots_folder().glob(f"rlhf-{run.run_dir.run_id}-*"))


def test_an_unknown_error_is_retried_once_and_ends_the_attempt_when_it_returns(agent_run: MakeRun) -> None:
    """The number in the message differs between restarts; the fingerprint does not."""
    run = agent_run(supervise={"max_restarts": 5})
    run.script({"rank": 0, "step": 1, "do": "value"})
    run.start()
    run.finish()
    assert [run.decision(number).action for number in (0, 1)] == [Action.RESTART_IN_PLACE, Action.STOP]
    assert run.incident(0).fingerprint == run.incident(1).fingerprint
    assert run.outcome().failure_kind is FailureKind.UNKNOWN


def test_a_worker_that_exits_without_an_outcome_has_failed(agent_run: MakeRun) -> None:
    """Exit code 0 alone is no success: the outcome file is required."""
    run = agent_run(supervise={"max_restarts": 0})
    run.script({"rank": 0, "step": 20, "do": "exit"}, {"rank": 1, "step": 20, "do": "exit"})
    code, _ = run.run_through()
    assert code == 1
    assert run.outcome().state is AttemptState.FAILED
    assert "exit code 0 and wrote no outcome" in run.outcome().message


def test_without_liveness_a_stopped_rank_is_not_found_and_cancel_ends_it(agent_run: MakeRun) -> None:
    """Negative control of the hang: the same fault with an unreachable floor; then the run is cancelled."""
    run = agent_run(supervise={"floor_s": 1e6, "setup_floor_s": 1e6, "suspect_s": 1e6})
    run.script({"rank": 0, "step": 3, "do": "children"}, {"rank": 1, "step": 5, "do": "stop"})
    agent = run.start()
    until(lambda: run.reached(0, 4))
    time.sleep(4.0)  # as long as it takes to find the hang in the first test
    assert agent.poll() is None
    assert not run.restart(0).incident_files()
    pids = run.pids(0)

    run.order("cancel")
    code, _ = run.finish()
    outcome = run.outcome()
    assert (code, outcome.state, outcome.failure_kind) == (1, AttemptState.CANCELLED, FailureKind.USER_CANCEL)
    assert outcome.message == "the test asked"
    left = [int((run.run_dir.root / name).read_text(encoding="utf-8")) for name in ("child", "daemon")]
    assert not any(is_alive(pid) for pid in [*pids.values(), *left])


def test_long_before_its_floor_a_deadlock_is_proven_and_a_sleep_is_left_alone(agent_run: MakeRun) -> None:
    """The floors have their defaults of two minutes and more; only the first inspection is earlier than by default."""
    run = agent_run(supervise=SuperviseSpec(suspect_s=1.0).model_dump(), train={"num_steps": 24})
    run.script(
        {"restart": 0, "rank": 0, "step": 5, "do": "sleep"}, {"restart": 0, "rank": 1, "step": 21, "do": "deadlock"}
    )
    code, output = run.run_through()
    assert code == 0, output
    incident = run.incident(0)
    assert (incident.failure_kind, incident.suspect_ranks, incident.step) == (FailureKind.HANG, (1,), 21)
    assert "it waits for a lock of its own, which nothing in the job can end" in incident.message
    assert run.decision(0).action is Action.RESTART_IN_PLACE
    assert [event.kind for event in run.events(0, "suspect")] == ["suspect"], "no rank was suspect while it slept"
    assert run.outcome().num_restarts == 1


@pytest.mark.parametrize("fault", ["loop", "hold_interpreter"])
def test_endless_work_outside_a_collective_is_a_hang_of_that_rank(agent_run: MakeRun, fault: str) -> None:
    """An endless loop, and C code that never releases the interpreter lock.

    In the second case not even a helper thread could run.
    """
    run = agent_run(supervise={"floor_s": 1.0, "setup_floor_s": 60.0, "max_restarts": 0})
    run.script({"rank": 1, "step": 5, "do": fault})
    code, _ = run.run_through()
    incident = run.incident(0)
    assert (code, incident.failure_kind, incident.suspect_ranks) == (1, FailureKind.HANG, (1,))
    assert "has not entered collective" in incident.message
    assert run.decision(0).action is Action.NEW_ATTEMPT


def test_an_agent_and_its_workers_may_open_more_files_than_a_shell_allows(agent_run: MakeRun) -> None:
    """The agent started with the soft limit of most shells, of which Slurm makes its own."""
    run = agent_run(train={"num_steps": 5000}, supervise={"warm_workers": False})
    run.change = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1024, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
    agent = run.start()
    until(lambda: len(run.pids(0)) == 2)
    for pid in (agent.pid, *run.pids(0).values()):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard, processes.MAX_OPEN_FILES)
    run.order("cancel")
    run.finish()


def test_a_second_agent_exits_and_a_killed_agent_takes_its_workers_along(agent_run: MakeRun) -> None:
    run = agent_run(train={"num_steps": 2000})
    first = run.start()
    until(lambda: run.reached(0, 2))
    workers = run.pids(0)

    code, output = run.run_through()
    assert code == 1
    assert f"pid {first.pid}" in output
    assert not run.dir.outcome.exists()
    assert all(is_alive(pid) for pid in workers.values())

    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    until(lambda: not any(is_alive(pid) for pid in workers.values()), timeout_s=5.0)
    assert not run.dir.outcome.exists()


def test_sigterm_ends_everything_and_leaves_an_outcome(agent_run: MakeRun) -> None:
    run = agent_run(train={"num_steps": 2000})
    run.script({"rank": 1, "step": 2, "do": "children"})
    agent = run.start()
    until(lambda: run.reached(0, 3))
    left = [int((run.run_dir.root / name).read_text(encoding="utf-8")) for name in ("child", "daemon")]
    workers = run.pids(0)
    agent.send_signal(signal.SIGTERM)
    code, _ = run.finish()
    outcome = run.outcome()
    assert (code, outcome.state, outcome.failure_kind) == (1, AttemptState.FAILED, FailureKind.PREEMPTION)
    assert "SIGTERM" in outcome.message
    assert not any(is_alive(pid) for pid in [*workers.values(), *left])
