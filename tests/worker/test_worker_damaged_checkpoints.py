"""Damaged checkpoints with real agents and workers: the previous one is used, as long as one exists."""

from pathlib import Path
from typing import Any, cast

import pytest
from agent_runs import MakeRun
from agents_in_memory import GivenProcess, decisions_of, lone_channel
from made_reports import checkpoint_manifest, rank_status

from rlhf_core.diagnosis.failure import Failure
from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.agent_messages import AgreedStep, NodeEnd, WorkerReport
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import Action, FailureKind, Incident
from rlhf_core.schemas.reports import MetricsLine, Phase
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.agent.damaged_checkpoints import DamagedCheckpoints
from rlhf_core.worker.agent.decisions import GroupDecisions
from rlhf_core.worker.command.launch import LaunchOrder
from rlhf_core.worker.liveness.heartbeat import SlotFile

PATIENT = {"floor_s": 60.0, "setup_floor_s": 60.0}


@pytest.mark.end_to_end
@pytest.mark.training
def test_damaged_checkpoints_are_put_aside_one_after_the_other(agent_run: MakeRun) -> None:
    """The two newest of three are damaged, then a rank dies: both are kept for inspection, and the third is used."""
    run = agent_run(supervise={**PATIENT, "max_restarts": 1}, checkpoint={"every_num_steps": 5})
    run.script({"restart": 0, "rank": 1, "step": 18, "do": "damage_two"})
    code, output = run.run_through()

    outcome = run.outcome()
    # A restart for a damaged checkpoint does not count against the budget of 1.
    assert (code, outcome.state, outcome.num_restarts, outcome.last_step) == (0, AttemptState.COMPLETED, 3, 20), output
    assert [run.incident(number).failure_kind for number in range(3)] == [
        FailureKind.WORKER_KILLED,
        FailureKind.CHECKPOINT_CORRUPT,
        FailureKind.CHECKPOINT_CORRUPT,
    ]
    for restart, damaged, used in ((1, "step-000015", "step-000010"), (2, "step-000010", "step-000005")):
        incident, decision = run.incident(restart), run.decision(restart)
        aside = run.run_dir.damaged(1, restart) / damaged
        assert incident.damaged_checkpoint == damaged
        assert f"{damaged} is damaged: weights: found 1 bytes" in incident.message
        assert f"It is kept as checkpoints/damaged-1.{restart}/{damaged}; {used} is used instead" in incident.message
        assert (incident.suspect_ranks, incident.suspect_nodes) == ((), ()), "no node is to blame for a disk"
        assert decision.action is Action.RESTART_IN_PLACE
        assert decision.reason == f"checkpoint_corrupt: {damaged} is set aside; resuming from {used}"
        assert (aside / "weights").read_text(encoding="utf-8") == "0"
        assert any(damaged in event.message for event in run.events(restart, "checkpoint"))
    steps = [line.step for number in range(4) for line in read_models(run.restart(number).metrics, MetricsLine)]
    assert steps == [*range(1, 18), *range(6, 21)]
    for checkpoint in run.run_dir.saved_checkpoints():
        checkpoint.verify()


@pytest.mark.end_to_end
@pytest.mark.training
def test_the_run_stops_when_no_checkpoint_is_left_and_says_what_to_do(agent_run: MakeRun) -> None:
    run = agent_run(supervise=PATIENT, checkpoint={"every_num_steps": 5})
    run.script({"restart": 0, "rank": 0, "step": 8, "do": "damage_all"})
    code, _ = run.run_through()
    outcome = run.outcome()
    assert (code, outcome.state, outcome.failure_kind) == (1, AttemptState.FAILED, FailureKind.CHECKPOINT_CORRUPT)
    folder = run.run_dir.checkpoint(5).root
    assert "No earlier complete checkpoint is left. Restore its files from a copy, or move" in outcome.message
    assert f"move {folder} away to train from the beginning; then resume the run" in outcome.message
    assert run.decision(1).action is Action.STOP
    assert run.run_dir.put_aside_folders() == [], "the last one stays: only the user may decide to start over"
    assert folder.is_dir()


@pytest.mark.end_to_end
@pytest.mark.training
def test_an_older_checkpoint_is_not_evaluated_in_place_of_a_damaged_one(agent_run: MakeRun) -> None:
    """The steps after the older checkpoint belong to the result: they are trained again, which takes a new attempt."""
    run = agent_run(evaluator=True, supervise=PATIENT, checkpoint={"every_num_steps": 5})
    run.script({"restart": 1, "rank": 0, "step": 0, "do": "damage_newest"})
    code, _ = run.run_through()
    assert (code, run.outcome().failure_kind) == (1, FailureKind.CHECKPOINT_CORRUPT)
    assert run.decision(1).action is Action.NEW_ATTEMPT
    assert "must be trained again" in run.decision(1).reason
    newest = run.run_dir.newest_checkpoint()
    assert newest is not None
    assert newest.step == 15
    assert (run.run_dir.damaged(1, 1) / "step-000020").is_dir()


# ---------------------------------------------------------------------------------------------------------------------
# Without processes


