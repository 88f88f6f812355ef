"""The lease on a run, which lets only one controller drive it. The database grants it; its fencing token goes into the
journal."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto

import psutil

from rlhf_core.errors import DatabaseUnavailable, LeaseLost
from rlhf_core.history.queries.controllers import LeaseHolder, lease_holder
from rlhf_core.history.store import HistoryStore
from rlhf_core.machine.accounts import user_name
from rlhf_core.machine.process_identity import boot_id, started_ticks

TTL_S = 60.0
"""Time after which a lease expires unless renewed. It is renewed four times in that period."""

HANG_S = 3600.0
"""Time after which a controller that has not checked its lease counts as hung, and the lease is no longer renewed."""

RELEASE_TIMEOUT_S = 5.0
"""Longest wait for a renewal in progress when the lease is released."""


def seconds_since_boot() -> float:
    """A clock that keeps running while the process, or the whole machine, is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Owner:
    """A controller process, written into the lease as ``user@host:pid:start time/start mark``."""

    user: str
    host: str
    pid: int
    started: float
    """Start time by the clock, in seconds since the epoch."""
    mark: str = ""
    """:func:`start_mark` of the process; empty for leases of 0.1, and where there is none."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.pid}:{self.started:.2f}" + (f"/{self.mark}" if self.mark else "")

    @classmethod
    def this_process(cls) -> "Owner":
        """The calling process."""
        pid = os.getpid()
        return cls(user_name(), socket.gethostname(), pid, psutil.Process().create_time(), start_mark(pid))

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        """Parse the text of a lease; None if it has another form."""
        try:
            user_and_host, pid, started = text.rsplit(":", 2)
            user, host = user_and_host.rsplit("@", 1)  # a user of a domain may be anna@corp.example
            started, _, mark = started.partition("/")
            return cls(user, host, int(pid), float(started), mark)
        except ValueError:
            return None

    def is_here(self) -> bool:
        """True if the process runs, or ran, on this host."""
        return self.host == socket.gethostname()

    def is_known_dead(self) -> bool:
        """True if this host can tell that the process is gone; always False for processes of other hosts."""
        if not self.is_here():
            return False
        try:
            process = psutil.Process(self.pid)
            mark = start_mark(self.pid)
            # Times by the clock are derived from the boot time, which corrections of the clock shift.
            same = mark == self.mark if mark and self.mark else abs(process.create_time() - self.started) < 2.0
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return not _is_there(self.pid)


def start_mark(pid: int) -> str:
    """The boot of this machine and the kernel's tick at which a process started, ``1b2c3d4e.52175``. Empty where /proc
    does not show them."""
    try:
        ticks = started_ticks(pid)
        return "" if ticks is None else f"{boot_id()[:8]}.{ticks}"
    except OSError:
        return ""


def _is_there(pid: int) -> bool:
    """True if a process has this number. With ``hidepid``, /proc does not show those of other users."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True


def owner_text(owner: str, since: datetime | None = None) -> str:
    """Describe the controller that a lease names: ``root on vm, process 8575, since 2026-11-22 02:11:07 UTC``.

    Text in another form is returned unchanged.

    Args:
        since: time at which it took the run, in UTC; None for the start of its process, which may have driven other
            runs before.
    """
    found = Owner.parse(owner)
    if found is None:
        return owner
    since = since or datetime.fromtimestamp(found.started, UTC)
    return f"{found.user} on {found.host}, process {found.pid}, since {since:%Y-%m-%d %H:%M:%S} UTC"


def known_dead(owner_text: str) -> bool:
    """Return True if the owner of a lease is known to be gone, so that the lease may be taken over before it
    expires."""
    owner = Owner.parse(owner_text)
    return owner is not None and owner.is_known_dead()


