"""Facts about one run for the reconciler, from its files and its rows in the history."""

import os
from datetime import datetime, timedelta
from pathlib import Path

from rlhf_core.control.promotion import is_due
from rlhf_core.diagnosis.reconcile.facts import LeaseState, RunFacts
from rlhf_core.history.queries.open_runs import OpenRun
from rlhf_core.launch.journal import RunRecord
from rlhf_core.launch.lease import TTL_S, Owner
from rlhf_core.machine.accounts import user_name
from rlhf_core.schemas.stored_spec import StoredSpec

SILENT_AFTER_S = 600.0
"""Time after the expiry of its lease until a controller on this machine counts as silent although its process exists,
because it is stopped (Ctrl-Z) or hangs. Until then, it may only be unable to reach the database."""


def run_facts(
    run_id: str, standing: OpenRun | None, written: RunRecord, cancel_requested: str, stored: StoredSpec, now: datetime
) -> RunFacts:
    """Combine the facts about a run.

    Args:
        standing: its rows in the history; None if there are none.
        written: the record of its journal.
        cancel_requested: reason of a pending request to end it at once; empty if there is none.
    """
    submissions = {number: one.submission for number, one in written.attempts.items()}
    controllers = standing.controllers if standing is not None else ()
    newest = controllers[-1] if controllers else None
    holder, undriven_s = lease_state(standing, now)
    ended_at = standing.ended_at if standing is not None else None
    return RunFacts(
        run_id=run_id,
        state=written.state,
        recorded=standing.state if standing is not None else "",
        holder=holder,
        owner=standing.holder if standing is not None else "",
        undriven_s=undriven_s,
        num_controllers=sum(one.started_at > now - timedelta(hours=1) for one in controllers),
        controller_started_at=newest.started_at if newest is not None else None,
        flow_run_id=newest.flow_run_id if newest is not None else "",
        attempt=written.last_number,
        jobs={number: one.job_id for number, one in submissions.items() if one is not None},
        ended_s=(now - ended_at).total_seconds() if ended_at is not None else 0.0,
        cancel_requested=cancel_requested,
        trial_of=stored.trial_of,
        promotion_due=is_due(stored, written),
    )


def foreign_owner(root: Path) -> str:
    """Name of the owner of a run directory that belongs to another user and is not writable here; empty otherwise.

    Raises:
        OSError: the directory cannot be examined.
    """
    uid = root.stat().st_uid
    return "" if uid == os.geteuid() or os.access(root, os.W_OK) else user_name(uid)


def lease_state(standing: OpenRun | None, now: datetime) -> tuple[LeaseState, float]:
    """The state of the lease on a run, and the time since a controller last drove it (seconds)."""
    if standing is None:
        return LeaseState.FREE, 0.0
    if standing.expired_s is None:
        return LeaseState.FREE, (now - standing.created_at).total_seconds()
    if not standing.holder:
        return LeaseState.FREE, standing.expired_s
    owner = Owner.parse(standing.holder)
    if owner is not None and owner.is_here():
        if owner.is_known_dead():
            return LeaseState.DEAD, max(standing.expired_s + TTL_S, 0.0)
        is_living = standing.expired_s < SILENT_AFTER_S
    else:
        is_living = standing.expired_s < 0
    return (LeaseState.LIVING, 0.0) if is_living else (LeaseState.SILENT, standing.expired_s)
