"""Rows of metrics and of their newest values."""

import math
from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import Any

from sqlalchemy import Connection, select, tuple_

from rlhf_core.history.batch import MetricsEntry
from rlhf_core.history.tables.sqlalchemy_core import KEYS, LATEST, chunks
from rlhf_core.history.writers import metric_rows
from rlhf_core.history.writers.upserts import Row, insert_or_keep, upsert


def write_metric_keys(connection: Connection, names: Set[str]) -> dict[str, int]:
    """Get the ids of metric names, and create them for new names.

    Queried in every batch instead of cached: an id from a rolled-back transaction or a recreated database would
    silently store values under another name.
    """
    ids = _metric_key_ids(connection, names)
    new = [{"name": name} for name in sorted(names - ids.keys())]  # sorted, so that two controllers cannot deadlock
    if new:
        insert_or_keep(connection, KEYS, new)
        ids = _metric_key_ids(connection, names)
    return ids


def _metric_key_ids(connection: Connection, names: Set[str]) -> dict[str, int]:
    queries = (select(KEYS.c.name, KEYS.c.key_id).where(KEYS.c.name.in_(part)) for part in chunks(names))
    return {row.name: row.key_id for query in queries for row in connection.execute(query)}


def write_metrics(
    connection: Connection, run_id: str, entries: Sequence[MetricsEntry], key_ids: Mapping[str, int]
) -> None:
    """Write metric rows, and the newest value of each metric."""
    rows: list[metric_rows.MetricRow] = []
    latest: dict[int, tuple[MetricsEntry, float]] = {}
    for entry in sorted(entries, key=_order):  # so that later entries are newer
        line = entry.line
        time = metric_rows.stored_time(connection, line.time)
        step, attempt, restart = line.step, entry.attempt, entry.restart
        for name, value in line.metrics.items():
            key_id = key_ids[name]
            latest[key_id] = (entry, value)
            if math.isfinite(value):
                rows.append((run_id, key_id, step, attempt, restart, value, None, time))
            else:
                rows.append((run_id, key_id, step, attempt, restart, None, _non_finite(value), time))
    metric_rows.insert(connection, rows)
    if latest:
        newest = [_latest_row(run_id, key_id, *latest[key_id]) for key_id in sorted(latest)]
        connection.execute(_newest_metric(connection.dialect.name), newest)


def _order(entry: MetricsEntry) -> tuple[int, int, int]:
    return entry.attempt, entry.restart, entry.line.step


def _latest_row(run_id: str, key_id: int, entry: MetricsEntry, value: float) -> Row:
    finite = math.isfinite(value)
    return {
        "run_id": run_id,
        "key_id": key_id,
        "step": entry.line.step,
        "attempt": entry.attempt,
        "restart": entry.restart,
        "value": value if finite else None,
        "non_finite": None if finite else _non_finite(value),
        "time": entry.line.time,
    }


def _non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


@cache
def _newest_metric(dialect: str) -> Any:
    statement = upsert(dialect, LATEST)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=["run_id", "key_id"],
        set_={name: new[name] for name in ("step", "attempt", "restart", "value", "non_finite", "time")},
        where=tuple_(new.attempt, new.restart, new.step) > tuple_(LATEST.c.attempt, LATEST.c.restart, LATEST.c.step),
    )
