"""Strikes against nodes over all runs: they decay, and a node with too many is excluded for a while. Pure.

A strike is an incident that suspects a node; of those of one run, only the newest has a weight, because a bug in the
run's own code fails on every node it gets, and twice within minutes. The weight is 1 at first and halves every three
days, so a node that was repaired, or failed once by chance, recovers by itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from rlhf_core.diagnosis.policy import EXCLUDED_AT_ONCE
from rlhf_core.schemas.failures import FailureKind

HALF_LIFE = timedelta(days=3)
REMEMBERED = timedelta(days=30)
"""Age after which a strike has a weight of a thousandth and need not be queried."""
BROKEN_FOR = timedelta(hours=24)
"""Time for which a node is excluded after a hardware failure or after it was lost."""
SUSPECT_FOR = timedelta(hours=6)
"""Time for which a node is excluded after repeated strikes."""
SUSPECT_SCORE = 1.75
"""Weight of strikes above which a node is excluded: two, if the first is not older than about 30 hours. Not 2, which
two strikes never reach, because the older one has always decayed a little."""


@dataclass(frozen=True)
class Strike:
    """One incident that suspects a node."""

    run_id: str
    node: str
    kind: FailureKind
    time: datetime


@dataclass(frozen=True)
class NodeStanding:
    """Strikes and score of a node."""

    node: str
    score: float
    """Weight of its strikes now."""
    num_strikes: int
    """Runs with a strike against it."""
    last_kind: FailureKind
    last_at: datetime
    excluded_until: datetime | None
    """Time before which no new attempt uses the node; None if it may be used."""


def standings(strikes: Iterable[Strike], now: datetime) -> list[NodeStanding]:
    """Score every node, worst first."""
    by_node: dict[str, list[Strike]] = {}
    for strike in strikes:
        if now - strike.time < REMEMBERED:
            by_node.setdefault(strike.node, []).append(strike)
    found = [_standing(node, sorted(known, key=lambda one: one.time), now) for node, known in by_node.items()]
    return sorted(found, key=lambda one: (-one.score, one.node))


def _standing(node: str, strikes: list[Strike], now: datetime) -> NodeStanding:
    newest = {strike.run_id: strike for strike in strikes}
    score = sum(0.5 ** (max(now - strike.time, timedelta(0)) / HALF_LIFE) for strike in newest.values())
    until = [strike.time + BROKEN_FOR for strike in strikes if strike.kind in EXCLUDED_AT_ONCE]
    if score >= SUSPECT_SCORE:
        until.append(strikes[-1].time + SUSPECT_FOR)
    later = [time for time in until if time > now]
    return NodeStanding(node, score, len(newest), strikes[-1].kind, strikes[-1].time, max(later, default=None))
