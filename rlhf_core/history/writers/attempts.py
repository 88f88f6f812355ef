"""Rows of attempts, their restarts, nodes and telemetry."""

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Connection, bindparam, case, func, or_, text, update

from rlhf_core.history.batch import IngestBatch, TelemetryEntry
from rlhf_core.history.tables.sqlalchemy_core import ATTEMPTS, NODES, RESTARTS, TELEMETRY
from rlhf_core.history.writers.upserts import Row, as_json, columns_of, insert_or_keep, insert_or_replace, upsert
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.reports import AgentEvent, AgentStatus, AttemptOutcome
from rlhf_core.schemas.resources import Placement

_WRITE_OUTCOME = (
    update(ATTEMPTS)
    .where(ATTEMPTS.c.run_id == bindparam("of_run"), ATTEMPTS.c.number == bindparam("of_attempt"))
    .values(
        outcome_state=bindparam("reported_state"),
        outcome_failure_kind=bindparam("kind"),
        outcome_message=bindparam("text"),
        num_restarts=bindparam("restarts"),
        last_step=bindparam("step"),
        outcome_at=bindparam("at", type_=ATTEMPTS.c.outcome_at.type),
    )
)
"""Built once, as building it takes longer than executing it."""


def write_placement(connection: Connection, run_id: str, placement: Placement, planned_at: datetime) -> None:
    """Write a planned attempt."""
    row = {
        **blank_attempt(run_id, placement.attempt),
        "placement": as_json(placement),
        **columns_of(ATTEMPTS, placement),
        "planned_at": planned_at,
    }
    insert_or_replace(connection, ATTEMPTS, [row], keep=("state", "message", "scheduler"))


def write_attempts(connection: Connection, run_id: str, numbers: Iterable[int]) -> None:
    """Write a row for each attempt with a folder, in case its journal line is torn."""
    insert_or_keep(connection, ATTEMPTS, [blank_attempt(run_id, number) for number in sorted(numbers)])


def blank_attempt(run_id: str, number: int) -> Row:
    """Build the row of an attempt of which only the number is known."""
    return {
        "run_id": run_id,
        "number": number,
        "state": AttemptState.PLANNED.value,
        "message": "",
        "scheduler": "",
        "num_nodes": 0,
        "resume_checkpoint": "",
        "resumed_from_step": 0,
    }


def write_outcomes(connection: Connection, run_id: str, outcomes: Sequence[AttemptOutcome]) -> None:
    """Write the content of ``outcome.json``. Only the journal changes the state of an attempt."""
    for outcome in outcomes:
        content = {
            "reported_state": outcome.state.value,
            "kind": outcome.failure_kind.value if outcome.failure_kind else None,
            "text": outcome.message,
            "restarts": outcome.num_restarts,
            "step": outcome.last_step,
            "at": outcome.time,
        }
        connection.execute(_WRITE_OUTCOME, {"of_run": run_id, "of_attempt": outcome.attempt, **content})


def write_restarts(connection: Connection, run_id: str, batch: IngestBatch) -> None:
    """Write the times and steps of each restart, extended by those in the batch."""
    times: dict[tuple[int, int], list[datetime]] = {restart: [] for restart in sorted(batch.restarts)}
    steps: dict[tuple[int, int], list[int]] = {}
    roles: dict[tuple[int, int], str] = {}
    for event in batch.events:
        times.setdefault((event.attempt, event.restart), []).append(event.event.time)
        if event.event.role is not None and _starts_restart(event.event):
            roles[event.attempt, event.restart] = event.event.role.value
    for metrics in batch.metrics:
        times.setdefault((metrics.attempt, metrics.restart), []).append(metrics.line.time)
        steps.setdefault((metrics.attempt, metrics.restart), []).append(metrics.line.step)
    rows = [
        {
            "run_id": run_id,
            "attempt": attempt,
            "restart": restart,
            "role": roles.get((attempt, restart)),
            "started_at": min(observed, default=None),
            "ended_at": max(observed, default=None),
            "first_step": min(steps.get((attempt, restart), ()), default=None),
            "last_step": max(steps.get((attempt, restart), ()), default=None),
        }
        for (attempt, restart), observed in times.items()
    ]
    if rows:
        connection.execute(_extending(connection.dialect.name), rows)
    if steps:
        write_last_valid_steps(connection, run_id, min(map(min, steps.values())))


