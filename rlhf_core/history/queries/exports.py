"""Reads for export: whole tables in batches, with memory use independent of the size of the history."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    ColumnElement,
    Connection,
    DateTime,
    Float,
    FromClause,
    Integer,
    Select,
    Table,
    TypeDecorator,
    select,
)
from sqlalchemy.types import TypeEngine

from rlhf_core.history.queries.metrics import are_pruned
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import ViewBase, metadata
from rlhf_core.history.tables.sqlalchemy_core import CURVE

BATCH_ROWS = 10_000
"""Maximum number of rows in memory."""

_INTERNAL = frozenset({"leases", "ingest_offsets", "goodput_cache"})
"""Tables that are not about a run, or duplicated by a view."""

_VIEWS = ("run_curve", "run_goodput", "run_lost_time")
"""Exported views."""

_TWICE = {"run_goodput": ("name", "state")}
"""Columns of views that are also in table ``runs``."""


@dataclass(frozen=True)
class Column:
    """A column of an exported table."""

    name: str
    kind: str
    """``text``, ``integer``, ``number``, ``boolean``, ``time`` (aware, UTC) or ``json`` (dictionaries and lists)."""


@dataclass(frozen=True)
class ExportTable:
    """A table or view with the rows of some runs. Valid inside :func:`reading_tables`."""

    name: str
    columns: tuple[Column, ...]
    _connection: Connection
    _query: Select[Any]

    def batches(self) -> Iterator[Sequence[Sequence[Any]]]:
        """Yield the rows, at most :data:`BATCH_ROWS` at a time, by key."""
        with self._connection.execute(self._query, execution_options={"yield_per": BATCH_ROWS}) as result:
            yield from result.partitions()


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A valid value of a metric."""

    key: str
    step: int
    value: float
    time: datetime


@contextmanager
def reading_tables(store: HistoryStore, run_ids: Sequence[str]) -> Iterator[list[ExportTable]]:
    """Read every table and view with rows of runs, all as of one moment; column ``key`` has the names of metrics.

    ``metrics`` has every value, including those superseded by a rewind; ``run_curve`` only the valid ones.
    """
    keys = metadata.tables["metric_keys"]
    with store.reading() as connection:
        found = []
        for table in metadata.sorted_tables:
            if table.name in _INTERNAL or "run_id" not in table.c:
                continue
            source: FromClause = table
            columns: list[ColumnElement[Any]] = list(table.c)
            if "key_id" in table.c:
                source = table.join(keys, keys.c.key_id == table.c.key_id)
                columns = [keys.c.name.label("key") if one.name == "key_id" else one for one in table.c]
            found.append(_export(connection, table, source, columns, run_ids))
        for name in _VIEWS:
            view = ViewBase.metadata.tables[name]
            columns = [one for one in view.c if one.name not in _TWICE.get(name, ())]
            found.append(_export(connection, view, view, columns, run_ids))
        yield found


def pruned_runs(store: HistoryStore, run_ids: Sequence[str]) -> list[str]:
    """Find the runs of which metrics by step were removed."""
    with store.reading() as connection:
        return [run_id for run_id in run_ids if are_pruned(connection, run_id)]


def curve_points(store: HistoryStore, run_id: str, first_step: int = 0) -> Iterator[CurvePoint]:
    """Read the valid metrics of a run from a step on, by step and key."""
    query = (
        select(CURVE.c.key, CURVE.c.step, CURVE.c.value, CURVE.c.non_finite, CURVE.c.time)
        .where(CURVE.c.run_id == run_id, CURVE.c.step >= first_step)
        .order_by(CURVE.c.step, CURVE.c.key)
    )
    with (
        store.reading() as connection,
        connection.execute(query, execution_options={"yield_per": BATCH_ROWS}) as result,
    ):
        for key, step, value, non_finite, time in result:
            yield CurvePoint(key, step, float(non_finite) if value is None else value, time)


def _export(
    connection: Connection,
    table: Table,
    source: FromClause,
    columns: Sequence[ColumnElement[Any]],
    run_ids: Sequence[str],
) -> ExportTable:
    query = select(*columns).select_from(source).where(table.c.run_id.in_(run_ids)).order_by(*table.primary_key)
    described = tuple(Column(str(one.key), _kind(one.type)) for one in columns)
    return ExportTable(table.name, described, connection, query)


def _kind(kind: TypeEngine[Any]) -> str:
    plain = kind.impl_instance if isinstance(kind, TypeDecorator) else kind
    match plain:
        case Boolean():
            return "boolean"
        case Integer():
            return "integer"
        case Float():
            return "number"
        case DateTime():
            return "time"
        case JSON():
            return "json"
    return "text"
