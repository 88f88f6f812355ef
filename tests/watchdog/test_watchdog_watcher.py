"""One poll of one attempt: live, ended or merely silent, and the decision that follows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_fakes import Clock, FakeAgent, FakeScheduler, make_run, make_spec
from history_tools import RunFiles, run_sql
from made_reports import decision_of
from pydantic import JsonValue

from rlhf_core.errors import DatabaseUnavailable, SchedulerError
from rlhf_core.files.whole import write_model
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState, JobStatus
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.failures import Action, Decision, FailureKind
from rlhf_core.schemas.reports import AttemptOutcome
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.attempt_failure import AttemptFailure, explain
from rlhf_core.watchdog.evidence import read_earlier_attempts, scheduler_log
from rlhf_core.watchdog.watcher import (
    COMPLETING_TIMEOUT_S,
    OUTCOME_TIMEOUT_S,
    SCHEDULER_REASON_TIMEOUT_S,
    AttemptSnapshot,
    AttemptVerdict,
    Watcher,
    judge,
    record,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs")


@pytest.fixture
def agent(run_dir: RunDir) -> FakeAgent:
    """The agent of attempt 1, which has begun; its incidents are at step 3."""
    agent = FakeAgent(run_dir)
    agent.begin()
    return agent


def placed(run_dir: RunDir, attempt: int = 1, step: int = 0) -> Placement:
    placement = Placement(attempt=attempt, num_nodes=1, phases=(), resumed_from_step=step)
    write_model(run_dir.attempt(attempt).placement, placement)
    return placement


def submission(attempt: int = 1) -> Submission:
    return Submission(attempt=attempt, scheduler="local", job_id=str(100 + attempt), command=())


def watcher(run_dir: RunDir, scheduler: FakeScheduler, clock: Clock | None = None, attempt: int = 1) -> Watcher:
    return Watcher(run_dir, placed(run_dir, attempt), submission(attempt), scheduler, None, clock or Clock())


def write_job_log(run_dir: RunDir, text: str) -> None:
    folder = run_dir.attempt(1).scheduler_dir
    folder.mkdir(parents=True)
    (folder / "101_0_log.out").write_text(text)


class Answers(FakeScheduler):
    """A scheduler that gives these answers one after the other, the last one forever."""

    def __init__(self, *states: JobState | Exception) -> None:
        super().__init__()
        self._states = list(states)

    def status(self, submissions):  # type: ignore[no-untyped-def]
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if isinstance(state, Exception):
            raise state
        return {one.job_id: JobStatus(state, "so it says") for one in submissions}


# ---------------------------------------------------------------------------------------------------------------------
# Alive, dead, unknown


def test_an_outcome_decides_whatever_the_scheduler_says() -> None:
    outcome = AttemptOutcome(attempt=1, state=AttemptState.FAILED, failure_kind=FailureKind.SHAPE, time=utc_now())
    for state in JobState:
        verdict = judge(JobStatus(state), outcome, 0.0)
        assert (verdict.state, verdict.failure_kind) == (AttemptState.FAILED, FailureKind.SHAPE)


def test_a_job_that_ended_without_an_outcome_is_lost_after_a_grace_period() -> None:
    ended = JobStatus(JobState.ENDED)
    assert judge(ended, None, OUTCOME_TIMEOUT_S - 0.1).state is AttemptState.RUNNING
    lost = judge(ended, None, OUTCOME_TIMEOUT_S)
    assert (lost.state, lost.failure_kind) == (AttemptState.LOST, FailureKind.AGENT_KILLED)


def test_silence_is_not_death(run_dir: RunDir) -> None:
    """A scheduler that does not know or does not respond leaves the attempt unchanged, however long."""
    clock = Clock()
    scheduler = Answers(JobState.RUNNING, JobState.UNKNOWN, SchedulerError("no answer"), JobState.UNKNOWN)
    one = watcher(run_dir, scheduler, clock)
    for _ in range(6):
        snapshot = one.poll()
        assert snapshot.verdict.state is AttemptState.RUNNING
        clock.now += 1000
    assert "state unknown" in snapshot.job.reason


def test_silence_taken_for_death_would_lose_a_living_job() -> None:
    """Negative control: the same silence read as ENDED is lost."""
    assert judge(JobStatus(JobState.ENDED), None, 1000).state is AttemptState.LOST


def test_the_grace_period_restarts_when_the_job_turns_out_to_live(run_dir: RunDir) -> None:
    clock = Clock()
    one = watcher(run_dir, Answers(JobState.ENDED, JobState.RUNNING, JobState.ENDED), clock)
    one.poll()
    clock.now = OUTCOME_TIMEOUT_S + 1
    assert one.poll().verdict.state is AttemptState.RUNNING
    assert one.poll().verdict.state is AttemptState.RUNNING, "its end was detected only just now"
    clock.now += OUTCOME_TIMEOUT_S + 1
    assert one.poll().verdict.state is AttemptState.LOST


def test_a_job_that_was_never_recorded_has_ended(run_dir: RunDir) -> None:
    clock = Clock()
    one = Watcher(run_dir, placed(run_dir), None, FakeScheduler(), None, clock)
    one.poll()
    clock.now = OUTCOME_TIMEOUT_S + 1
    assert one.poll().verdict.state is AttemptState.LOST


# ---------------------------------------------------------------------------------------------------------------------
# Progress


def test_a_look_shows_role_step_phase_and_metrics(run_dir: RunDir) -> None:
    agent, one = FakeAgent(run_dir), watcher(run_dir, Answers(JobState.RUNNING))
    assert one.poll().progress.role is None
    agent.role(Role.TRAINER)
    agent.step(1, **{"reward/mean": 0.25})
    agent.step(2)
    snapshot = one.poll()
    progress = snapshot.progress
    assert (progress.role, progress.step, progress.phase, progress.loop) == (Role.TRAINER, 2, "train", "sft")
    assert progress.metrics == {"train/loss": 0.5, "reward/mean": 0.25}
    assert [event.kind for event in snapshot.events] == ["role_started"]
    assert not progress.evaluating


def test_a_first_poll_finds_training_behind_later_restarts(run_dir: RunDir) -> None:
    """A new controller, or the final summary, after the evaluator was started more than once."""
    trainer = FakeAgent(run_dir)
    trainer.role(Role.TRAINER)
    for step in (1, 2, 3):
        trainer.step(step)
    for restart in (1, 2):
        FakeAgent(run_dir, restart=restart).role(Role.EVALUATOR)
    progress = watcher(run_dir, Answers(JobState.RUNNING)).poll().progress
    assert (progress.step, progress.metrics, progress.restart) == (3, {"train/loss": 0.5}, 2)


def test_events_are_reported_once(run_dir: RunDir) -> None:
    agent, one = FakeAgent(run_dir), watcher(run_dir, Answers(JobState.RUNNING))
    agent.role(Role.TRAINER)
    assert len(one.poll().events) == 1
    assert len(one.poll().events) == 0


def test_a_quick_evaluator_is_not_missed(run_dir: RunDir) -> None:
    """It may finish between two polls; its event remains."""
    agent, one = FakeAgent(run_dir), watcher(run_dir, Answers(JobState.RUNNING))
    agent.role(Role.EVALUATOR)
    agent.restart = 1
    agent.role(Role.TRAINER)
    assert one.poll().progress.evaluating


def test_after_a_rewind_the_step_is_that_of_the_new_workers(run_dir: RunDir) -> None:
    agent, one = FakeAgent(run_dir), watcher(run_dir, Answers(JobState.RUNNING))
    for number in (1, 2, 3, 4, 5):
        agent.step(number)
    assert one.poll().progress.step == 5
    agent.restart = 1
    agent.step(3)
    assert one.poll().progress.step == 3


def test_a_resumed_attempt_begins_at_its_checkpoint(run_dir: RunDir) -> None:
    one = Watcher(run_dir, placed(run_dir, 2, step=40), submission(2), Answers(JobState.RUNNING), None)
    assert one.poll().progress.step == 40


def test_a_torn_line_is_read_once_it_is_complete(run_dir: RunDir) -> None:
    agent, one = FakeAgent(run_dir), watcher(run_dir, Answers(JobState.RUNNING))
    agent.step(1)
    path = run_dir.attempt(1).restart(0).metrics
    whole = path.read_bytes()
    path.write_bytes(whole + whole.replace(b'"step":1', b'"step":2')[:30])
    assert one.poll().progress.step == 1
    path.write_bytes(whole + whole.replace(b'"step":1', b'"step":2'))
    assert one.poll().progress.step == 2


# ---------------------------------------------------------------------------------------------------------------------
# The history


def test_an_unresponsive_history_is_only_late(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(directory: RunDir, store: object, first_attempt: int) -> None:
        raise DatabaseUnavailable("no answer from the database")

    monkeypatch.setattr("rlhf_core.watchdog.watcher.sync", sync)
    one = Watcher(run_dir, placed(run_dir), submission(), Answers(JobState.RUNNING), object())  # type: ignore[arg-type]
    snapshot = one.poll()
    assert snapshot.history_behind == "no answer from the database"
    assert snapshot.verdict.state is AttemptState.RUNNING


def test_polls_read_the_last_two_attempts_and_a_record_all(store: HistoryStore, runs: Path) -> None:
    """A run of many attempts would otherwise open all files of all of them every second."""
    run = RunFiles(runs).created()
    for attempt in (1, 2, 3):
        run.planned(attempt, attempt)
        run.metrics(attempt, 0, 1, 10 * attempt)

    def steps() -> dict[int, int]:
        rows = run_sql(store, "SELECT attempt, MAX(step) FROM metrics GROUP BY attempt").rows
        return {int(str(attempt)): int(str(step)) for attempt, step in rows}

    one = Watcher(run.dir, placed(run.dir, 3), submission(3), Answers(JobState.RUNNING), store)
    assert one.poll().history_behind == ""
    assert steps() == {1: 1, 2: 1, 3: 1}, "the first poll reads all"
    for attempt in (1, 2, 3):
        run.metrics(attempt, 0, 2, 10 * attempt + 1)
    assert one.poll().history_behind == ""
    assert steps() == {1: 1, 2: 2, 3: 2}
    assert record(run.dir, store) == ""
    assert steps() == {1: 2, 2: 2, 3: 2}, "a late line is not lost"
    store.forget(run.run_id)
    assert one.poll().history_behind == ""
    assert steps() == {1: 2, 2: 2, 3: 2}, "a history that lost the run gets all of it"


# ---------------------------------------------------------------------------------------------------------------------
# Decisions


def ended(run_dir: RunDir, attempt: int = 1) -> AttemptSnapshot:
    clock = Clock()
    one = watcher(run_dir, Answers(JobState.ENDED), clock, attempt)
    one.poll()
    clock.now = OUTCOME_TIMEOUT_S + 1
    return one.poll()


def explained(run_dir: RunDir, spec: RunSpec | None = None, **options: Any) -> AttemptFailure:
    """Explanation of an attempt whose job has ended."""
    return explain(run_dir, ended(run_dir), spec or make_spec(), first_attempt=1, **options)


def out_of_memory(run_dir: RunDir, spec: RunSpec, **about: Any) -> Decision:
    """Decision after a rank ran out of memory."""
    agent = FakeAgent(run_dir)
    agent.begin()
    agent.fail(FailureKind.CUDA_OOM, message="rank 1 ran out of memory", **about)
    return explained(run_dir, spec).decision


def test_a_failure_is_explained_by_the_agents_incident(run_dir: RunDir, agent: FakeAgent) -> None:
    agent.fail(FailureKind.HANG, message="rank 1 hung")
    failure = explain(run_dir, ended(run_dir), make_spec(), first_attempt=1, chance=lambda: 0.5)
    assert failure.kind is FailureKind.HANG
    assert not failure.found_here
    assert failure.incident is not None
    assert failure.incident.suspect_ranks == (1,)
    assert failure.decision.action is Action.NEW_ATTEMPT


@pytest.mark.parametrize(("decided", "follows"), [(Action.STOP, Action.STOP), (Action.NEW_ATTEMPT, Action.NEW_ATTEMPT)])
def test_an_unknown_failure_that_the_agents_saw_recur_is_not_retried(
    run_dir: RunDir, agent: FakeAgent, decided: Action, follows: Action
) -> None:
    """The attempt that just ended is the only one: its agents restarted in place once."""
    placed(run_dir, 1)
    agent.incident(FailureKind.UNKNOWN, fingerprint="abc")
    write_model(run_dir.attempt(1).restart(0).decision(0), decision_of(decided))
    agent.end(AttemptState.FAILED, FailureKind.UNKNOWN, "it crashed")
    assert explained(run_dir).decision.action is follows


def test_a_killed_agent_is_found_by_the_controller(run_dir: RunDir) -> None:
    FakeAgent(run_dir).begin()
    failure = explained(run_dir)
    assert failure.found_here
    assert failure.kind is FailureKind.AGENT_KILLED
    assert failure.incident is not None
    assert failure.incident.evidence_dir == "attempts/1/scheduler"


def test_an_agent_that_never_started_is_explained_by_its_output(run_dir: RunDir) -> None:
    write_job_log(run_dir, "Traceback ...\nModuleNotFoundError: No module named 'torch'\n")
    failure = explained(run_dir)
    assert failure.kind is FailureKind.IMPORT_ERROR
    assert failure.decision.action is Action.STOP
    assert "No module named 'torch'" in failure.message


def test_output_of_an_agent_before_it_was_killed_does_not_count(run_dir: RunDir) -> None:
    """It may be about a failure from which the agent had recovered; a wrong stop is worse than a retry."""
    FakeAgent(run_dir).begin()
    write_job_log(run_dir, "ModuleNotFoundError: No module named 'torch'\n")
    failure = explained(run_dir)
    assert failure.kind is FailureKind.AGENT_KILLED
    assert failure.decision.action is Action.NEW_ATTEMPT


SMALLEST = make_spec(
    train={"micro_batch_size": 1, "gradient_checkpointing": True}, trainer={"zero_stage": 3}, rollout={"batch_size": 1}
)
COMMAND = RunSpec.model_validate(
    {"name": "t", "data": {"answer_column": ""}, "trainer": {"kind": "command", "argv": ["x"], "num_steps": 1}}
)


@pytest.mark.parametrize(
    ("config", "change", "might_share"),
    [
        ({"num_attention_heads": 4}, {"trainer.sequence_parallel": 2}, True),
        ({"num_attention_heads": 3}, {}, False),
        ({"num_attention_heads": 4, "sliding_window": 64}, {}, False),
        ({}, {}, True),
    ],
    ids=["shareable", "odd number of heads", "sliding window", "unknown"],
)
def test_out_of_memory_ranks_share_sequences_if_the_model_can_be_shared(
    run_dir: RunDir, tmp_path: Path, config: dict[str, JsonValue], change: dict[str, JsonValue], might_share: bool
) -> None:
    """With an unknown number of heads, nothing is changed, and the decision advises the user to try."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = with_changes(SMALLEST, {"model.path": str(tmp_path), "model.config": {}, "model.tokenizer": ""})
    decision = out_of_memory(run_dir, spec, phase="train")
    assert decision.config_diff == change
    assert (decision.action is Action.NEW_ATTEMPT) == bool(change)
    assert ("trainer.sequence_parallel" in decision.reason) == might_share


