"""Programs of other projects under a real agent: followed, blamed, and restarted from their own checkpoints."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_runs import TARGETS, AgentRun, MakeRun
from process_tools import is_alive, until

from rlhf_core.files.appended import read_models
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.reports import MetricsLine, Phase

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]

STEPS = 20
IN_NEW_PROCESSES = {"warm_workers": False}
"""Settings of a run whose workers are interpreters of their own, as outside of tests; others are forked here."""


def external_program(*options: str, steps: int = STEPS, **changed: Any) -> dict[str, Any]:
    """Settings of a trainer that is a script, started once for each rank."""
    script = str(TARGETS / "external_program.py")
    return {
        "kind": "command",
        "argv": [sys.executable, script, "{output_dir}", "{num_steps}", *options],
        "resume_argv": ["--resume", "{checkpoint}"],
        "num_steps": steps,
        "launch": "per_rank",
        "algorithm": "grpo",
        "stdout_patterns": [
            r"step (?P<step>\d+) loss (?P<loss>\S+) reward_std (?P<reward_std>\S+)",
            r"rank \d+ at \d+",
        ],
        "record_collectives": False,
        **changed,
    }


def with_torchrun(*options: str, script: str = "torch_program.py", **changed: Any) -> dict[str, Any]:
    """Settings of a trainer that torchrun starts; the usual script prints nothing."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    place = ["--nnodes={num_nodes}", "--node-rank={node_rank}", "--nproc-per-node={ranks_per_node}"]
    meeting = ["--master-addr={master_addr}", "--master-port={master_port}"]
    return {
        "kind": "command",
        "argv": [*torchrun, *place, *meeting, str(TARGETS / script), *options],
        "num_steps": STEPS,
        "resume": "none",
        **changed,
    }


def with_a_group(*options: str, **changed: Any) -> dict[str, Any]:
    """Settings of the script around a process group, which prints nothing, started once for each rank."""
    argv = [sys.executable, str(TARGETS / "torch_program.py"), *options]
    return {"kind": "command", "argv": argv, "num_steps": STEPS, "resume": "none", "launch": "per_rank", **changed}


def printing_steps_with_torchrun() -> dict[str, Any]:
    """Settings of the script without torch, started by torchrun, with a checkpoint every 15 steps."""
    options = ["{output_dir}", "2000", "--every", "15"]
    patterns = [r"step (?P<step>\d+) loss (?P<loss>\S+)"]
    return with_torchrun(*options, script="external_program.py", stdout_patterns=patterns, num_steps=2_000)


def metrics(run: AgentRun) -> list[MetricsLine]:
    return [line for one in run.dir.restarts() for line in read_models(one.metrics, MetricsLine)]


def output_dir(run: AgentRun) -> Path:
    return run.run_dir.root / "trainer" / "output"


def saved(run: AgentRun) -> list[int]:
    return [one.step for one in run.run_dir.checkpoints()]


def stopped(run: AgentRun) -> tuple[int, str]:
    """Start a run and ask it to stop once it makes steps; returns the exit code and output of its agent."""
    run.start(native=True)
    until(lambda: run.reached(0, 3))
    run.order("stop_after_step")
    return run.finish()


def test_a_program_is_followed_to_its_end(agent_run: MakeRun) -> None:
    checkpoint = {"every_num_steps": 5, "keep_last": 2}
    run = agent_run(trainer=external_program("--daemon"), checkpoint=checkpoint, supervise=IN_NEW_PROCESSES)
    code, output = run.run_through(native=True)
    outcome = run.outcome()
    assert (code, outcome.state, outcome.last_step) == (0, AttemptState.COMPLETED, STEPS), output
    lines = metrics(run)
    assert [line.step for line in lines] == list(range(1, STEPS + 1))
    assert {line.loop for line in lines} == {"grpo"}
    assert lines[3].metrics["train/loss"] == 0.25
    # The program's removal of checkpoints and ours do not interfere.
    assert saved(run) == [5, 15, 20]
    newest = run.run_dir.newest_checkpoint()
    assert newest is not None
    assert newest.damage() == []
    assert (newest.root / "checkpoint-20" / "weights.bin").stat().st_nlink == 2, "a link, not a copy"
    assert not is_alive(int((output_dir(run) / "daemon").read_text())), "its leftover processes were killed"


