"""Agent 0: one owner per attempt, orders in sequence, a budget renewed by progress, and an outcome in any case."""

import errno
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
from agent_runs import make_spec
from agents_in_memory import GivenProcess, channels_of, decisions_of, lone_channel
from made_reports import checkpoint_manifest, rank_status

from rlhf_core.diagnosis.failure import Failure
from rlhf_core.diagnosis.hangs.verdict import HangVerdict
from rlhf_core.files.appended import append_lines
from rlhf_core.files.whole import read_model, write_model, write_text
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.agent_messages import NodeEnd, WorkerReport
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, FailureKind, Incident
from rlhf_core.schemas.reports import AgentCommand, AttemptOutcome, MetricsLine, Phase, WorkerOutcome
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.watchdog.evidence import agent_decisions, final_incident
from rlhf_core.worker.agent import leader as leader_module
from rlhf_core.worker.agent.leader import Leader, RestartBudget
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import Hang
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.supervision.external_requests import ExternalRequests

KILLED = Failure(FailureKind.WORKER_KILLED, "killed", "f1")
UNKNOWN = Failure(FailureKind.UNKNOWN, "never seen", "f2")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "toy-20260101-000000-abcdef")


def _outcome() -> AttemptOutcome:
    return AttemptOutcome(attempt=1, state=AttemptState.COMPLETED, time=utc_now())


def _complete(run_dir: RunDir, step: int) -> None:
    write_model(run_dir.checkpoint(step).complete, checkpoint_manifest(step))


def leader_of(run_dir: RunDir, attempt: int = 1) -> Leader:
    return Leader(run_dir, attempt, EventLog("here", run_dir.attempt(attempt).restart(0)))


@pytest.mark.parametrize(
    ("left", "action", "suspects"),
    [((0, 0), "restart", ()), ((0, 1), "end", ("there",)), ((1, 1), "end", ())],
    ids=["control: all have ended", "one that is blocked in the kernel", "a file system that blocks all"],
)
def test_workers_are_not_restarted_beside_killed_ones_that_have_not_ended(
    run_dir: RunDir, slots: SlotFile, left: tuple[int, int], action: str, suspects: tuple[str, ...]
) -> None:
    """They hold GPU memory, so the restarted workers would run out of it. A third node has only engines."""
    channel, *others = channels_of("here", "there", "engines")
    restart = run_dir.attempt(1).restart(0)
    group = GivenProcess(slots, restart, plan=GroupPlan.on_all_nodes(Role.TRAINER, 1, 2))
    silent = rank_status(0, age_s=90.0)
    group.hang = Hang(HangVerdict(FailureKind.HANG, (), "silent"), (silent,), 90.0)
    ends = {index: NodeEnd(num_workers=1, num_left=num_left) for index, num_left in enumerate(left)}
    ends[2] = NodeEnd(num_workers=0)
    step = decisions_of(run_dir, channel).conclude(group, ends, restart)
    for one in (*others, channel):
        one.close()
    incident = Incident.model_validate_json(restart.incident(1).read_bytes())
    assert (step.action, incident.suspect_nodes) == (action, suspects)
    assert ("killed processes have not ended on" in step.message) == any(left)


@pytest.mark.parametrize(
    ("asked", "words", "kind"),
    [("SIGUSR2", "ended early: SIGUSR2", None), ("", "would not have fitted into the time limit", "time_limit")],
)
def test_workers_that_saved_without_being_asked_had_no_time_left(
    run_dir: RunDir, slots: SlotFile, asked: str, words: str, kind: str | None
) -> None:
    restart = run_dir.attempt(1).restart(0)
    decisions = decisions_of(run_dir, lone_channel(), ExternalRequests(stop=asked))
    outcome = WorkerOutcome(
        role=Role.TRAINER,
        rank=0,
        node="here",
        ok=True,
        stopped_early=True,
        step=4,
        phase=Phase.CHECKPOINT,
        time=utc_now(),
    )
    end = NodeEnd(num_workers=1, workers=(WorkerReport(rank=0, local_rank=0, code=0, outcome=outcome),))
    step = decisions.conclude(GivenProcess(slots, restart), {0: end}, restart)
    assert (step.action, step.state, step.kind) == ("end", AttemptState.PREEMPTED, kind)
    assert words in step.message


