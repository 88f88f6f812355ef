"""Reads for the site daemon: runs that have not ended, wait for a promotion, or have checkpoints to retain."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, func, or_, select, union_all

from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.sqlalchemy_core import CONTROLLERS, EVENTS, LEASES, PROMOTIONS, RUNS, chunks
from rlhf_core.schemas.attempts import RUN_ENDS, PromotionState, RunState


@dataclass(frozen=True)
class ControllerRow:
    """One controller that drove a run."""

    flow_run_id: str
    started_at: datetime


@dataclass(frozen=True)
class OpenRun:
    """One run, according to the history."""

    run_id: str
    run_dir: str
    trial_of: str
    """The run that this one is a trial of; empty for others."""
    ingest_stamp: int
    """Number of its last ingestion: with the same one, the history has nothing new of it."""
    state: str
    created_at: datetime
    ended_at: datetime | None
    holder: str
    """Controller that holds its lease or held it last; empty if it was released or never taken."""
    token: int
    """Fencing token of the lease; 0 if there never was one."""
    expired_s: float | None
    """Seconds since the lease expired, by the clock of the database; negative while it is valid, None without one."""
    promotion: str
    """State of the promotion of its model; empty without one."""
    promoted_step: int
    controllers: Sequence[ControllerRow]
    """Controllers of the last hour, and always the newest; in order."""

    @property
    def is_driven(self) -> bool:
        """True if a controller holds its lease, as far as the database knows."""
        return bool(self.holder) and self.expired_s is not None and self.expired_s < 0


def find(
    store: HistoryStore, now: datetime, *, since: datetime | None = None, run_ids: Collection[str] = ()
) -> dict[str, OpenRun]:
    """Find the runs that have not ended, wait for a promotion, ended after ``since``, or are named; by id."""
    waiting = [PromotionState.WAITING.value, PromotionState.APPROVED.value]
    open_states = [state.value for state in RunState if state not in RUN_ENDS]
    # Each by an index: the daemon asks every two seconds, and a history may have 100,000 runs.
    wanted = [
        select(RUNS.c.run_id).where(RUNS.c.state.in_(open_states)),
        select(PROMOTIONS.c.run_id).where(PROMOTIONS.c.state.in_(waiting)),
    ]
    if since is not None:
        is_end = EVENTS.c.kind == "run_moved", EVENTS.c.state.in_([state.value for state in RUN_ENDS])
        wanted.append(select(EVENTS.c.run_id).where(*is_end, EVENTS.c.time >= since))
    found = _find(store, now, RUNS.c.run_id.in_(union_all(*wanted)))
    return found | named(store, now, set(run_ids) - found.keys())


def named(store: HistoryStore, now: datetime, run_ids: Collection[str]) -> dict[str, OpenRun]:
    """Find runs by their ids, whatever their state."""
    found: dict[str, OpenRun] = {}
    for ids in chunks(run_ids):
        found |= _find(store, now, RUNS.c.run_id.in_(ids))
    return found


def _find(store: HistoryStore, now: datetime, which: ColumnElement[bool]) -> dict[str, OpenRun]:
    joined = RUNS.outerjoin(LEASES, LEASES.c.run_id == RUNS.c.run_id).outerjoin(
        PROMOTIONS, PROMOTIONS.c.run_id == RUNS.c.run_id
    )
    columns = (
        RUNS.c.run_id,
        RUNS.c.run_dir,
        RUNS.c.trial_of,
        RUNS.c.ingest_stamp,
        RUNS.c.state,
        RUNS.c.created_at,
        RUNS.c.ended_at,
        LEASES.c.holder,
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
        for among in chunks([row.run_id for row in rows]):
            last = newest.where(CONTROLLERS.c.run_id.in_(among)).subquery()
            found = connection.execute(
                select(CONTROLLERS)
                .join(last, last.c.run_id == CONTROLLERS.c.run_id)
                .where(
                    CONTROLLERS.c.run_id.in_(among),
                    or_(
                        CONTROLLERS.c.started_at > now - timedelta(hours=1),
                        CONTROLLERS.c.position == last.c.last,
                    ),
                )
                .order_by(CONTROLLERS.c.position)
            )
            for row in found:
                one = ControllerRow(row.flow_run_id, row.started_at)
                controllers.setdefault(row.run_id, []).append(one)
    return {
        row.run_id: OpenRun(
            run_id=row.run_id,
            run_dir=row.run_dir,
            trial_of=row.trial_of,
            ingest_stamp=row.ingest_stamp,
            state=row.state,
            created_at=row.created_at,
            ended_at=row.ended_at,
            holder=row.holder or "",
            token=row.token or 0,
            expired_s=None if row.expires_at is None else (present - row.expires_at).total_seconds(),
            promotion=row.promotion or "",
            promoted_step=row.checkpoint_step or 0,
            controllers=controllers.get(row.run_id, []),
        )
        for row in rows
    }


def runs_of_flow_runs(store: HistoryStore, flow_run_ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """Find the run and controller of each flow run that drove one, by the flow run's id."""
    found: dict[str, tuple[str, str]] = {}
    with store.reading() as connection:
        for ids in chunks(flow_run_ids):
            rows = connection.execute(
                select(CONTROLLERS.c.flow_run_id, CONTROLLERS.c.run_id, CONTROLLERS.c.controller)
                .where(CONTROLLERS.c.flow_run_id.in_(ids))
                .order_by(CONTROLLERS.c.position)
            )
            # A retried flow run had several processes: the newest counts.
            found |= {row.flow_run_id: (row.run_id, row.controller) for row in rows}
    return found


def ended_before(store: HistoryStore, time: datetime) -> dict[str, tuple[str, datetime]]:
    """Find the directory and end of every run that ended before a time, by id."""
    with store.reading() as connection:
        rows = connection.execute(
            select(RUNS.c.run_id, RUNS.c.run_dir, RUNS.c.ended_at).where(RUNS.c.ended_at < time).order_by(RUNS.c.run_id)
        )
        return {row.run_id: (row.run_dir, row.ended_at) for row in rows}


def resumable_sources(store: HistoryStore) -> list[str]:
    """List the config file or preset of every run that may still be resumed."""
    return _of_resumable(store, RUNS.c.config_source)


def resumable_dirs(store: HistoryStore) -> list[str]:
    """List the directory of every run that may still be resumed, also of other sites."""
    return _of_resumable(store, RUNS.c.run_dir)


def _of_resumable(store: HistoryStore, column: ColumnElement[str]) -> list[str]:
    """Values of a column of the runs that are not completed, or not promoted yet."""
    waiting = [PromotionState.WAITING.value, PromotionState.APPROVED.value]
    joined = RUNS.outerjoin(PROMOTIONS, PROMOTIONS.c.run_id == RUNS.c.run_id)
    query = (
        select(column)
        .distinct()
        .select_from(joined)
        .where(or_(RUNS.c.state != RunState.COMPLETED.value, PROMOTIONS.c.state.in_(waiting)))
    )
    with store.reading() as connection:
        return list(connection.execute(query).scalars())
