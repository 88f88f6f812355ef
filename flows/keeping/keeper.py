"""The keeper of a site: one process that reads the files of all active runs into the history, and reconciles.

Two keepers at once are no danger: a lease lets one act, and the other waits for it. The work is in two threads, so that
a job that takes a minute to end holds neither the reading nor the lease.
"""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from flows.asking import requests, skipping
from flows.keeping.flow_runs import RUN_FLOW
from flows.keeping.housekeeping import take_turn
from flows.keeping.reconciler import Reconciler
from flows.keeping.tidying import Tidier
from flows.site.server import server_answers
from rlhf_core.config import Site
from rlhf_core.errors import HistoryError, LeaseLost, RlhfError
from rlhf_core.history.queries import open_runs
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import Lease, Owner, known_dead
from rlhf_core.run_dir import RunDir, run_dirs
from rlhf_core.schemas.base import utc_now
from rlhf_core.watchdog.ingest import glance, sync

log = logging.getLogger("rlhf.keeper")

TTL_S = 60.0
"""How long the keeper's lease holds without being renewed."""

AGAIN_S = 5.0
"""Pause before the lease, or a database that does not answer, is asked for again."""

RETENTION_EVERY_S = 3600.0
"""How often checkpoints and kept configs are looked through."""

SWEEP_RUNS = 20
"""Run directories beside the active ones that each turn looks at: what was left unread, or is not known yet."""

LINGER = timedelta(minutes=10)
"""How long the files of a run that has ended are still read as often as those of the others."""


def lease_name(site: Site) -> str:
    """Row of the leases that one keeper holds: per folder of run directories, as a history may serve several."""
    return f"site:keeper:{site.runs_dir}"


def keep(site: Site, stop: threading.Event) -> None:
    """Look after the site until ``stop`` is set.

    A lost database, Prefect server or scheduler, and damaged run directories, are lived through: what could not be
    done is done later.

    Raises:
        SchemaOutOfDate, UnsafeDatabase, BadConfig: a person must mend something first.
    """
    _log_to_the_terminal()
    with _history(site, stop) as store:
        while store is not None and not stop.is_set():
            lease = _lease(site, store, stop)
            if lease is not None:
                _act(site, store, lease, stop)


def _log_to_the_terminal() -> None:
    """A handler of its own: those of the root belong to Prefect, which may have been told to be quiet."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


@contextlib.contextmanager
def _history(site: Site, stop: threading.Event) -> Iterator[HistoryStore | None]:
    """The history, as soon as it answers; None when the keeper is stopped before."""
    while True:
        try:
            store = HistoryStore(site.database_url)
            break
        except HistoryError as error:
            if error.exit_code == 2:  # nothing that passes
                raise
            log.warning("%s", error)
        if stop.wait(AGAIN_S):
            yield None
            return
    with store:
        yield store


def _lease(site: Site, store: HistoryStore, stop: threading.Event) -> Lease | None:
    """The keeper's lease, as soon as it can be had; None when the keeper is stopped before."""
    name, owner = lease_name(site), str(Owner.this_process())
    said = ""
    while not stop.is_set():
        try:
            token = store.acquire_lease(name, owner, TTL_S, takeover=known_dead)
            log.info("this process keeps %s", site.runs_dir)
            lease = Lease(store, name, owner, token)
            lease.start()
            return lease
        except LeaseLost:
            why = "another keeper is at work; waiting for its lease"
        except HistoryError as error:
            why = str(error)
        if why != said:
            log.info("%s", why)
            said = why
        stop.wait(AGAIN_S)
    return None


def _act(site: Site, store: HistoryStore, lease: Lease, stop: threading.Event) -> None:
    """Read and reconcile until the keeper is stopped or has lost its lease."""
    over = threading.Event()
    reconciling = threading.Thread(
        target=_reconcile, args=(site, store, lease, stop, over), name="reconciler", daemon=True
    )
    reconciling.start()
    ingester = Ingester(site, store)
    try:
        while not stop.is_set():
            began = time.monotonic()
            lease.keep()
            ingester.turn()
            stop.wait(max(site.prefect.ingest_s - (time.monotonic() - began), 0.05))
    except LeaseLost:
        log.warning("another keeper has taken over; this one waits")
    finally:
        over.set()
        _wait_for(reconciling, lease)
        lease.release()