@pytest.mark.parametrize("kind", [FailureKind.NODE_LOST, FailureKind.FILE_SYSTEM])
def test_an_agent_lost_between_two_starts_is_an_incident_of_its_own(run_dir: RunDir, kind: FailureKind) -> None:
    """Otherwise, the node of the incident before the restart would be blamed, and left out of the next attempt."""
    requests = ExternalRequests(broken="its agent is silent", broken_kind=kind, broken_node="there")
    step = decisions_of(run_dir, lone_channel(), requests).may_start(run_dir.attempt(1).restart(1))
    incident = final_incident(run_dir.attempt(1))
    assert incident is not None
    assert (step.action, step.kind) == ("end", kind)
    assert (incident.failure_kind, incident.suspect_nodes, incident.restart) == (kind, ("there",), 1)
    assert [one.action for one in agent_decisions(run_dir.attempt(1))] == [Action.NEW_ATTEMPT]


def test_an_attempt_has_one_owner(run_dir: RunDir) -> None:
    assert leader_of(run_dir).claim() == ""
    assert f"pid {os.getpid()}" in leader_of(run_dir).claim()
    assert leader_of(run_dir, 2).claim() == ""


@pytest.mark.parametrize("content", ["", '{"pid": 12', "[]"])
def test_a_torn_claim_is_a_claim(run_dir: RunDir, content: str) -> None:
    """The owner was killed between creating the file and filling it; two owners would be worse than none."""
    write_text(run_dir.attempt(1).claim, content)
    assert "belongs to another agent" in leader_of(run_dir).claim()


def test_orders_are_delivered_once_and_in_numerical_order(run_dir: RunDir) -> None:
    leader = leader_of(run_dir)
    assert leader.new_commands() == []
    commands = run_dir.attempt(1).commands
    for number, kind in ((10, "cancel"), (2, "stop_after_step")):
        order = AgentCommand.model_validate({"kind": kind, "time": utc_now()})
        write_model(commands / f"{number}.json", order)
    write_text(commands / "3.json", '{"kind": "st')
    write_text(commands / ".4.json.tmp", "{}")
    assert [command.kind for command in leader.new_commands()] == ["stop_after_step", "cancel"]
    write_model(commands / "3.json", AgentCommand(kind="stop_after_step", time=utc_now()))
    assert [command.kind for command in leader.new_commands()] == ["stop_after_step"]
    assert leader.new_commands() == []


def test_a_new_checkpoint_renews_the_budget(run_dir: RunDir) -> None:
    spec = make_spec(supervise={"max_restarts": 2}).supervise
    _complete(run_dir, 10)
    budget = RestartBudget(run_dir, spec)
    choices = [budget.choose(KILLED).action for _ in range(3)]
    assert choices == [Action.RESTART_IN_PLACE, Action.RESTART_IN_PLACE, Action.NEW_ATTEMPT]
    _complete(run_dir, 20)
    assert budget.choose(KILLED).action is Action.RESTART_IN_PLACE
    # An older checkpoint that appears late, or one without COMPLETE, is no progress.
    _complete(run_dir, 15)
    run_dir.checkpoint(30).model.mkdir(parents=True)
    assert [budget.choose(KILLED).action for _ in range(2)] == [Action.RESTART_IN_PLACE, Action.NEW_ATTEMPT]


def test_a_mismatch_found_by_its_message_is_fatal_when_it_returns(run_dir: RunDir) -> None:
    words = Failure(FailureKind.COLLECTIVE_MISMATCH, "mismatch, says a log", "f3", is_undecided=True)
    other_words = Failure(FailureKind.COLLECTIVE_MISMATCH, "mismatch, says another", "f4", is_undecided=True)
    budget = RestartBudget(run_dir, make_spec(supervise={"max_restarts": 3}).supervise)

    def choose(failure: Failure) -> tuple[bool, Action]:
        confirmed = budget.confirmed(failure)
        return confirmed.is_undecided, budget.choose(confirmed).action

    assert choose(words) == (True, Action.RESTART_IN_PLACE)
    assert choose(other_words) == (False, Action.STOP)
    _complete(run_dir, 10)
    assert choose(words) == (True, Action.RESTART_IN_PLACE)  # progress in between gives another chance
    proven = Failure(FailureKind.COLLECTIVE_MISMATCH, "recorders", "f5")
    _complete(run_dir, 20)
    assert choose(proven) == (False, Action.STOP)


