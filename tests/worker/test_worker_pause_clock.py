"""The pause clock: an agent may be stopped at any moment and woken up again."""

import pytest

from rlhf_core.worker.liveness.pause_clock import PauseClock


def test_a_pause_of_the_watcher_itself_is_not_held_against_the_workers() -> None:
    clock = PauseClock(tolerance_s=2.0)
    clock.tick(100.0)
    clock.tick(100.3)
    assert clock.age_s(99.0, 100.3) == pytest.approx(1.3)
    assert clock.num_pauses == 0
    clock.tick(160.0)  # the job was suspended for a minute
    assert clock.age_s(99.0, 160.5) == pytest.approx(0.5)
    assert clock.age_s(160.2, 160.5) == pytest.approx(0.3)
    assert clock.num_pauses == 1
    # The control: without the pause the same beat would be 61 s old.
    assert PauseClock().age_s(99.0, 160.5) == pytest.approx(61.5)


def test_a_pause_is_noticed_at_the_first_query() -> None:
    """Even in the middle of a round, before the ticking thread has run again."""
    clock = PauseClock(tolerance_s=2.0)
    clock.tick(100.0)
    assert clock.age_s(99.0, 117.0) == 0.0
    clock.tick(117.1)
    assert clock.num_pauses == 1


def test_a_short_pause_does_not_hide_the_long_one_before_it() -> None:
    clock = PauseClock(tolerance_s=2.0)
    for now_s in (100.0, 117.0, 118.0, 121.0):
        clock.tick(now_s)
    assert clock.longest_pause_s() == clock.longest_pause_s(since_s=100.5) == pytest.approx(17.0)
    assert clock.longest_pause_s(since_s=118.0) == pytest.approx(3.0)
    assert clock.longest_pause_s(since_s=121.0) == 0.0