@pytest.mark.parametrize(
    ("spec", "role", "phase", "advice"),
    [
        (SMALLEST, Role.TRAINER, "train", "let ranks share each sequence (trainer.sequence_parallel)"),
        (SMALLEST, Role.ROLLOUT, "rollout", "without changing the global batch: use shorter sequences"),
        (SMALLEST, Role.TRAINER, "setup", "end other processes on them"),
        (SMALLEST, Role.TRAINER, "rollout", "without changing the global batch: use shorter sequences"),
        (COMMAND, Role.TRAINER, "setup", "only the arguments of its command"),
        (COMMAND, Role.EVALUATOR, "setup", "end other processes on them"),
        (make_spec(supervise={"oom_remediation": False}), Role.TRAINER, "train", "supervise.oom_remediation is false"),
    ],
    ids=["training", "engine", "setup", "sampling", "command", "evaluator of a command", "off"],
)
def test_a_run_that_ends_out_of_memory_says_what_can_be_done(
    run_dir: RunDir, spec: RunSpec, role: Role, phase: str, advice: str
) -> None:
    decision = out_of_memory(run_dir, spec, role=role, phase=phase)
    assert decision.action is Action.STOP
    assert advice in decision.reason


@pytest.mark.parametrize(
    ("role", "diff"),
    [
        (None, {"trainer.micro_batch_size": 2}),
        (Role.TRAINER, {"trainer.micro_batch_size": 2}),
        (Role.ROLLOUT, {"rollout.batch_size": 8}),
        (Role.EVALUATOR, {"rollout.batch_size": 8, "trainer.micro_batch_size": 2}),
    ],
)
def test_out_of_memory_is_remedied_where_it_happened(run_dir: RunDir, role: Role | None, diff: dict[str, int]) -> None:
    """An engine computes no micro-batches: with smaller ones it would fail again, and training would be slower."""
    spec = make_spec(train={"micro_batch_size": 4}, rollout={"batch_size": 16})
    decision = out_of_memory(run_dir, spec, role=role)
    assert decision.config_diff == diff
    changes = ", ".join(f"{name} = {value}" for name, value in diff.items())
    assert f"continuing with {changes}; the global batch is unchanged" in decision.reason
    smallest = make_spec(train={"micro_batch_size": 1, "gradient_checkpointing": True}, rollout={"batch_size": 1})
    decision = out_of_memory(run_dir, smallest, role=role)
    assert (decision.action is Action.STOP) == (role not in (None, Role.TRAINER))


