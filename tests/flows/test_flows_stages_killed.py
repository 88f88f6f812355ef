"""Controllers killed around every effect of a whole run with two recoveries: each attempt is submitted once.

The first attempt ends in a NaN, so that the second goes back one checkpoint and puts the newer one aside; the second
loses its node; the third succeeds. Every journal line, file, scheduler query, and moved checkpoint along the way is
counted, and has a kill point before and after it.
"""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest
from control_fakes import FakeAgent, make_spec
from harness import ControllerHarness, left_behind, live, undisturbed
from kill_points import Killed, Points

from rlhf_core.control import cancel
from rlhf_core.control.attempts import jobs, recovery
from rlhf_core.control.attempts.jobs import order_to_end
from rlhf_core.control.controller import LEASE_RETRY_INTERVAL_S
from rlhf_core.control.steps import drive
from rlhf_core.errors import DatabaseUnavailable, RunCancelled, RunFailed
from rlhf_core.files.whole import write_model
from rlhf_core.history import queries
from rlhf_core.launch import start
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.run_dir.journal import read_journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest, JobState
from rlhf_core.schemas.attempts import AttemptState, RunState
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import CancelStarted, ControlEvent


def three_attempts(harness: ControllerHarness, run_dir: RunDir) -> None:
    """Three attempts: a NaN after two checkpoints, a lost node, and a success.

    Agents start when their job is queried, not when it is submitted: their claim would prevent a second job too, and
    the search in the scheduler would not be needed. Those of the second attempt have ended before that.
    """
    accepted: list[JobRequest] = []

    def behave(request: JobRequest) -> None:
        agent = FakeAgent(run_dir, attempt=request.placement.attempt)
        if agent.attempt == 3:
            agent.whole_run(request.placement.resumed_from_step)
            return
        agent.start()
        kind = FailureKind.NON_FINITE if agent.attempt == 1 else FailureKind.NODE_LOST
        if agent.attempt == 1:
            agent.checkpoint(4)
            agent.checkpoint(6)
        agent.fail(kind)

    def begin() -> None:
        while accepted:
            behave(accepted.pop(0))

    def accept(request: JobRequest) -> None:
        if request.placement.attempt == 2:
            behave(request)
        else:
            accepted.append(request)

    harness.scheduler.on_submit = accept
    harness.scheduler.on_status = begin


def numbers(harness: ControllerHarness) -> list[int]:
    return [request.placement.attempt for request in harness.scheduler.submitted]


def undisturbed_points(harness: ControllerHarness) -> Points:
    # All these runs are in one history and come back almost at once: the site's cap would make them wait.
    harness.site = dataclasses.replace(harness.site, max_restarts_per_hour=1_000_000)
    run_dir = harness.run()
    three_attempts(harness, run_dir)
    points = undisturbed(harness, run_dir)
    assert numbers(harness) == [1, 2, 3]
    harness.scheduler.submitted.clear()
    return points


def test_killed_around_every_effect_every_attempt_is_submitted_once(harness: ControllerHarness) -> None:
    points = undisturbed_points(harness)
    assert points.passed >= 80, "lines, files, searches, submissions, ends of jobs, moved checkpoints"
    assert len(points.distinct) >= 40
    for point in points.distinct:
        run_dir = harness.run()
        three_attempts(harness, run_dir)
        harness.scheduler.submitted.clear()
        assert live(harness, run_dir, point) == point
        live(harness, run_dir, None)
        record = read_record(run_dir)
        assert record.state is RunState.COMPLETED, point
        assert numbers(harness) == [1, 2, 3], point
        began_at = [attempt.placement.resumed_from_step for attempt in record.attempts.values()]
        assert began_at == [0, 4, 4], f"killed at point {point}: no attempt may continue from the abandoned branch"
        assert run_dir.newest_put_aside(1) == 6, point
        kinds = [line.event.kind for line in read_journal(run_dir.control)]
        assert kinds.count("attempt_planned") == kinds.count("attempt_submitted") == 3, point
        shown = queries.show_run(harness.store, run_dir.run_id)
        assert [attempt["state"] for attempt in shown.attempts] == ["failed", "failed", "completed"], point
        assert len(shown.decisions) == 2, point


def test_without_the_search_a_kill_gives_two_jobs(harness: ControllerHarness) -> None:
    """Negative control: the test above would detect it."""
    points = undisturbed_points(harness)
    harness.scheduler.find = lambda run_id, attempt, cluster="": None  # type: ignore[method-assign]
    for point in points.distinct:
        run_dir = harness.run()
        three_attempts(harness, run_dir)
        harness.scheduler.submitted.clear()
        live(harness, run_dir, point)
        live(harness, run_dir, None)
        if len(harness.scheduler.submitted) > 3:
            return
    pytest.fail("no point gave two jobs")


