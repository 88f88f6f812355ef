"""The order of the steps of a run, for every way they can end and every point at which a controller can die."""

import errno
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from control_fakes import NODE, FakeAgent, make_spec
from harness import ControllerHarness
from kill_points import Killed

from rlhf_core.control.attempts.jobs import SCHEDULER_RETRY_INTERVAL_S
from rlhf_core.control.cancel import cancel_run
from rlhf_core.control.steps import drive
from rlhf_core.errors import (
    DatabaseUnavailable,
    LeaseLost,
    PreflightBlocked,
    RunCancelled,
    RunFailed,
    SchedulerUnavailable,
    SubmissionDeferred,
    SubmissionFailed,
)
from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import write_model
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest, JobState, JobStatus
from rlhf_core.schemas.attempts import AttemptState, Role, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.journal import JournalLine
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.resources import Inventory, Submission
from rlhf_core.watchdog.node_records import clear_node, node_standings


def stages_of(harness: ControllerHarness, run_dir: RunDir) -> list[tuple[str, int, str]]:
    shown = queries.show_run(harness.store, run_dir.run_id)
    return [(stage["name"], stage["attempt"], stage["state"]) for stage in shown.stages]


FOUR_STAGES = [
    ("preflight", 0, "completed"),
    ("allocate", 1, "completed"),
    ("train", 1, "completed"),
    ("evaluate", 1, "completed"),
]


