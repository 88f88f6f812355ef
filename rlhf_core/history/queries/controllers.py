"""Who drove a run: its controllers, and the Prefect flow runs that they were."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from rlhf_core.history.store import LEASES, HistoryStore
from rlhf_core.history.writers import CONTROLLERS


def run_of_flow_run(store: HistoryStore, flow_run_id: str) -> str | None:
    """The run that a Prefect flow run drove last; None when it drove none."""
    question = (
        select(CONTROLLERS.c.run_id)
        .where(CONTROLLERS.c.flow_run_id == flow_run_id, CONTROLLERS.c.flow_run_id != "")
        .order_by(CONTROLLERS.c.started_at.desc())
        .limit(1)
    )
    with store.reading() as connection:
        found = connection.execute(question).scalar()
    return None if found is None else str(found)


def flow_runs_of(store: HistoryStore, run_id: str) -> list[str]:
    """The Prefect flow runs that drove a run, the newest last. A run driven without Prefect has none."""
    question = (
        select(CONTROLLERS.c.flow_run_id)
        .where(CONTROLLERS.c.run_id == run_id, CONTROLLERS.c.flow_run_id != "")
        .order_by(CONTROLLERS.c.position)
    )
    with store.reading() as connection:
        # One that was tried again drove it more than once.
        return list(dict.fromkeys(connection.execute(question).scalars()))


@dataclass(frozen=True)
class Holder:
    """Who holds the lease of a run, as the history has it."""

    owner: str
    """Text in the lease."""
    expires_at: datetime
    """When it runs out unless it is renewed."""
    left_s: float
    """How long that is from now, by the clock that leases are measured with."""
    since: datetime | None
    """When this owner took the run; None where that has not been read from the journal yet."""
    flow_run_url: str
    """Page of the Prefect flow run that it is; empty without one."""


def holder(store: HistoryStore, run_id: str) -> Holder | None:
    """Who holds the lease of a run; None where nobody does, or it ran out."""
    with store.reading() as connection:
        lease = connection.execute(select(LEASES).where(LEASES.c.run_id == run_id)).one_or_none()
        left_s = 0.0 if lease is None else (lease.expires_at - store.time(connection)).total_seconds()
        if lease is None or not lease.owner or left_s <= 0:
            return None
        took = connection.execute(
            select(CONTROLLERS.c.started_at, CONTROLLERS.c.flow_run_url)
            .where(CONTROLLERS.c.run_id == run_id, CONTROLLERS.c.controller == lease.owner)
            .order_by(CONTROLLERS.c.position.desc())
            .limit(1)
        ).one_or_none()
    since, url = (None, "") if took is None else (took.started_at, took.flow_run_url)
    return Holder(lease.owner, lease.expires_at, left_s, since, url)
