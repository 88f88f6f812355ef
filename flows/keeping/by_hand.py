"""A round of the reconciler by hand, beside the keeper or without one."""

from collections.abc import Sequence

from flows.keeping.keeper import TTL_S, has_prefect, lease_name
from flows.keeping.reconciler import Deed, Reconciler
from rlhf_core.config import Site
from rlhf_core.diagnosis.reconcile import ReconcileAction
from rlhf_core.errors import LeaseLost
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import HeldLease, Owner, known_dead


def look_once(site: Site, store: HistoryStore) -> Sequence[ReconcileAction]:
    """What a round would do.

    Raises:
        HistoryError: the history does not answer.
    """
    return Reconciler(site, store, has_prefect=has_prefect()).look(retention=True)


def reconcile_once(site: Site, store: HistoryStore) -> Sequence[Deed]:
    """Do a round.

    Raises:
        LeaseLost: the keeper of the site is at work and does it by itself, or has begun to meanwhile.
        HistoryError: the history does not answer.
    """
    name, owner = lease_name(site), str(Owner.this_process())
    try:
        token = store.acquire_lease(name, owner, TTL_S, takeover=known_dead)
    except LeaseLost as error:
        raise LeaseLost(
            f"the keeper of this site is at work and reconciles every {site.prefect.reconcile_s:g} s by itself; "
            f"--dry-run shows what it finds ({error})"
        ) from None
    lease = HeldLease(store, name, owner, token)

    lease.start()

    def may() -> bool:
        lease.require()
        return True

    try:
        reconciler = Reconciler(site, store, has_prefect=has_prefect())
        return reconciler.carry_out(reconciler.look(retention=True), may)
    finally:
        lease.release()