@pytest.mark.parametrize("phase", ["train", "setup"])
def test_out_of_memory_before_the_first_step_is_not_remedied_by_what_a_step_takes(run_dir: RunDir, phase: str) -> None:
    """Smaller batches would cost an allocation each, and every attempt would fail at the same place."""
    decision = out_of_memory(run_dir, make_spec(trainer={"zero_stage": 3}), role=Role.TRAINER, phase=phase)
    assert decision.action is (Action.STOP if phase == "setup" else Action.NEW_ATTEMPT)
    assert ("use more or larger GPUs" in decision.reason) is (phase == "setup")


def test_a_loss_that_is_not_finite_goes_back_one_checkpoint_and_only_once(run_dir: RunDir, agent: FakeAgent) -> None:
    agent.checkpoint(2)
    agent.end(AttemptState.FAILED, FailureKind.NON_FINITE, "loss is nan")
    snapshot = ended(run_dir)
    assert (
        explain(run_dir, snapshot, make_spec(), first_attempt=1).decision.action is Action.STOP
    )  # no older checkpoint
    agent.checkpoint(4)
    decision = explain(run_dir, snapshot, make_spec(), first_attempt=1).decision
    assert (decision.action, decision.resume_checkpoint) == (Action.NEW_ATTEMPT, run_dir.checkpoint(2).root.name)
    again = explain(run_dir, snapshot, make_spec(), first_attempt=1, rolled_back=True).decision
    assert again.action is Action.STOP
    off = make_spec(supervise={"rollback_on_non_finite": False})
    assert explain(run_dir, snapshot, off, first_attempt=1).decision.action is Action.STOP