def test_rewinding_is_allowed_again_after_progress(harness: ControllerHarness) -> None:
    """And the control: a second NaN before that ends the run."""
    for further, attempts in ((8, 3), (5, 2)):
        harness.scheduler.submitted.clear()
        run_dir = harness.run()

        def fail(agent: FakeAgent, further: int = further) -> None:
            agent.begin()
            for step in (4, 6) if agent.attempt == 1 else (5, further):
                agent.checkpoint(step)
            agent.fail(FailureKind.NON_FINITE)

        harness.runs_well(run_dir, 2, fail)
        with nullcontext() if attempts == 3 else pytest.raises(RunFailed, match="older checkpoint did not help"):
            drive(harness.controller(run_dir))
        assert len(harness.scheduler.submitted) == attempts
        assert read_record(run_dir).state is (RunState.COMPLETED if attempts == 3 else RunState.FAILED)


def test_a_silent_job_is_ended_also_when_its_run_stops(harness: ControllerHarness) -> None:
    """Otherwise `rlhf resume` would start a second job beside it."""
    run_dir = harness.run(make_spec(supervise={"max_attempts": 1}))
    harness.trains_for_ever(run_dir)
    with pytest.raises(RunFailed, match="have been silent for"):
        drive(harness.controller(run_dir))
    assert harness.scheduler.cancelled == ["101"]
    assert harness.scheduler.jobs["101"].state is JobState.ENDED


# ---------------------------------------------------------------------------------------------------------------------
# Killed while it cancels


def cancelled_at(harness: ControllerHarness, run_dir: RunDir, kill_at: int | None) -> Points:
    """A life that is asked to end its run as soon as the job runs."""
    attempt = FakeAgent(run_dir)

    def behave(request: JobRequest) -> None:
        agent = FakeAgent(run_dir, attempt=request.placement.attempt)
        if agent.attempt > 1:
            agent.whole_run()
            return
        agent.start()

    def obey() -> None:
        """Obey like an agent that was ordered to end, or like one whose job was ended.

        The signal that ends a job also announces a preemption.
        """
        if end_was_ordered(harness, run_dir) and not run_dir.attempt(1).outcome.exists():
            attempt.end(AttemptState.FAILED, FailureKind.PREEMPTION)

    harness.scheduler.on_submit, harness.scheduler.on_status = behave, obey
    harness.scheduler.submitted.clear()
    harness.scheduler.cancelled.clear()
    harness.notes.snapshots.clear()
    harness.notes.stop = lambda: len(harness.notes.snapshots) > 2
    points = Points(kill_at, lambda: b"" if kill_at is not None else left_behind(harness))
    controller = harness.controller(run_dir)
    with points.at_every_effect(harness.scheduler, start, jobs), suppress(Killed, RunCancelled):
        drive(controller)
    harness.notes.stop = lambda: False
    return points


def end_was_ordered(harness: ControllerHarness, run_dir: RunDir) -> bool:
    """True if agents or scheduler were ordered to end the job."""
    return bool(harness.scheduler.cancelled) or run_dir.attempt(1).commands.is_dir()


