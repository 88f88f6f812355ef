"""Reads of metrics."""

from collections.abc import Iterable

from sqlalchemy import Connection, exists, select

from rlhf_core.history.queries.plain import plain_value
from rlhf_core.history.queries.rows import MetricValue
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.sqlalchemy_core import CURVE, KEYS, LATEST, METRICS

STEP_SECONDS = "time/step_s"
"""Metric of every step."""


def newest_metrics(connection: Connection, run_id: str) -> dict[str, MetricValue]:
    """Read the newest value of each metric."""
    rows = connection.execute(
        select(KEYS.c.name, LATEST)
        .join(KEYS, KEYS.c.key_id == LATEST.c.key_id)
        .where(LATEST.c.run_id == run_id)
        .order_by(KEYS.c.name)
    ).all()
    return {
        row.name: {
            "value": row.non_finite or row.value,
            "step": row.step,
            "attempt": row.attempt,
            "restart": row.restart,
            "time": plain_value(row.time),
        }
        for row in rows
    }


def are_pruned(connection: Connection, run_id: str) -> bool:
    """True if metrics by step were removed (:mod:`rlhf_core.history.prune`): of some metric, only the newest value is
    left."""
    by_step = exists().where(METRICS.c.run_id == LATEST.c.run_id, METRICS.c.key_id == LATEST.c.key_id)
    return bool(connection.execute(select(exists().where(LATEST.c.run_id == run_id, ~by_step))).scalar_one())


def curve(store: HistoryStore, run_id: str, keys: Iterable[str] | None = None) -> dict[str, list[tuple[int, float]]]:
    """Read the valid metrics by step: for a repeated step, the last value.

    Args:
        keys: names of metrics; None for all.

    Returns:
        Name -> (step, value), by step; non-finite values are NaN or infinite floats.
    """
    query = select(CURVE.c.key, CURVE.c.step, CURVE.c.value, CURVE.c.non_finite).where(CURVE.c.run_id == run_id)
    wanted = None if keys is None else list(keys)
    if wanted is not None:
        query = query.where(CURVE.c.key.in_(wanted))
    found: dict[str, list[tuple[int, float]]] = {key: [] for key in wanted or ()}
    with store.reading() as connection:
        for key, step, value, non_finite in connection.execute(query.order_by(CURVE.c.key, CURVE.c.step)):
            found.setdefault(key, []).append((step, float(non_finite) if value is None else value))
    return found
