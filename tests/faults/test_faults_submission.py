"""Kills of the controller at every point of a submission, once and twice in a row: there is always exactly one job.

The points are not listed by hand. Every effect of the control plane on the way (a file, a line of the journal, the
question to the scheduler and its answer) is counted, and gives a point before and a point after it.
"""

from itertools import count
from pathlib import Path

import pytest
from control_fakes import FakeScheduler, make_run, make_spec
from kill_points import Killed, Points

from rlhf_core.allocation.planner import plan
from rlhf_core.config.site import load_site
from rlhf_core.launch import start
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import AttemptState


def live(run_dir: RunDir, scheduler: FakeScheduler, token: int, kill_at: int | None) -> int | None:
    """Run one life of a controller that plans and submits; return the points that it passed, or None if it was
    killed."""
    points = Points(kill_at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "write_model", points.around(start.write_model))
        patch.setattr(Journal, "_write", points.around(Journal._write))
        patch.setattr(scheduler, "find", points.around(scheduler.find))
        patch.setattr(scheduler, "submit", points.around(scheduler.submit))
        journal = Journal(run_dir, token)
        try:
            placement = start.record_plan(run_dir, plan(make_spec(), scheduler.inventory(), attempt=1), journal)
            request = start.job_request(run_dir, make_spec(), placement, load_site())
            start.submit_once(run_dir, request, scheduler, journal)
        except Killed:
            return None
        finally:
            journal.close()
    assert journal.record.attempts[1].state is AttemptState.SUBMITTED
    return points.passed


def num_points(folder: Path) -> int:
    """Number of points of an undisturbed submission."""
    passed = live(make_run(folder), FakeScheduler(), 1, None)
    assert passed is not None
    return passed


def test_there_are_points_around_every_effect(tmp_path: Path) -> None:
    """The effects are the plan, its line, search, submission, its answer, its line and the move: two points each."""
    assert num_points(tmp_path) >= 14


def test_killed_at_every_point_and_at_every_pair_of_points_there_is_one_job(tmp_path: Path) -> None:
    names = count()
    hit = 0
    for first in range(num_points(tmp_path / "plain")):
        for second in (None, *range(num_points(tmp_path / f"again-{first}"))):
            run_dir, scheduler = make_run(tmp_path / f"run-{next(names)}"), FakeScheduler()
            assert live(run_dir, scheduler, 1, first) is None
            if second is not None and live(run_dir, scheduler, 2, second) is None:
                hit += 1
            live(run_dir, scheduler, 3, None)
            assert len(scheduler.submitted) == 1, f"killed at points {first} and {second}"
    assert hit > 0


def test_without_the_search_some_point_gives_two_jobs(tmp_path: Path) -> None:
    """Negative control: the test above would detect it."""
    submitted = set()
    for point in range(num_points(tmp_path / "plain")):
        run_dir, scheduler = make_run(tmp_path / f"run-{point}"), FakeScheduler()
        scheduler.find = lambda run_id, attempt, cluster="": None  # type: ignore[method-assign]
        live(run_dir, scheduler, 1, point)
        live(run_dir, scheduler, 2, None)
        submitted.add(len(scheduler.submitted))
    assert submitted == {1, 2}