def test_training_that_learned_nothing_goes_back_to_before_the_window_and_only_once(
    run_dir: RunDir, agent: FakeAgent
) -> None:
    for step in (1, 2, 3):
        agent.checkpoint(step)
    agent.fail(FailureKind.DEGENERATE_RL, message="nothing is learned")
    snapshot, spec = ended(run_dir), make_spec(health={"window_steps": 2})
    decision = explain(run_dir, snapshot, spec, first_attempt=1).decision
    assert (decision.action, decision.resume_checkpoint) == (Action.NEW_ATTEMPT, run_dir.checkpoint(1).root.name)
    again = explain(run_dir, snapshot, spec, first_attempt=1, rolled_back=True).decision
    assert again.action is Action.STOP
    assert "change the reward or the config" in again.reason


def test_a_rule_of_health_may_stop_the_run_at_once(run_dir: RunDir, agent: FakeAgent) -> None:
    for step in (1, 2, 3):
        agent.checkpoint(step)
    agent.fail(FailureKind.DEGENERATE_RL, message="nothing is learned", health_rule="frozen")
    snapshot = ended(run_dir)
    stops = explain(run_dir, snapshot, make_spec(health={"actions": {"frozen": "stop"}}), first_attempt=1).decision
    assert (stops.action, stops.resume_checkpoint) == (Action.STOP, "")
    assert stops.reason == 'health.actions.frozen is "stop": no older checkpoint is tried'
    other = explain(run_dir, snapshot, make_spec(health={"actions": {"no_spread": "stop"}}), first_attempt=1).decision
    assert other.action is Action.NEW_ATTEMPT