def test_steps_that_another_rank_prints_are_those_of_the_run(agent_run: MakeRun) -> None:
    """The program exits before all of them are in the log, and its last checkpoint is of an earlier step."""
    run = agent_run(trainer=external_program("--printer", "1", steps=18), checkpoint={"every_num_steps": 5})
    code, output = run.run_through(native=True)
    assert (code, run.outcome().state, run.outcome().last_step) == (0, AttemptState.COMPLETED, 18), output
    assert [line.step for line in metrics(run)] == list(range(1, 19))


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("1:8:kill", FailureKind.WORKER_KILLED, "SIGKILL"),
        ("0:8:kill", FailureKind.WORKER_KILLED, "SIGKILL"),
        ("1:8:raise", FailureKind.ILLEGAL_ACCESS, "illegal memory access"),
        ("1:8:stop", FailureKind.HANG, "state T"),
    ],
)
def test_a_rank_that_fails_is_blamed_and_the_program_goes_on(
    agent_run: MakeRun, fault: str, kind: FailureKind, message: str
) -> None:
    supervise = {"floor_s": 3.0, "suspect_s": 1.0, "setup_floor_s": 20.0}
    # The ranks of this program do not wait for each other: the other must not have finished when the agent polls.
    # While one hangs, checkpoints of the other would count as progress of the job.
    steps, every = (120, "1000") if kind is FailureKind.HANG else (80, "5")
    trainer = external_program("--fault", fault, "--every", every, steps=steps)
    run = agent_run(trainer=trainer, checkpoint={"every_num_steps": 5}, supervise=supervise)
    code, output = run.run_through(native=True)
    assert (code, run.outcome().state) == (0, AttemptState.COMPLETED), output
    incident = run.incident(0)
    assert (incident.failure_kind, incident.suspect_ranks) == (kind, (int(fault[0]),)), incident.message
    assert message in incident.message
    assert run.decision(0).action is Action.RESTART_IN_PLACE
    again = [line.step for line in read_models(run.restart(1).metrics, MetricsLine)]
    assert again[0] % 5 == 1, "from the beginning, or from the newest checkpoint that was published"
    assert again[-1] == steps
    if kind is FailureKind.HANG:
        stacks = list((run.run_dir.root / incident.evidence_dir).glob("stack-*-pid*.txt"))
        assert stacks, "of the ranks of the program, not of those that follow them"


def test_a_signal_that_ends_the_program_of_a_shell_script_is_named(agent_run: MakeRun) -> None:
    """The shell reaps the rank before its worker can read how it ended, and exits with a code of its own."""
    program = external_program("--fault", "1:8:kill", "--every", "5", resume="none")
    script = f"{shlex.join(program['argv'])}; code=$?; echo cleaned; exit $code"
    run = agent_run(trainer=program | {"argv": ["bash", "-c", script]}, supervise={"max_restarts": 0})
    run.run_through(native=True)
    incident = run.incident(0)
    assert (incident.failure_kind, incident.suspect_ranks) == (FailureKind.WORKER_KILLED, (1,)), incident.message


def test_a_program_that_ends_well_too_early_has_failed(agent_run: MakeRun) -> None:
    run = agent_run(trainer=external_program("--fault", "0:8:leave"))
    code, _ = run.run_through(native=True)
    incident = run.incident(0)
    assert (code, incident.failure_kind) == (1, FailureKind.INCOMPLETE)
    assert f"after 7 of {STEPS} steps" in incident.message
    assert run.decision(0).action is Action.STOP


def test_a_program_that_starts_over_has_failed(agent_run: MakeRun) -> None:
    """verl #5725: a resume that silently starts at step 0 discards all training without an error."""
    run = agent_run(
        trainer=external_program("--fault", "1:14:kill", "--forgets", "--pause", "0.3"),
        checkpoint={"every_num_steps": 5},
    )
    code, output = run.run_through(native=True)
    assert code == 1, output
    assert run.incident(0).failure_kind is FailureKind.WORKER_KILLED
    incident = run.incident(1)
    assert incident.failure_kind is FailureKind.INCOMPLETE
    assert "started over" in incident.message
    assert saved(run)[-1] >= 5, "the training so far is untouched"


def test_a_checkpoint_that_the_program_cannot_load_is_replaced_by_the_one_before(agent_run: MakeRun) -> None:
    """Its checksums are right: only the program can tell, and its workers exit as its ranks do."""
    run = agent_run(
        trainer=external_program("--fault", "1:30:kill", "--refuses", "--pause", "0.2", steps=40),
        checkpoint={"every_num_steps": 5, "keep_last": 3},
    )
    code, output = run.run_through(native=True)
    assert (code, run.outcome().state) == (0, AttemptState.COMPLETED), output
    assert run.incident(0).failure_kind is FailureKind.WORKER_KILLED
    incident = run.incident(1)
    refused = int((output_dir(run) / "refused").read_text())
    assert incident.failure_kind is FailureKind.CHECKPOINT_CORRUPT
    assert incident.damaged_checkpoint == f"step-{refused:06d}"
    again = [line.step for line in read_models(run.restart(2).metrics, MetricsLine)]
    assert again[0] == refused - 4, "the program goes on from the checkpoint before"


