"""Rows of check results and probes."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection

from rlhf_core.history.tables.sqlalchemy_core import CHECKS, SPEEDS
from rlhf_core.history.writers.upserts import columns_of, insert_or_replace
from rlhf_core.schemas.checks import CheckResult
from rlhf_core.schemas.probe import ProbeReport


def write_checks(
    connection: Connection, run_id: str, results: Sequence[CheckResult], round: int, made_at: datetime, attempt: int = 0
) -> None:
    """Write check results; ``round`` as in the column of that name."""
    rows = [
        {
            "run_id": run_id,
            "round": round,
            "check_index": index,
            "check_id": result.id,
            **columns_of(CHECKS, result),
            "made_at": made_at,
            "attempt": attempt,
        }
        for index, result in enumerate(results)
    ]
    insert_or_replace(connection, CHECKS, rows)


def write_probes(connection: Connection, run_id: str, probes: Sequence[ProbeReport]) -> None:
    """Write the check results and measurements of the probe of an attempt."""
    for probe in probes:
        write_checks(connection, run_id, probe.results, -probe.attempt, probe.made_at, probe.attempt)
        rows = []
        for speed in probe.speeds:
            measured = [pair for pair in speed.pairs if not pair.problem]
            rows.append(
                {
                    "run_id": run_id,
                    "attempt": probe.attempt,
                    **columns_of(SPEEDS, speed),
                    "bandwidth_gb_s": max((pair.gb_s for pair in measured), default=0.0),
                    "latency_ms": min((pair.latency_ms for pair in measured), default=0.0),
                    "measured_at": probe.made_at,
                }
            )
        insert_or_replace(connection, SPEEDS, rows)
