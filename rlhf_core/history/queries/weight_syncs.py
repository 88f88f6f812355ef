"""Summary of the weight syncs into rollout engines."""

from collections.abc import Iterable
from statistics import median

from sqlalchemy import Connection, select

from rlhf_core.history.queries.rows import WeightSyncs
from rlhf_core.history.tables.sqlalchemy_core import WEIGHT_SYNCS


def summarised_syncs(connection: Connection, run_id: str, *, is_active: bool) -> WeightSyncs | None:
    """Summarise the syncs of a run; None if its engines have no weights of their own.

    Args:
        is_active: True while the run is active, when its newest sync may be incomplete.
    """
    c = WEIGHT_SYNCS.c
    query = select(WEIGHT_SYNCS).where(c.run_id == run_id).order_by(c.attempt, c.restart, c.number)
    rows = connection.execute(query).all()
    if not rows:
        return None
    under_way = rows[-1:] if is_active and rows[-1].seconds is None else []
    answered = [row for row in rows if row.seconds is not None]
    return {
        "num_syncs": len(rows),
        "num_versions": len({row.version for row in rows}),
        "engines": rows[-1].engines,
        "transports": sorted({row.transport for row in answered}),
        "seconds": _median(row.seconds for row in answered),
        "wire_s": _median(row.wire_s for row in answered),
        "apply_s": _median(row.apply_s for row in answered),
        "gb_per_s": _median(row.gb_per_s for row in answered),
        "bytes": _median(row.bytes for row in answered),
        "unacknowledged": [
            {
                "attempt": row.attempt,
                "restart": row.restart,
                "version": row.version,
                "engines": row.engines,
                "acknowledged": row.acknowledged,
            }
            for row in rows
            if row.acknowledged < row.engines and row not in under_way
        ],
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None