def _wait_for(thread: threading.Thread, lease: Lease) -> None:
    """Let the deed in hand come to its end, with the lease kept: nobody else is to begin meanwhile."""
    while thread.is_alive():
        thread.join(timeout=1.0)
        with contextlib.suppress(HistoryError):
            lease.keep()


def _reconcile(site: Site, store: HistoryStore, lease: Lease, stop: threading.Event, over: threading.Event) -> None:
    reconciler = Reconciler(site, store, has_prefect=has_prefect())
    tidier = Tidier(site, store)
    looked_through = -RETENTION_EVERY_S

    def goes_on() -> bool:
        return not (over.is_set() or stop.is_set())

    def may() -> bool:
        return goes_on() and is_held(lease)

    while goes_on():
        retention = time.monotonic() - looked_through >= RETENTION_EVERY_S
        with _survived("a round could not be made"):
            take_turn(reconciler, may, retention=retention)
            looked_through = time.monotonic() if retention else looked_through
        if may() and server_answers():
            with _survived("scheduled runs that are not to begin could not be called off"):
                for one in skipping.call_off(RUN_FLOW, site.runs_dir):
                    log.info("skipped the scheduled flow run %s (%s): %s", one.name, one.flow_run_id, one.why)
        if may() and server_answers():
            with _survived("requests without a run could not be listed"):
                requests.keep(site, store, RUN_FLOW, utc_now())
        if retention and may():
            with _survived("kept configs could not be looked through"):
                tidier.tidy(may)
        over.wait(site.prefect.reconcile_s)


def is_held(lease: Lease) -> bool:
    """True if the keeper's lease is known to be held, asked of the database: before each deed, since this process may
    have been suspended for longer than the lease lasts."""
    try:
        lease.require()
    except HistoryError:  # lost, or nobody knows
        return False
    return True


def has_prefect() -> bool:
    """Whether this process was told of a Prefect server, be it away just now."""
    from prefect.settings import PREFECT_API_URL

    return bool(PREFECT_API_URL.value())


@contextlib.contextmanager
def _survived(what: str) -> Iterator[None]:
    """Go on after an error: one run, or one round, must not cost all others their keeper."""
    try:
        yield
    except LeaseLost:
        raise
    except (RlhfError, OSError) as error:
        log.warning("%s: %s", what, error)
    except Exception:
        log.exception("%s", what)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass
class Ingester:
    """Reads run directories into the history. It remembers one number per run directory: what it looked like when
    everything in it had been read."""

    site: Site
    store: HistoryStore
    say: Callable[[str], None] = log.warning
    _read: dict[str, int] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    _sweep: list[str] = field(default_factory=list)

    def turn(self) -> int:
        """Read what is new in all active runs, and in some of the others; how many had something new."""
        try:
            found = open_runs.find(self.store, utc_now(), since=utc_now() - LINGER)
        except HistoryError as error:
            self._complain("", str(error))
            return 0
        self._problems.pop("", None)
        # In an order of its own each time: where there is more to do than time, nobody is always last.
        ids = random.sample(sorted(found), len(found))
        return sum(self._sync(run_id) for run_id in [*ids, *self._next_of_the_others()])

    def _next_of_the_others(self) -> list[str]:
        if not self._sweep:
            self._sweep = [one.run_id for one in run_dirs(self.site.runs_dir)]
            for gone in self._read.keys() - set(self._sweep):
                del self._read[gone]
        taken, self._sweep = self._sweep[:SWEEP_RUNS], self._sweep[SWEEP_RUNS:]
        return taken

    def _sync(self, run_id: str) -> bool:
        try:
            run_dir = RunDir.of(self.site.runs_dir, run_id)
            seen = glance(run_dir)
            if seen is None or self._read.get(run_id) == seen:
                return False
            sync(run_dir, self.store)
        except (RlhfError, OSError) as error:
            self._complain(run_id, str(error))
            return False
        except Exception as error:  # noqa: BLE001 - a directory that breaks the reader must not cost the others theirs
            self._complain(run_id, f"{type(error).__name__}: {error}")
            return False
        self._read[run_id] = seen
        self._problems.pop(run_id, None)
        return True

    def _complain(self, run_id: str, problem: str) -> None:
        """Once per problem, not every two seconds."""
        if self._problems.get(run_id) != problem:
            self._problems[run_id] = problem
            self.say(f"{run_id}: {problem}" if run_id else problem)
