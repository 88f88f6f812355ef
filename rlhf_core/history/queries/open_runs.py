"""What the history knows of runs that need looking after: who drives them, and what Prefect calls them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, func, or_, select

from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import Checkpoint, Controller, Lease, Promotion, Run, metadata
from rlhf_core.schemas.attempts import PromotionState, RunState

RUNS = metadata.tables[Run.__tablename__]
LEASES = metadata.tables[Lease.__tablename__]
CONTROLLERS = metadata.tables[Controller.__tablename__]
PROMOTIONS = metadata.tables[Promotion.__tablename__]

_CHUNK = 500
"""Ids that go into one question: SQLite bounds the number of its parameters."""


@dataclass(frozen=True)
class ControllerRow:
    """A controller that took a run."""

    controller: str
    flow_run_id: str
    started_at: datetime


@dataclass(frozen=True)
class Standing:
    """One run as the history has it."""

    run_id: str
    run_dir: str
    state: str
    created_at: datetime
    ended_at: datetime | None
    owner: str
    """Who holds its lease, or held it last; empty where it was given back or never taken."""
    token: int
    """Fencing token of the lease; 0 where it was never taken."""
    expired_s: float | None
    """How long ago the lease ran out, by the clock of the database; negative while it holds, None without one."""
    promotion: str
    """Where the promotion of its model stands; empty without one."""
    promoted_step: int
    controllers: Sequence[ControllerRow]
    """Those of the last hour, and the newest in any case; in their order."""


def standings(
    store: HistoryStore, now: datetime, *, since: datetime | None = None, run_ids: Collection[str] = ()
) -> dict[str, Standing]:
    """Runs that are not ended, that wait for a promotion, that ended after ``since``, or that are named; by id."""
    waiting = [PromotionState.WAITING.value, PromotionState.APPROVED.value]
    wanted: list[ColumnElement[bool]] = [RUNS.c.ended_at.is_(None), PROMOTIONS.c.state.in_(waiting)]
    if since is not None:
        wanted.append(RUNS.c.ended_at >= since)
    found = _standings(store, now, or_(*wanted))
    missing = sorted(set(run_ids) - found.keys())
    for start in range(0, len(missing), _CHUNK):
        found |= _standings(store, now, RUNS.c.run_id.in_(missing[start : start + _CHUNK]))
    return found


def _standings(store: HistoryStore, now: datetime, which: ColumnElement[bool]) -> dict[str, Standing]:
    joined = RUNS.outerjoin(LEASES, LEASES.c.run_id == RUNS.c.run_id).outerjoin(
        PROMOTIONS, PROMOTIONS.c.run_id == RUNS.c.run_id
    )
    columns = (
        RUNS.c.run_id,
        RUNS.c.run_dir,
        RUNS.c.state,
        RUNS.c.created_at,
        RUNS.c.ended_at,
        LEASES.c.owner,
        LEASES.c.token,
        LEASES.c.expires_at,
        PROMOTIONS.c.state.label("promotion"),
        PROMOTIONS.c.checkpoint_step,
    )
    with store.reading() as connection:
        present = store.time(connection)
        rows = connection.execute(select(*columns).select_from(joined).where(which)).all()
        controllers: dict[str, list[ControllerRow]] = {}
        newest = select(CONTROLLERS.c.run_id, func.max(CONTROLLERS.c.position).label("last")).group_by(
            CONTROLLERS.c.run_id
        )
        last = newest.subquery()
        ids = [row.run_id for row in rows]
        for start in range(0, len(ids), _CHUNK):
            found = connection.execute(
                select(CONTROLLERS)
                .join(last, last.c.run_id == CONTROLLERS.c.run_id)
                .where(
                    CONTROLLERS.c.run_id.in_(ids[start : start + _CHUNK]),
                    or_(
                        CONTROLLERS.c.started_at > now - timedelta(hours=1),
                        CONTROLLERS.c.position == last.c.last,
                    ),
                )
                .order_by(CONTROLLERS.c.position)
            )
            for row in found:
                one = ControllerRow(row.controller, row.flow_run_id, row.started_at)
                controllers.setdefault(row.run_id, []).append(one)
    return {
        row.run_id: Standing(
            run_id=row.run_id,
            run_dir=row.run_dir,
            state=row.state,
            created_at=row.created_at,
            ended_at=row.ended_at,
            owner=row.owner or "",
            token=row.token or 0,
            expired_s=None if row.expires_at is None else (present - row.expires_at).total_seconds(),
            promotion=row.promotion or "",
            promoted_step=row.checkpoint_step or 0,
            controllers=controllers.get(row.run_id, []),
        )
        for row in rows
    }


def runs_of_flow_runs(store: HistoryStore, flow_run_ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """Run and controller of each flow run that is known to have driven one; by the id of the flow run."""
    found: dict[str, tuple[str, str]] = {}
    ids = sorted(flow_run_ids)
    with store.reading() as connection:
        for start in range(0, len(ids), _CHUNK):
            rows = connection.execute(
                select(CONTROLLERS.c.flow_run_id, CONTROLLERS.c.run_id, CONTROLLERS.c.controller)
                .where(CONTROLLERS.c.flow_run_id.in_(ids[start : start + _CHUNK]))
                .order_by(CONTROLLERS.c.position)
            )
            # A flow run that was retried had several processes: the newest counts.
            found |= {row.flow_run_id: (row.run_id, row.controller) for row in rows}
    return found


def with_checkpoints(store: HistoryStore, ended_before: datetime) -> dict[str, tuple[str, datetime]]:
    """Directory and end of every run that ended before a moment and has checkpoints that were not removed; by id."""
    checkpoints = metadata.tables[Checkpoint.__tablename__]
    with store.reading() as connection:
        rows = connection.execute(
            select(RUNS.c.run_id, RUNS.c.run_dir, RUNS.c.ended_at)
            .distinct()
            .join(checkpoints, checkpoints.c.run_id == RUNS.c.run_id)
            .where(RUNS.c.ended_at < ended_before, checkpoints.c.removed_at.is_(None))
            .order_by(RUNS.c.run_id)
        )
        return {row.run_id: (row.run_dir, row.ended_at) for row in rows}


def run_states(store: HistoryStore) -> Mapping[str, str]:
    """State of every run, by its id."""
    with store.reading() as connection:
        return {row.run_id: row.state for row in connection.execute(select(RUNS.c.run_id, RUNS.c.state))}


def resumable_sources(store: HistoryStore) -> list[str]:
    """Config file or preset of every run that somebody may still go on with: not completed, or not promoted yet."""
    waiting = [PromotionState.WAITING.value, PromotionState.APPROVED.value]
    joined = RUNS.outerjoin(PROMOTIONS, PROMOTIONS.c.run_id == RUNS.c.run_id)
    question = (
        select(RUNS.c.config_source)
        .distinct()
        .select_from(joined)
        .where(or_(RUNS.c.state != RunState.COMPLETED.value, PROMOTIONS.c.state.in_(waiting)))
    )
    with store.reading() as connection:
        return list(connection.execute(question).scalars())
