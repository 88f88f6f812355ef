"""Summary of the weight syncs into rollout engines."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from sqlalchemy import Connection, select

from rlhf_core.history.queries.plain import Facts
from rlhf_core.history.tables.sqlalchemy_core import WEIGHT_SYNCS

_MEDIANS = ("seconds", "wire_s", "apply_s", "gb_per_s", "bytes")


def weight_sync_facts(connection: Connection, run_id: str, *, is_active: bool) -> Facts:
    """Summarise the syncs of a run; empty if its engines have no weights of their own.

    Args:
        is_active: True while the run is active, when its newest sync may be incomplete.

    Returns:
        ``num_syncs``, ``num_versions`` (distinct ones), ``engines`` (of the newest sync), ``transports``, medians over
            the completed syncs (``seconds``, ``wire_s``, ``apply_s``, ``gb_per_s``, ``bytes``; null if none has it),
            and ``unacknowledged``: attempt, restart, version, engines and acknowledged of each sync that not all
            engines have acknowledged.
    """
    c = WEIGHT_SYNCS.c
    query = select(WEIGHT_SYNCS).where(c.run_id == run_id).order_by(c.attempt, c.restart, c.number)
    rows = connection.execute(query).all()
    if not rows:
        return {}
    under_way = rows[-1:] if is_active and rows[-1].seconds is None else []
    answered = [row for row in rows if row.seconds is not None]
    return {
        "num_syncs": len(rows),
        "num_versions": len({row.version for row in rows}),
        "engines": rows[-1].engines,
        "transports": sorted({row.transport for row in answered}),
        **{name: _median(answered, name) for name in _MEDIANS},
        "unacknowledged": [
            {name: getattr(row, name) for name in ("attempt", "restart", "version", "engines", "acknowledged")}
            for row in rows
            if row.acknowledged < row.engines and row not in under_way
        ],
    }


def _median(rows: Sequence[Any], name: str) -> float | None:
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return float(median(values)) if values else None