@pytest.fixture
def obedient(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make agents obey at once; the distinct points that a cancelled life passes."""
    monkeypatch.setattr(cancel, "CANCEL_TIMEOUT_S", 0.0)
    harness.site = dataclasses.replace(harness.site, max_restarts_per_hour=1_000_000)
    run_dir = harness.run()
    points = cancelled_at(harness, run_dir, None).distinct
    assert read_record(run_dir).state is RunState.CANCELLED
    return points


def drive_again(harness: ControllerHarness, run_dir: RunDir) -> RunState:
    """Run the next controller without a request to end or resume the run, unless the run has ended.

    Return its state.
    """
    if not read_record(run_dir).ended:
        with suppress(RunCancelled):
            drive(harness.controller(run_dir))
    return read_record(run_dir).state


def test_killed_around_every_effect_of_cancelling_the_run_is_cancelled(
    harness: ControllerHarness, obedient: list[int]
) -> None:
    intended, ordered = 0, 0
    for point in obedient:
        run_dir = harness.run()
        assert cancelled_at(harness, run_dir, point).passed == point
        if read_record(run_dir).cancelling is None and not end_was_ordered(harness, run_dir):
            continue  # the run has not been cancelled yet, and continues
        intended, ordered = intended + 1, ordered + end_was_ordered(harness, run_dir)
        assert drive_again(harness, run_dir) is RunState.CANCELLED, (
            f"killed at point {point}: what was cancelled came back"
        )
        assert numbers(harness) == [1], point
    assert ordered >= 5, "order, end of the job, states"
    assert intended > ordered, "and between the line and the order"


def test_without_the_intent_a_kill_makes_a_cancelled_run_a_preempted_one(
    harness: ControllerHarness, obedient: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the former order of the steps. Every point, because one line less moves those that differ."""
    append = Journal.append

    def append_later(journal: Journal, event: ControlEvent) -> None:
        if not isinstance(event, CancelStarted):
            append(journal, event)

    monkeypatch.setattr(Journal, "append", append_later)
    for point in reversed(range(obedient[-1] + 1)):
        run_dir = harness.run()
        cancelled_at(harness, run_dir, point)
        if end_was_ordered(harness, run_dir) and drive_again(harness, run_dir) is RunState.COMPLETED:
            assert numbers(harness) == [1, 2]
            return
    pytest.fail("no point brought a cancelled run back")


def test_a_run_that_was_being_cancelled_can_be_resumed(harness: ControllerHarness, obedient: list[int]) -> None:
    """It is cancelled first, because its job may still be running."""
    for point in reversed(obedient):
        run_dir = harness.run()
        cancelled_at(harness, run_dir, point)
        if not read_record(run_dir).ended:
            break
    drive(harness.controller(run_dir, resumed=True))
    record = read_record(run_dir)
    assert record.state is RunState.COMPLETED
    assert record.attempts[1].state is AttemptState.CANCELLED
    assert numbers(harness) == [1, 2]


def test_a_job_that_was_ended_without_its_controller_is_no_failure(harness: ControllerHarness) -> None:
    """`rlhf cancel` of a run whose controller does not respond; it wakes up and finds its job gone."""
    run_dir = harness.run()
    agent = FakeAgent(run_dir)

    def ended() -> None:
        if len(harness.notes.snapshots) == 2:
            write_model(run_dir.cancel_request, order_to_end("enough", save=False))
            agent.end(AttemptState.FAILED, FailureKind.PREEMPTION)
            harness.scheduler.end_all()

    def begin(request: JobRequest) -> None:
        agent.start()

    harness.scheduler.on_submit, harness.scheduler.on_status = begin, ended
    with pytest.raises(RunCancelled, match="enough"):
        drive(harness.controller(run_dir))
    assert read_record(run_dir).attempts[1].state is AttemptState.CANCELLED
    assert numbers(harness) == [1]


# ---------------------------------------------------------------------------------------------------------------------
# A database that does not tell the owner of the run


def away(number: int) -> Callable[[], None]:
    """Leave the query for the lease unanswered a number of times after the lease may have run out."""
    left = [DatabaseUnavailable("no answer")] * number

    def require() -> None:
        if left:
            raise left.pop()

    return require


def test_a_submission_waits_until_the_database_confirms_the_lease(harness: ControllerHarness) -> None:
    run_dir = harness.good_run()
    controller = harness.controller(run_dir)
    controller.lease.require = away(3)  # type: ignore[method-assign]
    before = harness.clock.now
    drive(controller)
    assert read_record(run_dir).state is RunState.COMPLETED
    assert numbers(harness) == [1]
    assert harness.clock.now >= before + 3 * LEASE_RETRY_INTERVAL_S
    waits = "waiting for the database to confirm that this controller still owns the run: no answer"
    assert harness.notes.messages.count(waits) == 1


def test_a_cancellation_during_the_wait_is_obeyed_and_nothing_is_submitted(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    controller = harness.controller(run_dir)
    controller.lease.require = away(1_000_000)  # type: ignore[method-assign]
    harness.notes.stop = lambda: "waiting for the database" in "".join(harness.notes.messages)
    with pytest.raises(RunCancelled):
        drive(controller)
    assert read_record(run_dir).state is RunState.CANCELLED
    assert numbers(harness) == []


def test_a_user_can_end_the_job_without_the_database(harness: ControllerHarness, obedient: list[int]) -> None:
    run_dir = harness.run()
    harness.notes.snapshots.clear()
    harness.notes.stop = lambda: len(harness.notes.snapshots) > 2

    def begin(request: JobRequest) -> None:
        FakeAgent(run_dir).start()
        controller.lease.require = away(1_000_000)  # type: ignore[method-assign]

    harness.scheduler.on_submit = begin
    controller = harness.controller(run_dir)
    with pytest.raises(RunCancelled):
        drive(controller)
    assert harness.scheduler.jobs[harness.scheduler.cancelled[-1]].state is JobState.ENDED


def test_a_controller_that_takes_over_waits_for_the_end_before_it_decides(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it decided about an attempt that it had not seen end, as an unknown failure, again and again in a loop
    without a pause."""
    run_dir = harness.run()
    polls: list[int] = []

    def ends() -> None:
        polls.append(1)
        assert len(polls) < 200, "it polls without waiting"
        if len(harness.notes.snapshots) == 2:
            harness.scheduler.jobs["101"].state = JobState.ENDED

    def killed(*_given: object, **_named: object) -> None:
        raise Killed

    harness.runs_well(run_dir, 1, FakeAgent.start)
    harness.scheduler.on_status = ends
    with monkeypatch.context() as patched:
        patched.setattr(recovery, "explain", killed)
        with pytest.raises(Killed):
            drive(harness.controller(run_dir))
    harness.notes.messages.clear()
    drive(harness.controller(run_dir))
    record = read_record(run_dir)
    assert (record.attempts[1].state, record.attempts[1].failure_kind) == (AttemptState.LOST, FailureKind.AGENT_KILLED)
    assert [message for message in harness.notes.messages if "attempt 1 ended" in message] == [
        "attempt 1 ended: agent_killed. attempt without a new checkpoint 1 of 3 allowed for agent_killed"
    ]
    assert record.state is RunState.COMPLETED
