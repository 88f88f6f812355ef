"""Runs that have not ended and that no controller drives: their state alone looks like that of a healthy run."""

from collections.abc import Collection
from datetime import datetime, timedelta

from rlhf_core.control.reconcile.facts import lease_state
from rlhf_core.diagnosis.reconcile.decisions import grace_s
from rlhf_core.diagnosis.reconcile.facts import LeaseState
from rlhf_core.history.queries.open_runs import named
from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.base import utc_now


def undriven_since(store: HistoryStore, run_ids: Collection[str]) -> dict[str, datetime]:
    """Find those of the given runs that have not ended and have no controller. Returns, by id, the time since when.

    A controller of this machine that died counts at once. One that is silent, a run between two controllers, and one
    before its first, count after the time at which the site daemon would adopt it.
    """
    now = utc_now()
    found: dict[str, datetime] = {}
    for run_id, standing in named(store, now, run_ids).items():
        holder, undriven_s = lease_state(standing, now)
        if standing.ended_at is not None or holder is LeaseState.LIVING:
            continue
        if undriven_s >= grace_s(holder, was_driven=bool(standing.controllers)):
            found[run_id] = now - timedelta(seconds=undriven_s)
    return found


def undriven_text(run_id: str, since: datetime) -> str:
    """State since when nothing drives a run, and how to continue it. To the minute: a lease is renewed four times in
    one.

    Args:
        run_id: the run to resume; for a trial, the run that it is for.
    """
    return (
        f"No controller has driven this run since {since:%Y-%m-%d %H:%M} UTC. `rlhf resume {run_id}` continues it: it "
        "adopts the job if that is still running, otherwise it starts a new attempt from the last complete checkpoint"
    )
