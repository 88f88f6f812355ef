"""The daemon of a site: one process that reads the files of all active runs into the history, and reconciles.

Two daemons at the same time do no harm: a lease lets only one of them act, and the other waits for it. The work is done
in two threads, so that a job that takes a minute to end delays neither the ingestion nor the renewal of the lease.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlhf_core.condition_log import ConditionLog
from rlhf_core.config.site import Site
from rlhf_core.control.exporters.processes import Exporters
from rlhf_core.control.ingester import Ingester
from rlhf_core.control.reconcile.actions import ActionResult, Reconciler
from rlhf_core.control.reconcile.cleanup import SnapshotCleanup
from rlhf_core.control.reconcile.flow_runs import FlowRuns
from rlhf_core.control.run_folders import earlier_lease_name, lease_name
from rlhf_core.errors import HistoryError, LeaseLost, RlhfError
from rlhf_core.history.queries.controllers import lease_holder
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import HeldLease, Owner, known_dead
from rlhf_core.survival import Survived

log = logging.getLogger("rlhf.daemon")

TTL_S = 60.0
"""Lifetime of the daemon's lease in seconds if it is not renewed."""

RETRY_INTERVAL_S = 5.0
"""Pause before requesting the lease again, or reconnecting to a database that does not answer."""

CLEANUP_INTERVAL_S = 3600.0
"""Time between two removals of old checkpoints and snapshots."""

Round = Callable[[Reconciler, Callable[[], bool], bool], Sequence[ActionResult]]
"""Carries out one round of a reconciler, asking before each action whether it may; the flag adds old checkpoints."""


@dataclass(frozen=True)
class Chore:
    """An additional task of every round."""

    title: str
    """Subject of the log message ``... was not possible``."""
    work: Callable[[HistoryStore], object]


def plain_round(reconciler: Reconciler, may: Callable[[], bool], retention: bool) -> Sequence[ActionResult]:
    """Poll and act, and nothing else."""
    return reconciler.carry_out(reconciler.poll(retention=retention), may)


def take_lease(site: Site, store: HistoryStore) -> HeldLease:
    """Take the daemon's lease, and renew it from now on.

    Raises:
        LeaseLost, HistoryError: another process holds it, or the history does not answer.
    """
    name, earlier = lease_name(site.runs_dir), earlier_lease_name(site.runs_dir)
    if earlier != name and lease_holder(store, earlier) is not None:
        raise LeaseLost(f"a daemon of an earlier version looks after {site.runs_dir}")
    owner = str(Owner.this_process())
    lease = HeldLease(store, name, owner, store.acquire_lease(name, owner, TTL_S, takeover=known_dead))
    lease.start()
    return lease


def run(
    site: Site,
    stop: threading.Event,
    flow_runs: FlowRuns | None,
    carry_out_round: Round = plain_round,
    chores: Sequence[Chore] = (),
) -> None:
    """Ingest and reconcile the site until ``stop`` is set.

    The daemon survives the loss of the database, the Prefect server or the scheduler, and damaged run directories: what
    could not be done is done later.

    Args:
        flow_runs: those of the site's Prefect server; None if it has none.
        carry_out_round: carries out one round of the reconciler.
        chores: additional tasks of every round, carried out if Prefect answers.

    Raises:
        SchemaOutOfDate, UnsafeDatabase, BadConfig: an administrator has to repair something first.
    """
    _log_to_the_terminal()
    rounds = _Rounds(site, flow_runs, carry_out_round, chores)
    with _history(site, stop) as store:
        while store is not None and not stop.is_set():
            lease = _lease(site, store, stop)
            if lease is not None:
                _act(site, store, lease, stop, rounds)


def _log_to_the_terminal() -> None:
    """Log through a separate handler: those of the root logger belong to Prefect, which may be configured to be
    quiet."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


@contextlib.contextmanager
def _history(site: Site, stop: threading.Event) -> Iterator[HistoryStore | None]:
    """Open the history as soon as it answers; None if the daemon is stopped before."""
    outage = ConditionLog(log.warning)
    while True:
        try:
            store = HistoryStore(site.database_url)
            break
        except HistoryError as error:
            if error.exit_code == 2:  # an error that does not go away by itself
                raise
            outage.log_change(str(error))
        if stop.wait(RETRY_INTERVAL_S):
            yield None
            return
    with store:
        yield store


def _lease(site: Site, store: HistoryStore, stop: threading.Event) -> HeldLease | None:
    """Acquire the daemon's lease as soon as it is free; None if the daemon is stopped before."""
    waiting = ConditionLog(log.info)
    while not stop.is_set():
        try:
            lease = take_lease(site, store)
            log.info("this process looks after %s", site.runs_dir)
            return lease
        except LeaseLost:
            waiting.log_change("another daemon is running; waiting for its lease")
        except HistoryError as error:
            waiting.log_change(str(error))
        stop.wait(RETRY_INTERVAL_S)
    return None


