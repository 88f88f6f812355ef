"""One round of the reconciler on request, next to the daemon of the site or without one."""

from collections.abc import Callable, Sequence

from rlhf_core.config.site import Site
from rlhf_core.control.reconcile.actions import ActionResult, Reconciler
from rlhf_core.control.reconcile.flow_runs import FlowRuns
from rlhf_core.control.reconcile.loop import take_lease
from rlhf_core.control.run_folders import daemon_of
from rlhf_core.diagnosis.reconcile.decisions import ReconcileAction
from rlhf_core.errors import LeaseLost
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import owner_text

Warn = Callable[[str], None]
"""Called with each problem that leaves something unknown."""


def poll_once(site: Site, store: HistoryStore, flow_runs: FlowRuns | None, warn: Warn) -> Sequence[ReconcileAction]:
    """The actions that a round would carry out.

    Raises:
        HistoryError: the history does not answer.
    """
    return Reconciler(site, store, flow_runs=flow_runs, warn=warn).poll(retention=True)


def reconcile_once(site: Site, store: HistoryStore, flow_runs: FlowRuns | None, warn: Warn) -> Sequence[ActionResult]:
    """Carry out a round.

    Raises:
        LeaseLost: the daemon of the site is running and reconciles by itself, or has started meanwhile.
        HistoryError: the history does not answer.
    """
    try:
        lease = take_lease(site, store)
    except LeaseLost:
        raise _daemon_at_work(site, store) from None

    def may() -> bool:
        try:
            lease.require()
        except LeaseLost:
            raise _daemon_at_work(site, store) from None
        return True

    try:
        reconciler = Reconciler(site, store, flow_runs=flow_runs, warn=warn)
        return reconciler.carry_out(reconciler.poll(retention=True), may)
    finally:
        lease.release()


def _daemon_at_work(site: Site, store: HistoryStore) -> LeaseLost:
    holder = daemon_of(site.runs_dir, store)
    daemon = f" ({owner_text(holder.controller)})" if holder is not None else ""
    return LeaseLost(
        f"the daemon of this site{daemon} reconciles every {site.prefect.reconcile_s:g} s by itself; --dry-run shows "
        "what it finds"
    )