def test_checkpoints_of_an_abandoned_branch_are_set_aside(run_dir: RunDir) -> None:
    agent = FakeAgent(run_dir)
    for step in (2, 4, 6):
        agent.checkpoint(step)
    for _ in range(2):
        run_dir.put_aside_newer_than(run_dir.checkpoint(2).root.name, 1)
        assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == [2]
    aside = run_dir.aside(1)
    assert sorted(path.name for path in aside.iterdir()) == [run_dir.checkpoint(step).root.name for step in (4, 6)]


SLURM = "slurm says"


@pytest.mark.parametrize(
    ("own", "word", "state", "kind"),
    [
        (AttemptState.PREEMPTED, "PREEMPTED", AttemptState.PREEMPTED, FailureKind.PREEMPTION),
        (AttemptState.PREEMPTED, "TIMEOUT", AttemptState.PREEMPTED, FailureKind.TIME_LIMIT),
        (AttemptState.PREEMPTED, "COMPLETED", AttemptState.PREEMPTED, FailureKind.PREEMPTION),
        (AttemptState.PREEMPTED, "FAILED", AttemptState.FAILED, FailureKind.AGENT_KILLED),
        (AttemptState.PREEMPTED, "NODE_FAIL", AttemptState.FAILED, FailureKind.NODE_LOST),
        (AttemptState.PREEMPTED, "CANCELLED", AttemptState.CANCELLED, FailureKind.USER_CANCEL),
        (AttemptState.COMPLETED, "CANCELLED", AttemptState.COMPLETED, None),
    ],
)
def test_agents_report_how_they_ended_and_the_scheduler_why(
    own: AttemptState, word: str, state: AttemptState, kind: FailureKind | None
) -> None:
    outcome = AttemptOutcome(attempt=1, state=own, message="saved", time=utc_now())
    verdict = judge(JobStatus(JobState.ENDED, SLURM, scheduler_state=word), outcome, 0.0, 0.0)
    assert (verdict.state, verdict.failure_kind) == (state, kind)