def test_a_run_without_trouble_has_four_stages_and_one_attempt(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    assert stages_of(harness, run_dir) == FOUR_STAGES
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert shown.run["state"] == "completed"
    assert [attempt["state"] for attempt in shown.attempts] == ["completed"]
    assert harness.notes.titles == ["preflight", "allocate attempt 1", "train attempt 1", "evaluate"]
    assert len(harness.scheduler.submitted) == 1


def test_a_temporarily_refused_job_is_submitted_later(harness: ControllerHarness) -> None:
    """No attempt is spent on it. Control: a permanent refusal ends the run."""
    run_dir = harness.good_run(make_spec(supervise={"backoff_s": 30}))
    works, submitted_at = harness.scheduler.on_submit, []

    def accept_the_third(request: JobRequest) -> None:
        submitted_at.append(harness.clock.now)
        if len(submitted_at) < 3:
            harness.scheduler.jobs.clear()
            raise SubmissionDeferred("Required partition not available")
        works(request)

    harness.scheduler.on_submit = accept_the_third
    drive(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert list(read_record(run_dir).attempts) == [1]
    first, second, third = submitted_at
    assert 15 <= second - first <= 31
    assert 30 <= third - second <= 61

    def refuse(request: JobRequest) -> None:
        harness.scheduler.jobs.clear()
        raise SubmissionFailed("Invalid qos")

    harness.scheduler.on_submit = refuse
    with pytest.raises(RunFailed, match="Invalid qos"):
        drive(harness.controller(harness.run()))


@pytest.mark.parametrize("question", ["inventory", "find", "submit", "cancel"])
def test_an_unresponsive_scheduler_is_waited_for(harness: ControllerHarness, question: str) -> None:
    """Before and between the attempts as during training: two of three questions of this kind get no answer."""
    run_dir = harness.run()
    fails_then_runs(harness, run_dir, FailureKind.NODE_LOST, failures=1)
    answer, asked_at = getattr(harness.scheduler, question), []

    def seldom_answers(*given: Any) -> Any:
        asked_at.append(harness.clock.now)
        if len(asked_at) % 3:
            raise SchedulerUnavailable("Slurm's controller does not respond: it is DOWN")
        return answer(*given)

    setattr(harness.scheduler, question, seldom_answers)
    drive(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert [request.placement.attempt for request in harness.scheduler.submitted] == [1, 2]
    assert asked_at[1] - asked_at[0] == asked_at[2] - asked_at[1] == SCHEDULER_RETRY_INTERVAL_S
    told = [message for message in harness.notes.messages if "it is DOWN; asking again every 30 s" in message]
    assert len(told) == {"inventory": 3, "find": 2, "submit": 2, "cancel": 1}[question], "once per wait"


def test_a_job_that_was_accepted_without_an_answer_is_adopted(harness: ControllerHarness) -> None:
    run_dir = harness.good_run()
    submit = harness.scheduler.submit

    def without_an_answer(request: JobRequest) -> Submission:
        submit(request)
        raise SchedulerUnavailable("Slurm did not confirm the job: Socket timed out")

    harness.scheduler.submit = without_an_answer  # type: ignore[method-assign]
    drive(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert len(harness.scheduler.submitted) == 1


def test_a_run_that_waits_for_the_scheduler_can_be_cancelled(harness: ControllerHarness) -> None:
    run_dir = harness.run()

    def silent() -> Inventory:
        write_model(run_dir.cancel_request, AgentCommand(kind="cancel", reason="not needed", time=utc_now()))
        raise SchedulerUnavailable("Slurm's controller does not respond")

    harness.scheduler.inventory = silent  # type: ignore[method-assign]
    with pytest.raises(RunCancelled, match="not needed"):
        drive(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.CANCELLED


def test_stages_follow_the_agent(harness: ControllerHarness) -> None:
    """The job waits for nodes, then trains, then evaluates: each is recorded when it happens. A wait that needs an
    administrator is told once."""
    run_dir = harness.run()
    harness.scheduler.first_state = JobState.PENDING
    status = harness.scheduler.status

    def held(submissions: Sequence[Submission]) -> dict[str, JobStatus]:
        answers = status(submissions).items()
        return {
            job_id: replace(answer, reason="JobHeldAdmin", needs_action=answer.state is JobState.PENDING)
            for job_id, answer in answers
        }

    harness.scheduler.status = held  # type: ignore[method-assign]
    agent, seen = FakeAgent(run_dir), []

    def meanwhile() -> None:
        seen.append(read_record(run_dir).state)
        job = harness.scheduler.jobs["101"]
        match len(seen):
            case 3:
                job.state = JobState.RUNNING
                agent.start()
            case 5:
                agent.step(1)
            case 7:
                agent.role(Role.EVALUATOR)
            case 9:
                agent.end(AttemptState.COMPLETED)

    harness.scheduler.on_status = meanwhile
    drive(harness.controller(run_dir))
    order = list(dict.fromkeys(seen))
    assert order == [RunState.QUEUED, RunState.TRAINING, RunState.EVALUATING]
    assert [text for text in harness.notes.messages if "waits" in text] == ["warning attempt 1 waits: JobHeldAdmin"]
    assert stages_of(harness, run_dir) == FOUR_STAGES
    assert max(snapshot.progress.step for snapshot in harness.notes.snapshots) == 1


def test_a_blocking_check_starts_nothing(harness: ControllerHarness, checks: list[CheckResult]) -> None:
    run_dir = harness.run()
    checks.append(
        CheckResult(id="b.check", status=CheckStatus.BLOCKED, found="7", expected="8", advice="make it eight")
    )
    with pytest.raises(PreflightBlocked, match=r"b\.check: found 7; expected 8. Make it eight."):
        drive(harness.controller(run_dir))
    assert harness.scheduler.submitted == []
    assert read_record(run_dir).state is RunState.FAILED
    assert stages_of(harness, run_dir) == [("preflight", 0, "failed")]
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert [check["status"] for check in shown.checks] == ["passed", "blocked"]
    cause = "1 check blocks the run; nothing was started: b.check: found 7; expected 8. Make it eight."
    assert shown.run["message"] == cause


def test_preflight_proceeds_without_an_unresponsive_history(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(store: object, shape: str) -> None:
        raise DatabaseUnavailable("the database is away")

    monkeypatch.setattr(queries, "seconds_per_step", away)
    run_dir = harness.completed()
    assert read_record(run_dir).state is RunState.COMPLETED
    assert any(
        "skipping the comparison with earlier runs: the database is away" in text for text in harness.notes.messages
    )


def fails_then_runs(
    harness: ControllerHarness, run_dir: RunDir, kind: FailureKind, *, failures: int, checkpoint: int = 0
) -> None:
    """The first jobs fail, later ones succeed. With ``checkpoint``, a failing job leaves that checkpoint behind."""

    def fail(agent: FakeAgent) -> None:
        agent.start()
        if checkpoint:
            agent.checkpoint(checkpoint)
        agent.fail(kind, fingerprint="abc")

    harness.runs_well(run_dir, failures, fail)


def test_a_transient_failure_gets_a_new_attempt_from_the_checkpoint(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    fails_then_runs(harness, run_dir, FailureKind.NODE_LOST, failures=1, checkpoint=6)
    drive(harness.controller(run_dir))
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert [attempt["state"] for attempt in shown.attempts] == ["failed", "completed"]
    assert [attempt["resumed_from_step"] for attempt in shown.attempts] == [0, 6]
    assert [decision["action"] for decision in shown.decisions] == ["new_attempt"]
    assert harness.scheduler.submitted[1].placement.resume_checkpoint == "step-000006"
    assert harness.scheduler.cancelled == ["101"], "the old job must be proven gone before the new one is submitted"


def test_a_permanent_failure_stops_with_the_diagnosis(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    fails_then_runs(harness, run_dir, FailureKind.REWARD_FUNCTION, failures=9)
    with pytest.raises(RunFailed) as caught:
        drive(harness.controller(run_dir))
    text = str(caught.value)
    assert "reward_function" in text
    assert "suspect ranks: 1 on n1" in text
    assert "attempts/1/restarts/0/incident" in text
    assert f"rlhf resume {run_dir.run_id}" in text
    assert len(harness.scheduler.submitted) == 1
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert shown.run["state"] == "failed"
    assert shown.decisions[-1]["action"] == "stop"


def test_a_wrong_setting_needs_a_new_run(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    fails_then_runs(harness, run_dir, FailureKind.CONFIG, failures=9)
    with pytest.raises(RunFailed, match="keeps its settings; if one is wrong, start a new run: rlhf run"):
        drive(harness.controller(run_dir))


def test_the_budget_ends_without_progress(harness: ControllerHarness) -> None:
    run_dir = harness.run(make_spec(supervise={"max_attempts": 2}))
    fails_then_runs(harness, run_dir, FailureKind.NODE_LOST, failures=9)
    with pytest.raises(RunFailed, match="2 attempts without a new checkpoint"):
        drive(harness.controller(run_dir))
    assert len(harness.scheduler.submitted) == 2


def gets_further_each_time(harness: ControllerHarness, run_dir: RunDir, hours: float = 0.0) -> None:
    """Attempts that each leave a checkpoint, and have held their allocation for the given time when they end."""

    def fail(agent: FakeAgent) -> None:
        agent.begin()
        begun = utc_now() - timedelta(hours=hours)
        run_dir.attempt(agent.attempt).claim.write_text(json.dumps({"time": begun.isoformat()}))
        agent.checkpoint(agent.attempt)
        agent.end(AttemptState.FAILED, FailureKind.NODE_LOST)

    harness.attempts(run_dir, fail)


def test_the_cap_on_attempts_applies_even_with_progress(harness: ControllerHarness) -> None:
    """`max_attempts` alone does not: see the next test. A user who resumes the run grants as many attempts again."""
    run_dir = harness.run(make_spec(supervise={"max_attempts": 1, "max_total_attempts": 3}))
    gets_further_each_time(harness, run_dir)
    for allowed in (3, 6):
        with pytest.raises(RunFailed, match=r"not tried again: supervise\.max_total_attempts = 3: 3 attempts made"):
            drive(harness.controller(run_dir, resumed=allowed > 3))
        assert len(harness.scheduler.submitted) == allowed
    assert queries.show_run(harness.store, run_dir.run_id).decisions[-1]["action"] == "stop"


def test_a_budget_that_a_user_renewed_outlasts_the_controller(harness: ControllerHarness) -> None:
    """`rlhf resume` of a run in its third attempt; its controller dies, and the daemon's adopts the run."""
    run_dir = harness.run(make_spec(supervise={"max_attempts": 1, "max_total_attempts": 3}))
    gets_further_each_time(harness, run_dir)
    fail = harness.scheduler.on_submit

    def killed(request: JobRequest) -> None:
        fail(request)
        if request.placement.attempt == 3:
            raise Killed

    harness.scheduler.on_submit = killed
    with pytest.raises(Killed):
        drive(harness.controller(run_dir))
    harness.scheduler.on_submit = fail
    harness.controller(run_dir, resumed=True)
    with pytest.raises(RunFailed, match=r"max_total_attempts = 3: 3 attempts made"):
        drive(harness.controller(run_dir))
    assert sorted(read_record(run_dir).attempts) == [1, 2, 3, 4, 5], "the third one counts again"


def test_the_cap_on_hours_bounds_the_time_limit_and_then_the_attempts(harness: ControllerHarness) -> None:
    run_dir = harness.run(make_spec(supervise={"max_node_hours": 5}, resources={"num_nodes": 2, "time_limit_s": 7000}))
    harness.scheduler.nodes = ("n1", "n2")
    gets_further_each_time(harness, run_dir, hours=1.0)
    words = (
        r"max_node_hours = 5: 6\.00 node-hours used in 3 attempts; the remaining time is too short to train and save"
    )
    with pytest.raises(RunFailed, match=words):
        drive(harness.controller(run_dir))
    limits = [request.time_limit_s for request in harness.scheduler.submitted]
    assert limits[0] == 7000
    assert limits[1:] == [pytest.approx(5400, abs=60), pytest.approx(1800, abs=60)]


def test_no_attempt_is_made_in_which_no_step_would_fit(harness: ControllerHarness) -> None:
    """1800 s are left for steps of 1700 s and 1000 s: the longer one and its checkpoint might not fit."""
    run_dir = harness.run(make_spec(supervise={"max_node_hours": 1.5}))

    def fail(agent: FakeAgent) -> None:
        agent.begin()
        begun = utc_now() - timedelta(hours=1)
        run_dir.attempt(agent.attempt).claim.write_text(json.dumps({"time": begun.isoformat()}))
        agent.step(1, **{"time/step_s": 1700.0})
        agent.step(2, **{"time/step_s": 1000.0})
        agent.checkpoint(2)
        agent.end(AttemptState.FAILED, FailureKind.NODE_LOST)

    harness.attempts(run_dir, fail)
    with pytest.raises(RunFailed, match=r"1\.00 node-hours used in 1 attempt; the remaining time is too short"):
        drive(harness.controller(run_dir))


def test_each_new_checkpoint_renews_the_budget(harness: ControllerHarness) -> None:
    """Negative control of the previous test: five failures are allowed when every attempt makes progress."""
    run_dir = harness.run(make_spec(supervise={"max_attempts": 2}))

    def fail(agent: FakeAgent) -> None:
        agent.begin()
        agent.checkpoint(agent.attempt)
        agent.end(AttemptState.FAILED, FailureKind.NODE_LOST)

    harness.runs_well(run_dir, 5, fail)
    drive(harness.controller(run_dir))
    assert len(harness.scheduler.submitted) == 6


def test_the_back_off_is_observed(harness: ControllerHarness) -> None:
    run_dir = harness.run(make_spec(supervise={"backoff_s": 40}))
    fails_then_runs(harness, run_dir, FailureKind.NODE_LOST, failures=1)
    drive(harness.controller(run_dir))
    assert harness.clock.now >= 10  # 20 s from the decision, less the real time since then
    assert any("attempt 2 begins in" in text for text in harness.notes.messages)


def loses_node(harness: ControllerHarness, kind: FailureKind = FailureKind.NODE_LOST) -> RunDir:
    """A run whose first attempt fails because of node n1 on Slurm; the next one succeeds."""
    run_dir = harness.run()
    harness.scheduler.name = "slurm"

    def fail(agent: FakeAgent) -> None:
        agent.begin()
        if kind is FailureKind.NODE_UNFIT:
            agent.probe(unfit="n1")
        agent.fail(kind)

    harness.runs_well(run_dir, 1, fail)
    return run_dir


def test_a_lost_node_is_excluded_by_its_run_and_by_the_next(harness: ControllerHarness) -> None:
    harness.scheduler.nodes = ("n1", "n2", "n3")
    first = loses_node(harness)
    drive(harness.controller(first))
    assert [request.placement.excluded_nodes for request in harness.scheduler.submitted] == [(), ("n1",)]
    harness.completed()
    placement = harness.scheduler.submitted[-1].placement
    assert placement.excluded_nodes == ("n1",)
    assert placement.exclusion_reasons["n1"].startswith("strikes in all runs: 1, the last node_lost; until ")
    assert f"attempt 1 excludes n1: {placement.exclusion_reasons['n1']}" in harness.notes.messages


def test_a_node_that_was_cleared_is_used_again_until_it_fails_again(harness: ControllerHarness) -> None:
    harness.scheduler.nodes = ("n1", "n2", "n3")
    first = loses_node(harness)
    drive(harness.controller(first))
    clear_node(harness.store, harness.site.runs_dir, "n1", "bea", "new cable", utc_now())
    harness.completed()
    assert harness.scheduler.submitted[-1].placement.excluded_nodes == ()
    third = loses_node(harness)
    drive(harness.controller(third))
    assert [request.placement.excluded_nodes for request in harness.scheduler.submitted[-2:]] == [(), ("n1",)]
    harness.completed()
    placement = harness.scheduler.submitted[-1].placement
    assert placement.exclusion_reasons["n1"].startswith("strikes in all runs: 1, the last node_lost; until ")


def test_repairs_that_cannot_be_read_stop_no_attempt(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "cleared-nodes")

    monkeypatch.setattr("rlhf_core.control.attempts.planning.node_standings", closed)
    harness.scheduler.name = "slurm"
    harness.completed()
    assert any("no nodes are excluded for their strikes" in text for text in harness.notes.messages)


def test_an_unfit_node_is_replaced_at_once(harness: ControllerHarness) -> None:
    harness.scheduler.nodes = ("n1", "n2")
    run_dir = loses_node(harness, FailureKind.NODE_UNFIT)
    drive(harness.controller(run_dir))
    assert [request.placement.excluded_nodes for request in harness.scheduler.submitted] == [(), ("n1",)]
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert shown.run["state"] == "completed"
    assert shown.decisions[-1]["delay_s"] == 0
    (found,) = [check for check in shown.checks if check["attempt"] == 1]
    assert (found["id"], found["status"], found["node"]) == ("probe.matmul", "blocked", "n1")
    assert [
        one.node for one in node_standings(harness.store, utc_now(), harness.site.runs_dir) if one.excluded_until
    ] == ["n1"]


def test_an_unfit_node_without_a_replacement_ends_the_run(harness: ControllerHarness) -> None:
    """Other suspect nodes are used again in this case; an unfit one would only be found unfit again."""
    run_dir = loses_node(harness, FailureKind.NODE_UNFIT)
    with pytest.raises(PreflightBlocked, match="no other node can take the place of n1") as error:
        drive(harness.controller(run_dir))
    assert error.value.exit_code == 2
    assert read_record(run_dir).state is RunState.FAILED
    assert len(harness.scheduler.submitted) == 1


def test_a_suspect_node_is_used_when_there_are_too_few_nodes(harness: ControllerHarness) -> None:
    run_dir = loses_node(harness)
    drive(harness.controller(run_dir))
    assert harness.scheduler.submitted[-1].placement.excluded_nodes == ()
    assert any("not excluding n1, although suspect" in text for text in harness.notes.messages)


def test_after_an_outage_attempts_above_the_cap_wait(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the control: at the cap itself no attempt waits yet."""
    run_dir = harness.run()
    fails_then_runs(harness, run_dir, FailureKind.NODE_LOST, failures=1)
    answers = iter([62, 61, 60])
    monkeypatch.setattr(queries, "restarts_since", lambda store, since: next(answers))
    drive(harness.controller(run_dir))
    waits = [text for text in harness.notes.messages if text.startswith("attempt 2 waits")]
    assert [text.split(": ")[1].split()[0] for text in waits] == ["62", "61"]
    assert harness.clock.now >= 120
    assert queries.show_run(harness.store, run_dir.run_id).run["state"] == "completed"


def test_a_vanished_job_is_lost_and_retried(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.runs_well(run_dir, 1, lambda agent: (agent.begin(), harness.scheduler.end_all()))
    drive(harness.controller(run_dir))
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert [attempt["state"] for attempt in shown.attempts] == ["lost", "completed"]
    (incident,) = shown.incidents
    assert incident["failure_kind"] == "agent_killed"
    assert shown.decisions[0]["action"] == "new_attempt"


def test_a_run_waits_for_nodes_that_do_not_start(harness: ControllerHarness) -> None:
    """As in a cloud without capacity: no budget is spent, and no node suspected. Control: two nodes that are lost
    afterwards do count, and a third ends the run."""
    spec = make_spec(supervise={"max_attempts": 3, "backoff_s": 30, "max_backoff_s": 120})
    status, ends = harness.scheduler.status, JobStatus(JobState.ENDED, "down~", (NODE,), "POWERED_OFF")

    def status_in_the_cloud(submissions: Sequence[Submission]) -> dict[str, JobStatus]:
        answers = status(submissions)
        return answers if submissions[0].attempt > 5 else {one.job_id: ends for one in submissions}

    harness.scheduler.status = status_in_the_cloud  # type: ignore[method-assign]
    run_dir = harness.run(spec)
    harness.runs_well(run_dir, 5, lambda agent: None)
    drive(harness.controller(run_dir))
    record = read_record(run_dir)
    assert (record.state, len(record.attempts)) == (RunState.COMPLETED, 6)
    incidents = queries.show_run(harness.store, run_dir.run_id).incidents
    assert [(one["failure_kind"], one["suspect_nodes"]) for one in incidents] == [("no_nodes", [])] * 5
    assert incidents[0]["message"] == "No agent of attempt 1 has started. down~"
    since = datetime.fromisoformat(incidents[0]["seen_at"])
    assert incidents[4]["message"] == (
        f"No agent of attempt 5 has started, nor of any other since {since:%Y-%m-%d %H:%M} UTC. down~"
    )
    assert {attempt.placement.excluded_nodes for attempt in record.attempts.values()} == {()}

    def lose(agent: FakeAgent) -> None:
        if agent.attempt > 5:
            agent.begin()
            agent.fail(FailureKind.NODE_LOST)

    run_dir = harness.run(spec)
    harness.attempts(run_dir, lose)
    with pytest.raises(RunFailed, match="3 attempts without a new checkpoint"):
        drive(harness.controller(run_dir))
    assert len(read_record(run_dir).attempts) == 8


def test_an_old_job_that_does_not_end_stops_the_recovery(harness: ControllerHarness) -> None:
    """Two concurrent attempts of one run would write the same checkpoints."""
    run_dir = harness.run()
    fails_then_runs(harness, run_dir, FailureKind.NODE_LOST, failures=1)
    harness.scheduler.stubborn = True
    with pytest.raises(Exception, match="could not be ended"):
        drive(harness.controller(run_dir))
    assert len(harness.scheduler.submitted) == 1


def test_a_job_that_was_cancelled_from_outside_ends_the_run(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.attempts(run_dir, lambda agent: (agent.begin(), agent.end(AttemptState.CANCELLED, FailureKind.USER_CANCEL)))
    with pytest.raises(RunCancelled):
        drive(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.CANCELLED
    assert stages_of(harness, run_dir)[-1] == ("train", 1, "cancelled")


# ---------------------------------------------------------------------------------------------------------------------
# Interrupting


def test_an_interrupted_run_is_cancelled_and_its_job_gone(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)
    harness.notes.stop = lambda: len(harness.notes.snapshots) > 3
    with pytest.raises(RunCancelled, match="interrupted"):
        drive(harness.controller(run_dir))
    assert harness.scheduler.jobs["101"].state is JobState.ENDED
    commands = list(run_dir.attempt(1).commands.glob("*.json"))
    assert [path.name for path in commands] == ["1.json"]
    assert AgentCommand.model_validate_json(commands[0].read_bytes()).kind == "cancel"
    assert stages_of(harness, run_dir)[-1] == ("train", 1, "cancelled")
    assert queries.show_run(harness.store, run_dir.run_id).attempts[0]["state"] == "cancelled"


def test_a_request_of_rlhf_cancel_is_obeyed_and_removed(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)

    def cancel() -> None:
        request = AgentCommand(kind="cancel", reason="enough of it", time=utc_now())
        write_model(run_dir.cancel_request, request)

    harness.scheduler.on_status = cancel
    with pytest.raises(RunCancelled, match="enough of it"):
        drive(harness.controller(run_dir))
    assert not run_dir.cancel_request.exists()
    assert read_record(run_dir).cause == "enough of it"


def test_a_run_that_was_faster_than_its_cancellation_is_completed(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)
    harness.notes.stop = lambda: len(harness.notes.snapshots) > 3
    harness.scheduler.on_status = lambda: (
        FakeAgent(run_dir).end(AttemptState.COMPLETED) if run_dir.attempt(1).commands.is_dir() else None
    )
    drive(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED


def test_a_cancelled_run_can_be_resumed(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)
    harness.notes.stop = lambda: True
    with pytest.raises(RunCancelled):
        drive(harness.controller(run_dir))
    harness.notes.stop = lambda: False
    write_model(run_dir.cancel_request, AgentCommand(kind="cancel", reason="old", time=utc_now()))
    harness.runs_well(run_dir)
    drive(harness.controller(run_dir, resumed=True))
    assert read_record(run_dir).state is RunState.COMPLETED


# ---------------------------------------------------------------------------------------------------------------------
# Controllers that die


def events(run_dir: RunDir) -> list[str]:
    return [line.event.kind for line in read_models(run_dir.control, JournalLine)]


def test_a_controller_started_after_the_end_adopts_the_outcome(harness: ControllerHarness) -> None:
    """The first controller is killed while the job trains; the job has long ended when the next one starts."""
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)
    harness.scheduler.on_status = lambda: (_ for _ in ()).throw(Killed())
    with pytest.raises(Killed):
        drive(harness.controller(run_dir))
    harness.scheduler.on_status = lambda: None
    FakeAgent(run_dir).whole_run()
    harness.scheduler.end_all()
    drive(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert len(harness.scheduler.submitted) == 1
    assert stages_of(harness, run_dir) == FOUR_STAGES


def test_a_completed_run_is_left_alone(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    before = events(run_dir)
    drive(harness.controller(run_dir, resumed=True))
    assert events(run_dir) == [*before, "controller_started"]
    assert len(harness.scheduler.submitted) == 1


def test_resuming_a_failed_run_checks_again_and_renews_the_budget(harness: ControllerHarness) -> None:
    run_dir = harness.run(make_spec(supervise={"max_attempts": 1, "backoff_s": 500}))
    fails_then_runs(harness, run_dir, FailureKind.NODE_LOST, failures=1)
    with pytest.raises(RunFailed):
        drive(harness.controller(run_dir))
    drive(harness.controller(run_dir, resumed=True))
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert shown.run["state"] == "completed"
    assert [stage["name"] for stage in shown.stages].count("preflight") == 2
    assert harness.clock.now < 100, "a user's request does not wait for the back-off"


@pytest.mark.parametrize("end", [RunCancelled, RunFailed])
def test_a_takeover_that_comes_after_the_end_starts_nothing(
    harness: ControllerHarness, end: type[RunCancelled | RunFailed]
) -> None:
    """The flow run that takes a run over may wait for a worker for hours, while a user cancels or resumes the run."""
    run_dir = harness.killed_in_training(make_spec(supervise={"max_attempts": 1}))
    if end is RunCancelled:
        cancel_run(run_dir, harness.site, harness.store, "enough", log=print, sleep=harness.clock.sleep)
    else:
        FakeAgent(run_dir).end(AttemptState.FAILED, FailureKind.DATA)
        harness.scheduler.end_all()
        with pytest.raises(RunFailed):
            drive(harness.controller(run_dir))
    cause = read_record(run_dir).cause
    with pytest.raises(end, match=re.escape(cause)):
        drive(harness.controller(run_dir))
    assert len(harness.scheduler.submitted) == 1
    assert read_record(run_dir).ended


# ---------------------------------------------------------------------------------------------------------------------
# Leases and databases


def test_a_controller_that_lost_its_lease_writes_nothing_more(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)
    controller = harness.controller(run_dir)
    sizes = []

    def taken_over() -> None:
        if len(harness.notes.snapshots) == 3:
            harness.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 60, takeover=lambda owner: True)
            controller.lease._renewed = -1e9
            sizes.append(run_dir.control.stat().st_size)

    harness.scheduler.on_status = taken_over
    with pytest.raises(LeaseLost):
        drive(controller)
    harness._stack.close()
    assert sizes == [run_dir.control.stat().st_size]
    assert run_dir.control_reserve.exists(), "it belongs to the other controller now"
    assert harness.scheduler.cancelled == []


def test_the_reserve_is_freed_before_another_controller_can_have_the_run(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards it is the other controller's."""
    run_dir = harness.good_run()
    controller = harness.controller(run_dir)
    drive(controller)
    assert run_dir.control_reserve.exists()
    seen: list[bool] = []
    release = controller.lease.release

    def released() -> None:
        seen.append(run_dir.control_reserve.exists())
        release()

    monkeypatch.setattr(controller.lease, "release", released)
    harness._stack.close()
    assert seen == [False]


def test_a_database_that_goes_away_changes_nothing_but_the_view(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = harness.good_run()
    controller = harness.controller(run_dir)
    away = True

    def sync(directory: RunDir, store: HistoryStore, first_attempt: int) -> None:
        if away:
            raise DatabaseUnavailable("it is away")
        real_sync(directory, store)

    from rlhf_core.watchdog.ingest import sync as real_sync

    monkeypatch.setattr("rlhf_core.watchdog.watcher.sync", sync)
    drive(controller)
    assert read_record(run_dir).state is RunState.COMPLETED
    assert {snapshot.history_behind for snapshot in harness.notes.snapshots} == {"it is away"}
    away = False
    harness._stack.close()
    assert queries.show_run(harness.store, run_dir.run_id).run["state"] == "completed"


def test_a_second_controller_is_refused_while_the_first_lives(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    harness.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 60)
    with pytest.raises(LeaseLost, match="b on elsewhere, process 1"):
        harness.controller(run_dir)


def test_a_decision_is_recorded_before_it_is_carried_out(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    fails_then_runs(harness, run_dir, FailureKind.NODE_LOST, failures=1)
    drive(harness.controller(run_dir))
    kinds = events(run_dir)
    second_plan = [index for index, kind in enumerate(kinds) if kind == "attempt_planned"][1]
    assert kinds.index("decision_made") < second_plan
    decision = read_record(run_dir).attempts[1].decision
    assert decision is not None
    assert decision.action is Action.NEW_ATTEMPT