def test_an_unknown_failure_may_return_after_progress(run_dir: RunDir) -> None:
    budget = RestartBudget(run_dir, make_spec().supervise)
    assert budget.choose(UNKNOWN).action is Action.RESTART_IN_PLACE
    _complete(run_dir, 10)
    assert budget.choose(UNKNOWN).action is Action.RESTART_IN_PLACE
    assert budget.choose(UNKNOWN).action is Action.STOP


def test_the_last_step_comes_from_the_newest_restart_that_made_a_step(run_dir: RunDir) -> None:
    leader = leader_of(run_dir)
    assert leader.last_step() == 0
    for restart, steps in ((0, range(1, 200)), (1, range(100, 131))):
        lines = (MetricsLine(step=step, time=utc_now(), loop="sft", metrics={}) for step in steps)
        append_lines(run_dir.attempt(1).restart(restart).metrics, *lines)
    run_dir.attempt(1).restart(2).root.mkdir()
    assert leader.last_step() == 130


def test_an_outcome_is_written_once(run_dir: RunDir) -> None:
    leader = leader_of(run_dir)
    assert leader.finish(_outcome())
    other = _outcome().model_copy(update={"state": AttemptState.FAILED})
    assert leader.finish(other)
    found = AttemptOutcome.model_validate_json(run_dir.attempt(1).outcome.read_bytes())
    assert found.state is AttemptState.COMPLETED


def _fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (folder / "filler").write_bytes(bytes(1 << 20))


def test_an_outcome_is_written_once_the_file_system_responds(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an NFS mount with the option ``soft``, whose server is away for a moment."""
    leader = leader_of(run_dir)
    assert leader.claim() == ""
    num_errors = 0

    def fails(*arguments: object, **options: object) -> NoReturn:
        nonlocal num_errors
        num_errors += 1
        if num_errors == 8:
            away.undo()
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as away:
        away.setattr(leader_module.time, "sleep", lambda seconds: None)
        for name in ("open", "stat", "scandir", "listdir"):
            away.setattr(os, name, fails)
        assert leader.last_step() == 0
        assert not leader.write(run_dir.attempt(1).outcome, _outcome())
        assert leader.finish(_outcome())
    assert read_model(run_dir.attempt(1).outcome, AttemptOutcome) is not None


@pytest.mark.parametrize("reserved", [True, False])
def test_the_outcome_of_a_full_disk_is_written_into_the_reserve(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch, reserved: bool
) -> None:
    """With the control: without the reserve there is no outcome."""
    monkeypatch.setattr("rlhf_core.worker.agent.leader.OUTCOME_TIMEOUT_S", 0.1)
    leader = leader_of(RunDir(tiny_disk / "run"))
    assert leader.claim() == ""
    if reserved:
        leader.reserve.hold()
    _fill(tiny_disk)
    assert leader.finish(_outcome()) is reserved
    assert (read_model(RunDir(tiny_disk / "run").attempt(1).outcome, AttemptOutcome) is not None) is reserved


@pytest.mark.parametrize("reserved", [True, False])
def test_incident_and_outcome_are_written_when_no_more_files_are_allowed(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch, reserved: bool
) -> None:
    """A file system, or a quota, limits their number too. With the control."""
    monkeypatch.setattr("rlhf_core.worker.agent.leader.OUTCOME_TIMEOUT_S", 0.1)
    subprocess.run(["mount", "-o", "remount,nr_inodes=40", str(tiny_disk)], check=True)
    run_dir = RunDir(tiny_disk / "run")
    leader = leader_of(run_dir)
    assert leader.claim() == ""
    restart = run_dir.attempt(1).restart(0)
    restart.root.mkdir(parents=True)
    if reserved:
        leader.reserve.hold()
    _use_up_files(tiny_disk, "before")
    failure = Failure(FailureKind.DISK_FULL, "the disk is full", "fp", phase="checkpoint", step=12)
    number = leader.record_incident(restart, failure)
    _use_up_files(tiny_disk, "after")  # as a restart in place does
    assert leader.finish(_outcome()) is reserved
    assert restart.incident(number).exists() is reserved


def _use_up_files(disk: Path, name: str) -> None:
    for number in range(os.statvfs(disk).f_ffree):
        (disk / f"filler-{name}-{number}").touch()
