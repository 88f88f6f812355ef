"""Removal of the metrics and the telemetry of old runs, which are almost all rows of a history.

The metrics stay that other queries need of every run: the times of steps (goodput, lost time, missing steps) and the
evaluations during training (best checkpoints); and so does the newest value of each (table ``latest_metrics``). Runs
that predict the steps and the memory of their shape also keep the times of the parts of a step, and their telemetry.

Rows are removed in small transactions, with a pause after each, so that controllers can renew their leases in between.
An interruption leaves less to remove (docs/decisions/0056).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import CompoundSelect, Connection, Delete, delete, exists, func, select, union_all

from rlhf_core.history.queries.baselines import newest_completed
from rlhf_core.history.queries.metrics import STEP_SECONDS
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.sqlalchemy_core import KEYS, METRICS, PROMOTIONS, RUNS, TELEMETRY
from rlhf_core.schemas.attempts import PromotionState, RunState

BATCH_ROWS = 20_000
"""Approximate number of metrics that a transaction removes."""

EVALUATIONS, TIMES = "eval/", "time/"
"""Beginnings of the names of metrics that are evaluations during training, or times of a step and its parts."""


@dataclass(frozen=True)
class PrunableRun:
    """A run, and the number of rows that can be removed of it."""

    run_id: str
    ended_at: datetime
    predicts: bool
    """True if it predicts the steps and the memory of runs of its shape."""
    num_metrics: int
    num_telemetry: int


def prunable(store: HistoryStore, before: datetime) -> list[PrunableRun]:
    """Find the runs with something to remove that ended before a time, oldest first.

    Runs that others are compared with are left out: the last completed run of each name, and those with a model that
    was promoted, or may be.
    """
    columns = RUNS.c.run_id, RUNS.c.ended_at, RUNS.c.shape
    with store.reading() as connection:
        old = select(*columns).where(RUNS.c.ended_at < before, RUNS.c.run_id.not_in(_compared()))
        runs = connection.execute(old.order_by(RUNS.c.ended_at, RUNS.c.run_id)).all()
    found = []
    for run_id, ended_at, shape in runs:
        with store.reading() as connection:
            predicting = newest_completed(shape).where(RUNS.c.trial_of == "")
            predicts = run_id in connection.execute(predicting).scalars()
            metrics = sum(_removed_metrics(connection, run_id, predicts=predicts).values())
            telemetry = 0 if predicts else sum(_telemetry(connection, run_id).values())
        if metrics or telemetry:
            found.append(PrunableRun(run_id, ended_at, predicts, metrics, telemetry))
    return found


def prune(store: HistoryStore, run: PrunableRun, before: datetime) -> None:
    """Remove the metrics and telemetry of a run, unless it was resumed and has not ended before that time."""
    with store.reading() as connection:
        statements = [*_metric_batches(connection, run), *_telemetry_batches(connection, run)]
    is_old = exists().where(RUNS.c.run_id == run.run_id, RUNS.c.ended_at < before)
    for statement in statements:
        began = time.monotonic()
        with store.writing() as connection:
            connection.execute(statement.where(is_old))
        time.sleep(time.monotonic() - began)  # SQLite does not queue its writers: leave as much time to the others


def _compared() -> CompoundSelect[tuple[str]]:
    nth = func.row_number().over(partition_by=RUNS.c.name, order_by=RUNS.c.ended_at.desc()).label("nth")
    completed = RUNS.c.state == RunState.COMPLETED.value, RUNS.c.trial_of == ""
    of_name = select(RUNS.c.run_id, nth).where(*completed).subquery()
    models = (PromotionState.WAITING, PromotionState.APPROVED, PromotionState.PROMOTED)
    return union_all(
        select(of_name.c.run_id).where(of_name.c.nth == 1),
        select(PROMOTIONS.c.run_id).where(PROMOTIONS.c.state.in_([state.value for state in models])),
    )


def _removed_metrics(connection: Connection, run_id: str, *, predicts: bool) -> dict[int, int]:
    """Number of rows of each metric that can be removed, by its key."""
    query = (
        select(KEYS.c.name, METRICS.c.key_id, func.count().label("rows"))
        .join(KEYS, KEYS.c.key_id == METRICS.c.key_id)
        .where(METRICS.c.run_id == run_id)
        .group_by(KEYS.c.name, METRICS.c.key_id)
        .order_by(KEYS.c.name)
    )
    found = connection.execute(query).all()
    # Without times of steps, those of the metric with the most rows count.
    timed = [row for row in found if row.name == STEP_SECONDS] or sorted(found, key=lambda row: -row.rows)[:1]
    kept = (EVALUATIONS, TIMES) if predicts else (EVALUATIONS,)
    return {row.key_id: row.rows for row in found if row not in timed and not row.name.startswith(kept)}


def _metric_batches(connection: Connection, run: PrunableRun) -> Iterator[Delete]:
    keys = [*_removed_metrics(connection, run.run_id, predicts=run.predicts)]
    if not keys:
        return
    of_run = METRICS.c.run_id == run.run_id, METRICS.c.key_id.in_(keys)
    first, last = connection.execute(select(func.min(METRICS.c.step), func.max(METRICS.c.step)).where(*of_run)).one()
    num_steps = max(1, BATCH_ROWS // len(keys))
    for step in range(first, last + 1, num_steps):
        yield delete(METRICS).where(*of_run, METRICS.c.step.between(step, step + num_steps - 1))


def _telemetry(connection: Connection, run_id: str) -> dict[tuple[int, int, str], int]:
    """Number of readings by attempt, restart and node."""
    place = TELEMETRY.c.attempt, TELEMETRY.c.restart, TELEMETRY.c.node
    query = select(*place, func.count()).where(TELEMETRY.c.run_id == run_id).group_by(*place).order_by(*place)
    return {(attempt, restart, node): rows for attempt, restart, node, rows in connection.execute(query)}


def _telemetry_batches(connection: Connection, run: PrunableRun) -> Iterator[Delete]:
    for attempt, restart, node in () if run.predicts else _telemetry(connection, run.run_id):
        yield delete(TELEMETRY).where(
            TELEMETRY.c.run_id == run.run_id,
            TELEMETRY.c.attempt == attempt,
            TELEMETRY.c.restart == restart,
            TELEMETRY.c.node == node,
        )