class HeldLease:
    """A lease that this process holds on a run. Obtain it with :func:`acquire`.

    After :meth:`start`, a background thread renews it, so that it does not expire while the controller waits, for
    instance for a job that takes minutes to end. The thread dies with the process and stops while the process is
    suspended. Safe to use from several threads.
    """

    def __init__(
        self,
        store: HistoryStore,
        run_id: str,
        owner: str,
        token: int,
        clock: Callable[[], float] = seconds_since_boot,
        ttl_s: float = TTL_S,
    ) -> None:
        self.token = token
        self._store = store
        self._run_id = run_id
        self._owner = owner
        self._clock = clock
        self._ttl_s = ttl_s
        self._every_s = ttl_s / 4
        self._renewed = self._used = clock()
        self._lost: LeaseLost | None = None
        self._turn = threading.Lock()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start a thread that renews the lease until :meth:`release`."""
        self._thread = threading.Thread(target=self._keep_renewing, name=f"lease {self._run_id}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """True if another controller is known to have the run."""
        return self._lost is not None

    def lose(self, error: LeaseLost) -> None:
        """Count the lease as lost, although this database does not show it: the newer one is in another database."""
        self._lost = error

    def keep(self) -> None:
        """Raise if the lease was lost, and renew it if the renewal thread is late. Cheap; call it often.

        A database that does not answer is tolerated: training continues, and the renewal is retried.

        Raises:
            LeaseLost: another controller has the run. Stop at once and change nothing more.
        """
        self._used = self._clock()
        if self._lost is None:
            # If the thread is late, it did not run, as after a suspension: this call checks the lease.
            due_s = self._every_s if self._thread is None else 2 * self._every_s
            if self._used - self._renewed >= due_s and self._turn.acquire(blocking=False):
                try:
                    with contextlib.suppress(DatabaseUnavailable):
                        self._renew()
                finally:
                    self._turn.release()
        if self._lost is not None:
            raise LeaseLost(str(self._lost))

    def require(self) -> None:
        """Confirm with the database that the lease is held, before an action that must not happen twice.

        Without an answer, the lease counts as held until it expires, measured from before the last renewal: until then
        no other controller can get it.

        Raises:
            LeaseLost: another controller has the run.
            DatabaseUnavailable: no answer, and the lease may have expired.
        """
        with self._turn:
            self._used = self._clock()
            try:
                self._renew()
            except DatabaseUnavailable:
                # A full disk or another program's lock prevents writes, not reads.
                if not self._row_shows_lease() and self._clock() - self._renewed >= self._ttl_s:
                    raise

    def release(self) -> None:
        """Release the lease, so that the next controller need not wait. If this fails, it expires by itself."""
        self._released.set()
        if self._thread is not None:
            self._thread.join(timeout=RELEASE_TIMEOUT_S)
        with contextlib.suppress(DatabaseUnavailable):
            self._store.release_lease(self._run_id, self._owner, self.token)

    def _renew(self) -> None:
        """Renew the lease; the caller must hold the turn.

        Raises:
            LeaseLost, DatabaseUnavailable: as :meth:`require`.
        """
        if self._lost is not None:
            raise LeaseLost(str(self._lost))
        began = self._clock()
        try:
            self._store.renew_lease(self._run_id, self._owner, self.token, self._ttl_s)
        except LeaseLost as error:
            self._lost = error
            raise
        self._renewed = began

    def _row_shows_lease(self) -> bool:
        try:
            self._store.verify_lease(self._run_id, self._owner, self.token)
        except DatabaseUnavailable:
            return False
        except LeaseLost as error:
            self._lost = error
            raise
        return True

    def _keep_renewing(self) -> None:
        while not self._released.wait(self._every_s / 4):
            now = self._clock()
            if now - self._used > HANG_S:
                continue  # a hung controller must not keep its run forever
            if now - self._renewed < self._every_s:
                continue
            with self._turn:
                if self._released.is_set():
                    return
                try:
                    self._renew()
                except DatabaseUnavailable:
                    continue  # retried shortly; keep() and require() know the age of the last renewal
                except LeaseLost:
                    return


class IfHeld(Enum):
    """Response to a lease that another controller holds."""

    FAIL = auto()
    """Raise at once."""
    FAIL_IF_ALIVE = auto()
    """Wait for its expiry, but raise as soon as the other controller is known to be alive: its process runs on this
    host, or it renewed the lease from another one. For commands."""
    WAIT = auto()
    """Wait for its expiry. A retried flow run may have to wait for its own previous process to end."""


def refuse_if_driven(store: HistoryStore, run_id: str) -> None:
    """Raise if a live controller on this host drives a run. Does not wait.

    Raises:
        LeaseLost: one does.
    """
    found = lease_holder(store, run_id)
    if found is not None and found.controller != str(Owner.this_process()) and _is_alive(found, found):
        raise LeaseLost(_driven_by(run_id, found, found))


def acquire(
    store: HistoryStore,
    run_id: str,
    *,
    on_wait: Callable[[str, float], None],
    above: int = 0,
    clock: Callable[[], float] = seconds_since_boot,
    sleep: Callable[[float], None] = time.sleep,
    if_held: IfHeld = IfHeld.WAIT,
    timeout_s: float = TTL_S + 5,
    ttl_s: float = TTL_S,
) -> HeldLease:
    """Take the lease of a run: at once if it is free or its owner is known dead, otherwise as ``if_held`` tells.

    Args:
        on_wait: called once with the reason for waiting and the longest wait (seconds).
        above: highest token in the run's journal; ours will be higher, even if the database is newer than the journal.
        timeout_s: longest wait.
        ttl_s: time after which the lease expires unless renewed.

    Raises:
        LeaseLost: another controller holds it.
    """
    owner = str(Owner.this_process())
    started = clock()
    first: LeaseHolder | None = None
    while True:
        try:
            token = store.acquire_lease(run_id, owner, ttl_s, takeover=known_dead, above=above)
        except LeaseLost as error:
            found = lease_holder(store, run_id)
            if found is None:
                continue  # released just now
            is_refused = if_held is IfHeld.FAIL or (
                if_held is IfHeld.FAIL_IF_ALIVE and _is_alive(found, first or found)
            )
            if is_refused or clock() - started >= timeout_s:
                raise LeaseLost(_driven_by(run_id, found, first or found)) from None
            if first is None:
                first = found
                on_wait(str(error), timeout_s)
            sleep(1.0)
            continue
        return HeldLease(store, run_id, owner, token, clock, ttl_s)


def _is_alive(found: LeaseHolder, first: LeaseHolder) -> bool:
    """Return True if the owner of a lease is known to be alive. For another host, the sign is a renewal since the first
    query."""
    owner = Owner.parse(found.controller)
    if owner is not None and owner.is_here():
        return not owner.is_known_dead()
    return found.expires_at > first.expires_at


def _driven_by(run_id: str, found: LeaseHolder, first: LeaseHolder) -> str:
    """Build the message that names the controller of a run and gives advice."""
    where = f", flow run {found.flow_run_url}" if found.flow_run_url else ""
    alive = "It is running: " if _is_alive(found, first) else ""
    return (
        f"run {run_id} is driven by another controller: {owner_text(found.controller, found.since)}{where}. "
        f"{alive}`rlhf watch {run_id}` shows the run, `rlhf cancel {run_id}` ends it. If it hangs, its lease expires "
        f"in {found.left_s:.0f} s unless renewed; then `rlhf resume {run_id}` takes over"
    )
