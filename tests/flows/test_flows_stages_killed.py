"""The controller is killed around every effect of a whole run with two recoveries: each attempt is submitted once.

The first attempt ends in a NaN, so that the second goes back one checkpoint and puts the newer one aside; the second
loses its node; the third runs well. Every line of the journal, file, question to the scheduler, and moved checkpoint on
the way is counted, and is a point before and a point after it.
"""

import dataclasses
from contextlib import nullcontext

import pytest
from control_fakes import FakeAgent, make_spec
from desk import Desk
from kill_points import Killed, Points

from flows.stages import drive
from rlhf_core.errors import RunFailed
from rlhf_core.launch import start
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir import RunDir
from rlhf_core.scheduler.base import JobRequest, JobState
from rlhf_core.schemas.attempts import AttemptState, RunState
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.resources import Role


def three_attempts(desk: Desk, run_dir: RunDir) -> None:
    """A NaN after two checkpoints, a lost node, a good end.

    Agents begin when their job is asked for, not when it is submitted: their claim would prevent a second job too, and
    the search in the scheduler would not be needed.
    """
    accepted: list[JobRequest] = []

    def behave(request: JobRequest) -> None:
        agent = FakeAgent(run_dir, attempt=request.placement.attempt)
        if agent.attempt == 3:
            agent.whole_run(request.placement.resumed_from_step)
            return
        agent.begin()
        agent.role(Role.TRAINER)
        kind = FailureKind.NON_FINITE if agent.attempt == 1 else FailureKind.NODE_LOST
        if agent.attempt == 1:
            agent.checkpoint(4)
            agent.checkpoint(6)
        agent.incident(kind)
        agent.end(AttemptState.FAILED, kind)

    def begin() -> None:
        while accepted:
            behave(accepted.pop(0))

    desk.scheduler.on_submit = accepted.append
    desk.scheduler.on_status = begin


def live(desk: Desk, run_dir: RunDir, kill_at: int | None) -> int:
    """One life of a controller; how many points it passed."""
    points = Points(kill_at)
    session = desk.controller(run_dir)
    with points.at_every_effect(desk.scheduler, start):
        try:
            drive(session)
        except Killed:
            assert kill_at is not None
    return points.passed


def numbers(desk: Desk) -> list[int]:
    return [request.placement.attempt for request in desk.scheduler.submitted]


def undisturbed_points(desk: Desk) -> int:
    # All these runs are in one history and come back within a moment: the site's cap would have them wait.
    desk.site = dataclasses.replace(desk.site, max_restarts_per_hour=1_000_000)
    run_dir = desk.run()
    three_attempts(desk, run_dir)
    passed = live(desk, run_dir, None)
    assert numbers(desk) == [1, 2, 3]
    desk.scheduler.submitted.clear()
    return passed


def test_killed_around_every_effect_every_attempt_is_submitted_once(desk: Desk) -> None:
    points = undisturbed_points(desk)
    assert points >= 80, "lines, files, searches, submissions, ends of jobs, moved checkpoints"
    for point in range(points):
        run_dir = desk.run()
        three_attempts(desk, run_dir)
        desk.scheduler.submitted.clear()
        assert live(desk, run_dir, point) == point
        live(desk, run_dir, None)
        record = read_record(run_dir)
        assert record.state is RunState.COMPLETED, point
        assert numbers(desk) == [1, 2, 3], point
        began_at = [attempt.placement.resumed_from_step for attempt in record.attempts.values()]
        assert began_at == [0, 4, 4], f"killed at point {point}: nobody may go on from the branch that was given up"
        assert run_dir.newest_put_aside(1) == 6, point


def test_without_the_search_some_point_gives_two_jobs(desk: Desk) -> None:
    """Negative control: the test above would see it."""
    points = undisturbed_points(desk)
    desk.scheduler.find = lambda run_id, attempt: None  # type: ignore[method-assign]
    for point in range(points):
        run_dir = desk.run()
        three_attempts(desk, run_dir)
        desk.scheduler.submitted.clear()
        live(desk, run_dir, point)
        live(desk, run_dir, None)
        if len(desk.scheduler.submitted) > 3:
            return
    pytest.fail("no point gave two jobs")


def test_going_back_helps_again_once_training_has_got_further(desk: Desk) -> None:
    """And the control: a second NaN that comes before that ends the run."""
    for further, attempts in ((8, 3), (5, 2)):
        desk.scheduler.submitted.clear()
        run_dir = desk.run()

        def behave(request: JobRequest, run_dir: RunDir = run_dir, further: int = further) -> None:
            agent = FakeAgent(run_dir, attempt=request.placement.attempt)
            if agent.attempt == 3:
                agent.whole_run(request.placement.resumed_from_step)
                return
            agent.begin()
            for step in (4, 6) if agent.attempt == 1 else (5, further):
                agent.checkpoint(step)
            agent.incident(FailureKind.NON_FINITE)
            agent.end(AttemptState.FAILED, FailureKind.NON_FINITE)

        desk.scheduler.on_submit = behave
        with nullcontext() if attempts == 3 else pytest.raises(RunFailed, match="older checkpoint has not helped"):
            drive(desk.controller(run_dir))
        assert len(desk.scheduler.submitted) == attempts
        assert read_record(run_dir).state is (RunState.COMPLETED if attempts == 3 else RunState.FAILED)


def test_a_silent_job_is_ended_also_when_its_run_stops(desk: Desk) -> None:
    """Otherwise `rlhf resume` would put a second job beside it."""
    run_dir = desk.run(make_spec(supervise={"max_attempts": 1}))

    def falls_silent(request: JobRequest) -> None:
        FakeAgent(run_dir, attempt=request.placement.attempt).begin()
        FakeAgent(run_dir, attempt=request.placement.attempt).role(Role.TRAINER)

    desk.scheduler.on_submit = falls_silent
    with pytest.raises(RunFailed, match="have said nothing"):
        drive(desk.controller(run_dir))
    assert desk.scheduler.cancelled == ["101"]
    assert desk.scheduler.jobs["101"].state is JobState.ENDED
