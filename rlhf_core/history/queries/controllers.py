"""The controller that holds the lease of a run."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.sqlalchemy_core import CONTROLLERS, LEASES


@dataclass(frozen=True)
class LeaseHolder:
    """The controller that holds the lease of a run, according to the history."""

    controller: str
    """Its name in the lease: user, machine, process."""
    expires_at: datetime
    """End of the lease unless it is renewed."""
    left_s: float
    """Seconds until then, by the clock for leases."""
    since: datetime | None
    """Time at which it acquired the run; None if not ingested from the journal yet."""
    flow_run_url: str
    """Page of its Prefect flow run; empty without one."""


def lease_holder(store: HistoryStore, run_id: str) -> LeaseHolder | None:
    """Find the controller that holds the lease of a run; None if there is none or the lease has expired."""
    with store.reading() as connection:
        lease = connection.execute(select(LEASES).where(LEASES.c.run_id == run_id)).one_or_none()
        left_s = 0.0 if lease is None else (lease.expires_at - store.time(connection)).total_seconds()
        if lease is None or not lease.holder or left_s <= 0:
            return None
        took = connection.execute(
            select(CONTROLLERS.c.started_at, CONTROLLERS.c.flow_run_url)
            .where(CONTROLLERS.c.run_id == run_id, CONTROLLERS.c.controller == lease.holder)
            .order_by(CONTROLLERS.c.position.desc())
            .limit(1)
        ).one_or_none()
    since, url = (None, "") if took is None else (took.started_at, took.flow_run_url)
    return LeaseHolder(lease.holder, lease.expires_at, left_s, since, url)