def test_a_failed_job_was_not_preempted_and_srun_names_the_agent(run_dir: RunDir, agent: FakeAgent) -> None:
    """Slurm ends the remaining agents with the signal that also announces a preemption.

    With the control of a preemption.
    """
    agent.end(AttemptState.PREEMPTED, None, "saved a checkpoint and ended early: SIGTERM")
    write_job_log(run_dir, "srun: error: n3: task 2: Killed\nsrun: Terminating StepId=7.0\n")
    for word, kind, suspects in (("FAILED", FailureKind.AGENT_KILLED, ("n3",)), ("COMPLETED", "preemption", None)):
        job = JobStatus(JobState.ENDED, f"Slurm says {word}", ("n1", "n2", "n3"), scheduler_state=word)
        scheduler = FakeScheduler()
        scheduler.status = lambda submissions, job=job: {one.job_id: job for one in submissions}  # type: ignore[method-assign,misc]
        snapshot = Watcher(run_dir, placed(run_dir), submission(), scheduler, None, Clock()).poll()
        failure = explain(run_dir, snapshot, make_spec(), first_attempt=1)
        assert failure.kind == kind
        assert (failure.incident.suspect_nodes if failure.incident else None) == suspects
        assert failure.incident is None or "task 2: Killed. The last line of " in failure.incident.message
        assert failure.decision.action is Action.NEW_ATTEMPT


def test_the_reason_of_the_scheduler_is_awaited_but_not_forever() -> None:
    outcome = AttemptOutcome(attempt=1, state=AttemptState.PREEMPTED, message="saved", time=utc_now())
    failed = outcome.model_copy(update={"state": AttemptState.FAILED, "failure_kind": FailureKind.NETWORK})
    running = JobStatus(JobState.RUNNING, scheduler_state="COMPLETING")
    assert judge(running, failed, 0.0, SCHEDULER_REASON_TIMEOUT_S - 0.1).state is AttemptState.RUNNING
    assert judge(running, failed, 0.0, SCHEDULER_REASON_TIMEOUT_S).state is AttemptState.FAILED
    # If a signal has ended the agents, or had them save, a user may have cancelled the job: that must be known first.
    for signalled in (outcome, failed.model_copy(update={"ended_by": "SIGTERM"})):
        assert judge(running, signalled, 0.0, COMPLETING_TIMEOUT_S - 0.1).state is AttemptState.RUNNING
        assert judge(running, signalled, 0.0, COMPLETING_TIMEOUT_S).state is signalled.state
    assert judge(replace(running, scheduler_state="RUNNING"), outcome, 0.0, SCHEDULER_REASON_TIMEOUT_S).state is (
        AttemptState.PREEMPTED
    )
    # A scheduler that reports no reason (the local one) is not awaited.
    assert judge(JobStatus(JobState.RUNNING), outcome, 0.0, 0.0).state is AttemptState.PREEMPTED