class MessageLog:
    """Event log that keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, kind: str, message: str) -> None:
        self.messages.append(message)


def failure_of(name: str) -> Failure:
    return Failure(FailureKind.CHECKPOINT_CORRUPT, f"{name} is damaged", "f", damaged_checkpoint=name)


def test_a_damaged_checkpoint_that_cannot_be_moved_is_skipped(tmp_path: Path) -> None:
    """Its folder may belong to another user; later starts must not use it, and must not be told again each time."""
    run_dir = RunDir(tmp_path)
    for step in (5, 10, 15):
        save_empty(run_dir, step)
    restart = run_dir.attempt(1).restart(0)
    (run_dir.checkpoints_dir / "damaged-1.0").write_text("in the way", encoding="utf-8")
    damaged, log = DamagedCheckpoints(run_dir), MessageLog()
    failure = failure_of("step-000015")
    assert damaged.remedy(failure) == "step-000015 is set aside; resuming from step-000010"
    damaged.put_aside(failure, restart, cast("Any", log))
    assert damaged.names == ["step-000015"]
    assert log.messages == ["step-000015 is damaged and could not be moved: File exists; it is skipped"]
    assert damaged.remedy(failure) == "", "the workers know about it: another failure with it is final"
    assert damaged.remedy(failure_of("step-000010")) == "step-000010 is set aside; resuming from step-000005"


CUT_OFF = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"
UNFIT = (
    "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 16 but the "
    "current world size is 8."
)
MISSING = (
    "FileNotFoundError: [Errno 2] No such file or directory: "
    "'/runs/a/checkpoints/step-000015/global_step15/zero_pp_rank_1_mp_rank_00_optim_states.pt'"
)


@pytest.fixture
def decisions(tmp_path: Path) -> GroupDecisions:
    run_dir = RunDir(tmp_path)
    for step in (5, 10, 15):
        save_empty(run_dir, step)
    return decisions_of(run_dir, lone_channel())


def ends_of_a_program(
    decisions: GroupDecisions, slots: SlotFile, restart: int, log: str, *, told: str, step: int, role: Role
) -> AgreedStep:
    """The step after the start of an external trainer whose worker exited as its rank did, without an outcome."""
    folder = decisions.damaged.run_dir.attempt(1).restart(restart)
    write_model(folder.launch_order, LaunchOrder(address="127.0.0.1", port=1, checkpoint=told))
    group = GivenProcess(slots, folder, plan=GroupPlan.on_all_nodes(role, 1, 1))
    last = rank_status(0, step=step, phase=Phase.SETUP)
    failed = WorkerReport(
        rank=0, local_rank=0, code=1, last=last, log_tail=f"Traceback (most recent call last):\n{log}\n"
    )
    return decisions.conclude(group, {0: NodeEnd(num_workers=1, workers=(failed,))}, folder)


def test_a_checkpoint_that_an_external_trainer_cannot_load_is_replaced_once(
    decisions: GroupDecisions, slots: SlotFile
) -> None:
    """Its checksums are right, so the cause may be elsewhere: then all but the oldest would be set aside in vain."""
    first = ends_of_a_program(decisions, slots, 0, CUT_OFF, told="step-000015", step=15, role=Role.TRAINER)
    assert (first.action, first.damaged) == ("restart", ("step-000015",))
    incident = Incident.model_validate_json(decisions.damaged.run_dir.attempt(1).restart(0).incident(1).read_bytes())
    assert (incident.damaged_checkpoint, incident.suspect_ranks) == ("step-000015", ())
    assert "could not load step-000015. It is kept as checkpoints/damaged-1.0/step-000015" in incident.message
    assert "step-000010 is used instead" in incident.message

    second = ends_of_a_program(decisions, slots, 1, CUT_OFF, told="step-000010", step=10, role=Role.TRAINER)
    assert (second.action, second.state) == ("end", AttemptState.FAILED)
    assert "could not load step-000010. Nor could it load step-000015, which is set aside" in second.message
    incident = Incident.model_validate_json(decisions.damaged.run_dir.attempt(1).restart(1).incident(2).read_bytes())
    assert incident.damaged_checkpoint == "", "the controller does not try an older one either"
    assert [one.step for one in decisions.damaged.run_dir.checkpoints()] == [5, 10]


@pytest.mark.parametrize(("num_ranks", "follows"), [(1, ("restart", ("step-000015",))), (2, ("end", ()))])
def test_a_missing_file_of_a_rank_is_damage_unless_other_ranks_saved_the_checkpoint(
    decisions: GroupDecisions, slots: SlotFile, num_ranks: int, follows: tuple[str, tuple[str, ...]]
) -> None:
    """A checkpoint that was published half-written has an older one; after a change of the ranks, none would fit."""
    save_empty(decisions.damaged.run_dir, 15, num_ranks=num_ranks)
    step = ends_of_a_program(decisions, slots, 0, MISSING, told="step-000015", step=15, role=Role.TRAINER)
    assert (step.action, step.damaged) == follows
    assert ("number of ranks that it was saved with" in step.message) is (num_ranks == 2)


@pytest.mark.parametrize(
    ("log", "told", "step", "role", "words"),
    [
        (UNFIT, "step-000015", 15, Role.TRAINER, "an older checkpoint would fit as little. Resume with"),
        (CUT_OFF, "step-000015", 16, Role.TRAINER, "no earlier checkpoint can replace it"),
        (CUT_OFF, "", 0, Role.TRAINER, "no earlier checkpoint can replace it"),
        (CUT_OFF, "step-000015", 15, Role.EVALUATOR, "no earlier checkpoint can replace it"),
    ],
    ids=["saved with other settings", "loaded, and trained since", "told to load none", "another program"],
)
def test_no_older_checkpoint_is_tried_where_it_would_not_help(
    decisions: GroupDecisions, slots: SlotFile, log: str, told: str, step: int, role: Role, words: str
) -> None:
    end = ends_of_a_program(decisions, slots, 0, log, told=told, step=step, role=role)
    assert (end.action, end.kind) == ("end", FailureKind.CHECKPOINT_CORRUPT)
    assert words in end.message
    assert [one.step for one in decisions.damaged.run_dir.checkpoints()] == [5, 10, 15]


def save_empty(run_dir: RunDir, step: int, **about: Any) -> None:
    write_model(run_dir.checkpoint(step).complete, checkpoint_manifest(step, **about))