def _act(site: Site, store: HistoryStore, lease: HeldLease, stop: threading.Event, rounds: "_Rounds") -> None:
    """Ingest and reconcile until the daemon is stopped or has lost its lease."""
    over = threading.Event()
    reconciling = threading.Thread(target=rounds.run, args=(store, lease, stop, over), name="reconciler", daemon=True)
    reconciling.start()
    ingester, exporters = Ingester(site, store), Exporters(site)
    try:
        while not stop.is_set():
            began = time.monotonic()
            lease.keep()
            ingester.ingest()
            exporters.keep()
            stop.wait(max(site.prefect.ingest_s - (time.monotonic() - began), 0.05))
    except LeaseLost:
        log.warning("another daemon has taken over; this one waits")
    finally:
        over.set()
        exporters.stop()
        _wait_for(reconciling, lease)
        lease.release()


def _wait_for(thread: threading.Thread, lease: HeldLease) -> None:
    """Wait until the current action has finished, and keep the lease meanwhile, so that no other daemon starts."""
    while thread.is_alive():
        thread.join(timeout=1.0)
        with contextlib.suppress(HistoryError):
            lease.keep()


@dataclass(frozen=True)
class _Rounds:
    """The rounds of the reconciler, in a separate thread."""

    site: Site
    flow_runs: FlowRuns | None
    carry_out: Round
    chores: Sequence[Chore]

    def run(self, store: HistoryStore, lease: HeldLease, stop: threading.Event, over: threading.Event) -> None:
        """Carry out one round after the other, until either event is set."""
        interval_s = self.site.prefect.reconcile_s
        reconciler = Reconciler(self.site, store, flow_runs=self.flow_runs, retention_s=interval_s)
        cleanup = SnapshotCleanup(self.site, store, self.flow_runs)
        cleaned_up_s = -CLEANUP_INTERVAL_S

        def goes_on() -> bool:
            return not (over.is_set() or stop.is_set())

        def may() -> bool:
            return goes_on() and is_held(lease)

        while goes_on():
            retention = time.monotonic() - cleaned_up_s >= CLEANUP_INTERVAL_S
            is_cleaned_up = False
            with _survived("a round could not be made"):
                self.carry_out(reconciler, may, False)
                if retention:  # reads many files: the repairs come first
                    self.carry_out(reconciler, _for_a_while(may, interval_s), True)
                    is_cleaned_up = reconciler.retention.is_complete
                    cleaned_up_s = time.monotonic() if is_cleaned_up else cleaned_up_s
            for chore in self.chores:
                if may() and self.flow_runs is not None and self.flow_runs.answers():
                    with _survived(f"{chore.title} was not possible"):
                        chore.work(store)
            if is_cleaned_up and may():
                with _survived("the removal of old snapshots was not possible"):
                    cleanup.run(may)
            over.wait(interval_s)


def _for_a_while(may: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """A permission that ends some time after it was first asked for."""
    until_s = math.inf

    def is_permitted() -> bool:
        nonlocal until_s
        now_s = time.monotonic()
        until_s = min(until_s, now_s + seconds)
        return now_s <= until_s and may()

    return is_permitted


def is_held(lease: HeldLease) -> bool:
    """True if the database confirms that the daemon still holds its lease. Checked before each action, since this
    process may have been suspended for longer than the lease lasts."""
    try:
        lease.require()
    except HistoryError:  # lost, or unknown
        return False
    return True


@contextlib.contextmanager
def _survived(what: str) -> Iterator[None]:
    """Log an error and continue: one run, or one round, must not stop the daemon for all others."""
    with Survived(but=(LeaseLost,)) as found:
        yield
    if isinstance(found.error, RlhfError | OSError):
        log.warning("%s: %s", what, found.error)
    elif found.error is not None:
        log.error("%s", what, exc_info=found.error)