def test_a_program_that_is_not_there_is_named(agent_run: MakeRun) -> None:
    run = agent_run(trainer=external_program() | {"argv": ["no-such-program"]})
    code, _ = run.run_through(native=True)
    incident = run.incident(0)
    assert (code, incident.failure_kind) == (1, FailureKind.CONFIG)
    assert "no-such-program" in incident.message


def test_a_program_is_asked_to_save_and_then_ended(agent_run: MakeRun) -> None:
    """It saves at once on a signal; its own next checkpoint is awaited in the test with torchrun below."""
    run = agent_run(trainer=external_program("--every", "1000", steps=2_000, save_signal="SIGUSR1"))
    code, output = stopped(run)
    assert (code, run.outcome().state) == (0, AttemptState.PREEMPTED), output
    (step,) = saved(run)
    assert step < 200


def test_a_program_that_saves_and_exits_when_asked_is_preempted(agent_run: MakeRun) -> None:
    """The program exits before its last checkpoint is stable enough to be published, as with the callback."""
    run = agent_run(trainer=external_program("--every", "1000", "--leaves", steps=2_000, save_signal="SIGUSR1"))
    code, output = stopped(run)
    assert (code, run.outcome().state) == (0, AttemptState.PREEMPTED), output
    assert len(saved(run)) == 1


def test_no_rank_of_torchrun_fails_when_the_program_is_ended_after_its_checkpoint(agent_run: MakeRun) -> None:
    """The ranks exit before all their workers have seen the checkpoint."""
    run = agent_run(trainer=printing_steps_with_torchrun(), supervise=IN_NEW_PROCESSES)
    code, output = stopped(run)
    assert (code, run.outcome().state) == (0, AttemptState.PREEMPTED), output
    assert run.restart(0).incident_files() == []
    steps = saved(run)
    assert steps
    assert steps[-1] < 200
    assert all(step % 15 == 0 for step in steps)


def test_a_program_that_finishes_although_it_was_asked_to_stop_is_complete(agent_run: MakeRun) -> None:
    run = agent_run(trainer=external_program("--every", "20", steps=20))
    code, output = stopped(run)
    assert (code, run.outcome().state) == (0, AttemptState.COMPLETED), output


def test_a_program_that_works_silently_after_its_last_step_has_not_hung(agent_run: MakeRun) -> None:
    """As it does when it merges, writes or uploads its model; only the floor of a checkpoint applies then."""
    supervise = {"floor_s": 3.0, "suspect_s": 1.0, "checkpoint_floor_s": 60.0}
    run = agent_run(trainer=external_program("--uploads", "8", "--every", "80", steps=80), supervise=supervise)
    code, output = run.run_through(native=True)
    assert (code, run.outcome().state, run.outcome().num_restarts) == (0, AttemptState.COMPLETED, 0), output


def test_a_warning_of_health_leaves_the_run_going(agent_run: MakeRun) -> None:
    run = agent_run(trainer=external_program("--fault", "1:900:flat", steps=40), health={"window_steps": 10})
    code, output = run.run_through(native=True)
    assert (code, run.outcome().state, run.outcome().num_restarts) == (0, AttemptState.COMPLETED, 0), output
    incident, decision = run.incident(0), run.decision(0)
    assert (incident.failure_kind, incident.role) == (FailureKind.DEGENERATE_RL, Role.TRAINER)
    assert decision.action is Action.CONTINUE
    assert len(metrics(run)) == 40


def test_a_killed_rank_is_blamed_although_torchrun_reaped_it_first(agent_run: MakeRun) -> None:
    """The rank's worker is stopped until then; it finds the signal in torchrun's log.

    Without the log the worker took the rank for finished, and rank 0 was blamed for torchrun's exit code 1.
    """
    run = agent_run(trainer=printing_steps_with_torchrun(), supervise={"max_restarts": 0})
    run.start(native=True)
    rank = until(lambda: rank_of(run, 1))
    worker = run.pids(0)[1]
    os.kill(worker, signal.SIGSTOP)
    signal.pidfd_send_signal(rank, signal.SIGKILL)
    (log_of_launcher,) = run.restart(0).logs.glob("*-0.log")
    until(lambda: "exitcode: -9" in log_of_launcher.read_text())
    os.kill(worker, signal.SIGCONT)
    run.finish()
    incident = run.incident(0)
    assert (incident.failure_kind, incident.suspect_ranks) == (FailureKind.WORKER_KILLED, (1,)), incident.message