def test_a_job_cancelled_by_a_user_is_not_lost() -> None:
    cancelled = JobStatus(JobState.ENDED, SLURM, scheduler_state="CANCELLED")
    assert judge(cancelled, None, 0.0).state is AttemptState.CANCELLED
    # Negative control: without the reason the job is lost, and would be retried.
    assert judge(JobStatus(JobState.ENDED, SLURM, scheduler_state="FAILED"), None, 1000.0).state is AttemptState.LOST


def test_a_node_lost_by_slurm_is_blamed_even_if_it_is_back(run_dir: RunDir, agent: FakeAgent) -> None:
    agent.end(AttemptState.PREEMPTED, None, "saved a checkpoint and ended early")
    write_job_log(run_dir, "srun: error: Node failure on node2\n")
    snapshot = ended(run_dir)
    reported = replace(
        snapshot,
        job=JobStatus(JobState.ENDED, SLURM, scheduler_state="NODE_FAIL"),
        verdict=AttemptVerdict(AttemptState.FAILED, "saved", FailureKind.NODE_LOST),
    )
    failure = explain(run_dir, reported, make_spec(), first_attempt=1)
    assert failure.found_here
    assert failure.incident is not None
    assert failure.incident.suspect_nodes == ("node2",)
    assert failure.decision.excluded_nodes == ("node2",)


@pytest.mark.parametrize(
    ("begins", "checkpoint", "fruitless"),
    [
        ([0], None, 1),
        ([0, 0, 0], None, 3),
        ([0, 5], 5, 1),
        ([0, 5, 5], 5, 2),
        ([0, 5], 9, 0),
    ],
)
def test_attempts_without_a_new_checkpoint_are_counted(
    run_dir: RunDir, begins: list[int], checkpoint: int | None, fruitless: int
) -> None:
    for number, step in enumerate(begins, start=1):
        placed(run_dir, number, step)
    if checkpoint is not None:
        FakeAgent(run_dir).checkpoint(checkpoint)
    assert read_earlier_attempts(run_dir, len(begins), 1, "").attempts_without_progress == fruitless


def test_only_attempts_of_this_life_of_the_run_count(run_dir: RunDir) -> None:
    for number in (1, 2, 3):
        placed(run_dir, number)
    assert read_earlier_attempts(run_dir, 3, 1, "").attempts_without_progress == 3
    assert read_earlier_attempts(run_dir, 3, 3, "").attempts_without_progress == 1


def test_a_known_fingerprint_is_recognised(run_dir: RunDir) -> None:
    for number in (1, 2):
        placed(run_dir, number)
        FakeAgent(run_dir, attempt=number).incident(FailureKind.UNKNOWN, fingerprint="abc")
    assert read_earlier_attempts(run_dir, 2, 1, "abc").same_fingerprint_before
    assert not read_earlier_attempts(run_dir, 2, 1, "other").same_fingerprint_before
    assert not read_earlier_attempts(run_dir, 1, 1, "abc").same_fingerprint_before, "it must not recognise itself"
    FakeAgent(run_dir).checkpoint(4)
    assert not read_earlier_attempts(run_dir, 2, 1, "abc").same_fingerprint_before, "a checkpoint lies between them"


def test_the_newest_log_with_content_is_used(run_dir: RunDir) -> None:
    folder = run_dir.attempt(1).scheduler_dir
    assert scheduler_log(run_dir.attempt(1)) is None
    folder.mkdir(parents=True)
    (folder / "empty.out").write_text("")
    (folder / "job.pkl").write_text("not a log")
    (folder / "job.out").write_text("words")
    assert scheduler_log(run_dir.attempt(1)) == folder / "job.out"