_LAST_VALID_STEPS = text("""
UPDATE restarts SET last_valid_step = (
    SELECT MIN(s.step) FROM (
        SELECT restarts.last_step AS step
        UNION ALL
        SELECT l.first_step - 1 FROM restarts l
         WHERE l.run_id = restarts.run_id AND (l.attempt, l.restart) > (restarts.attempt, restarts.restart)) s)
WHERE run_id = :run_id AND last_step >= :step""")


def write_last_valid_steps(connection: Connection, run_id: str, step: int) -> None:
    """Write how far the steps of each restart count: a later one goes back to before its first step, and all that
    earlier ones recorded from that step on was made with weights that no longer exist.

    Args:
        step: lowest new step. Restarts that ended before it stay as they are.
    """
    connection.execute(_LAST_VALID_STEPS, {"run_id": run_id, "step": step})


def _starts_restart(event: AgentEvent) -> bool:
    """True for the start of workers whose restarts are counted; those of other groups have their own generation."""
    return event.kind in ("role_started", "workers_started") and "generation" not in event.data


@cache
def _extending(dialect: str) -> Any:
    statement = upsert(dialect, RESTARTS)
    new = statement.excluded

    def extended(name: str, is_outside: Callable[[Any, Any], Any]) -> Any:
        old = RESTARTS.c[name]
        return case((new[name].is_(None), old), (or_(old.is_(None), is_outside(new[name], old)), new[name]), else_=old)

    return statement.on_conflict_do_update(
        index_elements=["run_id", "attempt", "restart"],
        set_={
            "role": func.coalesce(new.role, RESTARTS.c.role),
            "started_at": extended("started_at", lambda new, old: new < old),
            "ended_at": extended("ended_at", lambda new, old: new > old),
            "first_step": extended("first_step", lambda new, old: new < old),
            "last_step": extended("last_step", lambda new, old: new > old),
        },
    )


def write_nodes(connection: Connection, run_id: str, statuses: Sequence[AgentStatus]) -> None:
    """Write the newest status of each agent; the newest restart wins."""
    if not statuses:
        return
    in_order = sorted(statuses, key=lambda status: status.restart)
    rows = [{"run_id": run_id, **columns_of(NODES, status), "role": _role(status).value} for status in in_order]
    connection.execute(_newest_status(connection.dialect.name), rows)


def _role(status: AgentStatus) -> Role:
    """Role of the workers of a node; a node with only engines has no workers in the role that names its phase."""
    roles = [rank.role for rank in status.ranks]
    return roles[0] if roles and status.role not in roles else status.role


@cache
def _newest_status(dialect: str) -> Any:
    statement = upsert(dialect, NODES)
    new = statement.excluded
    changing = ("node_index", "restart", "role", "sequence", "ranks", "telemetry", "longest_gaps_s")
    return statement.on_conflict_do_update(
        index_elements=["run_id", "attempt", "node"],
        set_={name: new[name] for name in changing},
        where=new.restart >= NODES.c.restart,
    )


def write_telemetry(connection: Connection, run_id: str, entries: Sequence[TelemetryEntry]) -> None:
    """Write telemetry readings."""
    rows = [
        {
            "run_id": run_id,
            "attempt": entry.attempt,
            "restart": entry.restart,
            "node": entry.node,
            "position": entry.position,
            "time": entry.line.time,
            "seconds": entry.line.seconds,
            "figures": {name: value for name, value in entry.line.figures.items() if math.isfinite(value)},
        }
        for entry in entries
    ]
    insert_or_keep(connection, TELEMETRY, rows)
