"""Strikes decay; broken nodes are excluded at once, suspected ones after repeated strikes."""

from datetime import UTC, datetime, timedelta
from itertools import count

from rlhf_core.diagnosis.nodes.strikes import (
    BROKEN_FOR,
    HALF_LIFE,
    REMEMBERED,
    SUSPECT_FOR,
    SUSPECT_SCORE,
    Strike,
    standings,
)
from rlhf_core.schemas.failures import FailureKind

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
_runs = count()


def strike(node: str, kind: FailureKind = FailureKind.HANG, ago: timedelta = timedelta(0), run_id: str = "") -> Strike:
    return Strike(run_id or f"run-{next(_runs)}", node, kind, NOW - ago)


def test_a_strike_weighs_half_after_its_half_life() -> None:
    (one,) = standings([strike("n1"), strike("n1", ago=HALF_LIFE)], NOW)
    assert (one.score, one.num_strikes) == (1.5, 2)
    assert one.excluded_until is None


def test_two_fresh_strikes_leave_a_node_alone_for_hours() -> None:
    (one,) = standings([strike("n1"), strike("n1")], NOW)
    assert one.excluded_until == NOW + SUSPECT_FOR
    # As in practice, they never occur at the same moment.
    (apart,) = standings([strike("n1"), strike("n1", ago=timedelta(hours=6))], NOW)
    assert apart.excluded_until == NOW + SUSPECT_FOR
    # Negative control: the same strikes a day ago do not.
    (old,) = standings([strike("n1", ago=timedelta(days=1)) for _ in range(2)], NOW)
    assert old.excluded_until is None


def test_a_lost_node_is_left_alone_for_a_day_at_the_first_strike() -> None:
    (one,) = standings([strike("n1", FailureKind.NODE_LOST, timedelta(hours=1))], NOW)
    assert one.excluded_until == NOW - timedelta(hours=1) + BROKEN_FOR
    (over,) = standings([strike("n1", FailureKind.NODE_LOST, BROKEN_FOR)], NOW)
    assert over.excluded_until is None


def test_of_two_reasons_to_exclude_a_node_the_longer_one_holds() -> None:
    """Strikes for hangs after its loss must not return the node early."""
    (one,) = standings([strike("n1", FailureKind.NODE_LOST, timedelta(hours=1)), strike("n1")], NOW)
    assert one.score > SUSPECT_SCORE
    assert one.excluded_until == NOW - timedelta(hours=1) + BROKEN_FOR


def test_a_run_counts_once_against_a_node() -> None:
    """A bug in the code of a run hangs on every node that it gets, at each restart in place."""
    (one,) = standings([strike("n1", ago=timedelta(minutes=1), run_id="buggy"), strike("n1", run_id="buggy")], NOW)
    assert (one.score, one.num_strikes, one.last_at, one.excluded_until) == (1.0, 1, NOW, None)
    (both,) = standings([strike("n1", run_id="buggy"), strike("n1", run_id="other")], NOW)
    assert both.excluded_until == NOW + SUSPECT_FOR, "negative control: a second run"


def test_a_loss_excludes_a_node_whatever_the_same_run_reports_after_it() -> None:
    lost = strike("n1", FailureKind.NODE_LOST, timedelta(hours=1), run_id="one")
    (one,) = standings([lost, strike("n1", run_id="one")], NOW)
    assert (one.score, one.excluded_until) == (1.0, NOW - timedelta(hours=1) + BROKEN_FOR)


def test_the_worst_comes_first_and_the_old_is_forgotten() -> None:
    known = standings([strike("n1"), strike("n2"), strike("n2"), strike("n3", ago=REMEMBERED)], NOW)
    assert [one.node for one in known] == ["n2", "n1"]