def test_ranks_that_train_alone_are_stopped(agent_run: MakeRun) -> None:
    """Two ranks form two worlds of one without any error.

    Accelerate does this without GPUs and without ACCELERATE_USE_CPU.
    """
    trainer = with_a_group("40", "0", "alone", framework="trl", stdout_patterns=[r"step (?P<step>\d+)"], num_steps=40)
    run = agent_run(trainer=trainer)
    run.start(native=True)
    run.finish()
    incident = run.incident(0)
    assert incident.failure_kind is FailureKind.CONFIG, incident.message
    assert "trains the whole model alone" in incident.message
    assert run.decision(0).action is Action.STOP


def test_a_program_that_destroys_its_group_at_the_end_has_not_trained_alone(agent_run: MakeRun) -> None:
    trainer = with_a_group("40", "0", "leave", framework="trl", stdout_patterns=[r"step (?P<step>\d+)"], num_steps=40)
    run = agent_run(trainer=trainer)
    code, output = run.run_through(native=True)
    assert (code, run.outcome().state) == (0, AttemptState.COMPLETED), output


@pytest.mark.parametrize(
    ("settings", "kind", "failure", "message"),
    [
        (with_torchrun, "disagree", FailureKind.COLLECTIVE_MISMATCH, "rank 0 gloo:barrier; rank 1 gloo:broadcast"),
        (with_a_group, "loop", FailureKind.HANG, "rank 1"),
    ],
)
def test_a_hang_that_only_collectives_show_is_found(
    agent_run: MakeRun, settings: Callable[..., dict[str, Any]], kind: str, failure: FailureKind, message: str
) -> None:
    """The program prints and saves nothing; only the flight recorder shows which rank is to blame.

    A busy machine takes half a minute to import torch, and the program is equally silent during that time. The loop
    begins once steady progress counts as training: in a set-up, it would count as a sign of life.
    """
    run = agent_run(
        trainer=settings("2000", "300" if kind == "loop" else "100", kind),
        supervise={"floor_s": 5.0, "setup_floor_s": 45.0, "suspect_s": 2.0, "max_restarts": 0},
    )
    run.start(native=True)
    run.finish()
    incident = run.incident(0)
    assert incident.failure_kind is failure, incident.message
    assert message in incident.message


def test_a_hang_is_found_in_training_although_only_the_last_node_prints_steps(agent_run: MakeRun) -> None:
    """As with Megatron. With the limit of the set-up, which most ranks never left, this test would run out of time."""
    options, patterns = ["2000", "300", "loop", "--last-rank-prints"], [r"step (?P<step>\d+) loss (?P<loss>\S+)"]
    run = agent_run(
        num_nodes=2,
        trainer=with_a_group(*options, stdout_patterns=patterns, num_steps=2_000),
        supervise={"floor_s": 10.0, "setup_floor_s": 900.0, "suspect_s": 5.0, "max_restarts": 0},
    )
    for index in range(2):
        run.start(index, 2, native=True)
    run.finish_all()
    incident = run.incident(0)
    assert (incident.failure_kind, incident.suspect_ranks) == (FailureKind.HANG, (1,)), incident.message
    assert incident.phase == Phase.TRAIN
    assert 0 < incident.step < 300, "told by the rank that prints"
    assert [line.step for line in metrics(run)] == list(range(1, 300))


def rank_of(run: AgentRun, local_rank: int) -> int | None:
    """A descriptor of the process of a rank; None while the process is not at work yet."""
    import psutil

    from rlhf_core.worker.in_rank.rlhf_rank_file import PATH_VARIABLE

    for process in psutil.process_iter():
        try:
            variables = process.environ()
        except psutil.Error:
            continue
        is_of_run = run.run_dir.run_id in variables.get(PATH_VARIABLE, "")
        is_it = is_of_run and variables.get("LOCAL_RANK") == str(local_rank)
        if is_it and "external_program.py" in " ".join(process.cmdline()) and run.status(0) is not None:
            status = run.status(0)
            assert status is not None
            if all(rank.speaks_for and rank.sequence > 2 for rank in status.ranks):
                return os.pidfd_open(process.pid)
    return None
