"""Reads over earlier runs: usual durations, speeds and gaps, strikes against nodes."""

from datetime import datetime
from statistics import median
from typing import Any, TypedDict

from sqlalchemy import Select, func, select

from rlhf_core.history.queries.metrics import STEP_SECONDS
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.sqlalchemy_core import (
    CHECKS,
    DECISIONS,
    DUPLICATES,
    KEYS,
    METRICS,
    NODES,
    RUNS,
    SPEEDS,
    STRIKES,
)
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.failures import Action, DecidedBy

_NEWEST_RUNS = 5
"""Number of runs of a shape that determine its usual values; earlier ones may have run with other code."""
_MIN_PROBES, _MAX_PROBES = 3, 10


def node_strikes(store: HistoryStore, since: datetime) -> list[tuple[str, str, str, datetime]]:
    """Read the strikes against nodes: run, node, kind of failure, time; oldest first, each incident once."""
    is_duplicate = (
        select(DUPLICATES.c.run_id)
        .where(DUPLICATES.c.run_id == STRIKES.c.run_id, DUPLICATES.c.incident_id == STRIKES.c.incident_id)
        .exists()
    )
    query = (
        select(STRIKES.c.run_id, STRIKES.c.node, STRIKES.c.failure_kind, STRIKES.c.struck_at)
        .where(STRIKES.c.struck_at >= since, ~is_duplicate)
        .order_by(STRIKES.c.struck_at)
    )
    with store.reading() as connection:
        return [(row.run_id, row.node, row.failure_kind, row.struck_at) for row in connection.execute(query)]


def restarts_since(store: HistoryStore, since: datetime) -> int:
    """Count the decisions for restarts in place and new attempts, over all runs.

    Agents decide about restarts in place. A new attempt, for which they can only ask, counts if its controller decided
    for it.
    """
    is_restart = DECISIONS.c.action == Action.RESTART_IN_PLACE.value
    is_attempt = (DECISIONS.c.action == Action.NEW_ATTEMPT.value) & (
        DECISIONS.c.decided_by == DecidedBy.CONTROLLER.value
    )
    query = select(func.count()).where(DECISIONS.c.decided_at >= since, is_restart | is_attempt)
    with store.reading() as connection:
        return int(connection.execute(query).scalar_one())


def usual_speeds(store: HistoryStore, since: datetime) -> dict[str, dict[str, dict[str, float]]]:
    """Read the medians of the newest probes of every node: node to device to ``matmul_tflops`` and ``bandwidth_gb_s``.

    A median is over at most the 10 newest since ``since``; a node and device with fewer than 3 has none.
    """
    query = (
        select(SPEEDS.c.node, SPEEDS.c.device, SPEEDS.c.matmul_tflops, SPEEDS.c.bandwidth_gb_s)
        .where(SPEEDS.c.measured_at >= since, SPEEDS.c.device != "")
        .order_by(SPEEDS.c.measured_at.desc())
    )
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with store.reading() as connection:
        for node, device, tflops, gb_s in connection.execute(query):
            readings = measured.setdefault((node, device), [])
            if len(readings) < _MAX_PROBES:
                readings.append((tflops, gb_s))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (node, device), readings in measured.items():
        if len(readings) >= _MIN_PROBES:
            usual = {
                "matmul_tflops": median(tflops for tflops, _ in readings),
                "bandwidth_gb_s": median(gb_s for _, gb_s in readings),
            }
            found.setdefault(node, {})[device] = usual
    return found


def longest_gaps(store: HistoryStore, shape: str) -> dict[str, float]:
    """Read the longest gaps between heartbeats in the newest completed runs of a shape: ``role/phase`` to seconds."""
    found: dict[str, float] = {}
    with store.reading() as connection:
        runs = list(connection.execute(newest_completed(shape)).scalars())
        query = select(NODES.c.longest_gaps_s).where(NODES.c.run_id.in_(runs), NODES.c.node_index == 0)
        for gaps in connection.execute(query).scalars():
            for place, seconds in gaps.items():
                found[place] = max(found.get(place, 0.0), float(seconds))
    return found


def seconds_per_step(store: HistoryStore, shape: str) -> float | None:
    """Estimate the duration of a step: the median over the newest completed runs of a shape of their mean step time.
    None if there are no such runs. Trials are excluded, because their few steps are mostly warm-up."""
    newest = newest_completed(shape).where(RUNS.c.trial_of == "")
    means = (
        select(func.avg(METRICS.c.value))
        .join(KEYS, KEYS.c.key_id == METRICS.c.key_id)
        .where(METRICS.c.run_id.in_(newest), KEYS.c.name == STEP_SECONDS, METRICS.c.value.is_not(None))
        .group_by(METRICS.c.run_id)
    )
    with store.reading() as connection:
        found = list(connection.execute(means).scalars())
    return median(found) if found else None


class LastGoodRun(TypedDict):
    """The last completed run of a name."""

    run_id: str
    spec: dict[str, Any]
    basis: str
    """Result of its check ``trial.basis``."""


def last_good(store: HistoryStore, name: str, run_id: str = "") -> LastGoodRun | None:
    """Find the last completed run of a name. A trial counts, except for its own run (``run_id``), which handles its
    trials itself."""
    newest = (
        select(RUNS.c.run_id, RUNS.c.spec)
        .where(RUNS.c.name == name, RUNS.c.state == RunState.COMPLETED.value)
        .where((RUNS.c.trial_of == "") | (RUNS.c.trial_of != run_id))
        .order_by(RUNS.c.ended_at.desc())  # a trial is created after its run and ends before it
        .limit(1)
    )
    with store.reading() as connection:
        run = connection.execute(newest).one_or_none()
        if run is None:
            return None
        basis = (
            select(CHECKS.c.found)
            .where(
                CHECKS.c.run_id == run.run_id,
                CHECKS.c.check_id == "trial.basis",
                CHECKS.c.status == CheckStatus.PASSED.value,
            )
            .order_by(CHECKS.c.round.desc())
            .limit(1)
        )
        return {"run_id": run.run_id, "spec": run.spec, "basis": connection.execute(basis).scalar() or ""}


def newest_completed(shape: str) -> Select[tuple[str]]:
    """Select the ids of the newest completed runs of a shape."""
    return (
        select(RUNS.c.run_id)
        .where(RUNS.c.shape == shape, RUNS.c.state == RunState.COMPLETED.value)
        .order_by(RUNS.c.created_at.desc())
        .limit(_NEWEST_RUNS)
    )
