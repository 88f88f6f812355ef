"""The lease on a run: one controller drives it. The database gives it; its fencing token goes into the journal."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from rlhf_core.errors import DatabaseUnavailable, LeaseLost
from rlhf_core.history.queries.controllers import LeaseHolder, lease_holder
from rlhf_core.history.store import HistoryStore
from rlhf_core.machine.accounts import user_name

TTL_S = 60.0
"""Time for which a lease holds without being renewed. It is renewed four times in that time."""

HANG_S = 3600.0
"""A controller that has not asked for its lease for so long hangs: its lease is renewed no more."""

RELEASE_TIMEOUT_S = 5.0
"""Longest wait for a renewal that is under way when the lease is given back."""


def seconds_since_boot() -> float:
    """A clock that goes on while the process, or the whole machine, is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Owner:
    """A controller process, as the text in the lease names it: ``user@host:pid:start time``."""

    user: str
    host: str
    pid: int
    started: float

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.pid}:{self.started:.2f}"

    @classmethod
    def this_process(cls) -> "Owner":
        """The process that calls."""
        return cls(user_name(), socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        """Read the text of a lease; None when it has another form."""
        try:
            who, pid, started = text.rsplit(":", 2)
            user, host = who.split("@", 1)
            return cls(user, host, int(pid), float(started))
        except ValueError:
            return None

    def is_here(self) -> bool:
        """True if the process runs, or ran, on this host."""
        return self.host == socket.gethostname()

    def is_known_dead(self) -> bool:
        """True if this host can tell that the process is gone. False for processes of other hosts."""
        if not self.is_here():
            return False
        try:
            process = psutil.Process(self.pid)
            # Start times are worked out from the boot time, which the system's clock may correct by a little.
            same = abs(process.create_time() - self.started) < 2.0
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def owner_text(owner: str) -> str:
    """Describe the controller that a lease names: ``root on vm, process 8575, since 2026-11-22 02:11 UTC``.

    A text of another form is returned as it is.
    """
    found = Owner.parse(owner)
    if found is None:
        return owner
    since = datetime.fromtimestamp(found.started, UTC)
    return f"{found.user} on {found.host}, process {found.pid}, since {since:%Y-%m-%d %H:%M} UTC"


def known_dead(owner_text: str) -> bool:
    """Return True if the owner of a lease is known to be gone, so that the lease may be taken over before it
    expires."""
    owner = Owner.parse(owner_text)
    return owner is not None and owner.is_known_dead()


class HeldLease:
    """The lease this process holds on a run. Use :func:`acquire`.

    After :meth:`start` a thread of its own renews it, so that nothing the controller waits for, such as a job that
    takes minutes to end, makes it run out. The thread ends with the process, and a suspended process renews nothing.
    Safe to use from several threads.
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
        self.behind = ""
        """Reason why the database could not be reached at the last renewal; empty if it could."""
        self._store = store
        self._run_id = run_id
        self._owner = owner
        self._clock = clock
        self._ttl_s = ttl_s
        self._every_s = ttl_s / 4
        self._renewed = self._used = clock()
        self._lost: LeaseLost | None = None
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have a thread renew the lease from now on, until :meth:`release`."""
        self._thread = threading.Thread(target=self._keep_renewing, name=f"lease {self._run_id}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """True if another controller is known to have the run."""
        return self._lost is not None

    def keep(self) -> None:
        """Raise if the lease was lost, and renew it if the renewing thread is late. Cheap; call it often.

        A database that does not answer is tolerated: training goes on, and the renewal is tried again.

        Raises:
            LeaseLost: another controller has the run. Stop at once and change nothing more.
        """
        self._used = self._clock()
        if self._lost is None:
            # A late thread has not run, as after a suspension: this call finds out what was missed.
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
        """Ask the database now whether the lease is held, before something that must not be done twice.

        Without an answer the lease counts as held until it expires, counted from before the last renewal: until then no
        other controller can have it.

        Raises:
            LeaseLost: another controller has the run.
            DatabaseUnavailable: no answer, and the lease may have run out.
        """
        with self._turn:
            self._used = self._clock()
            try:
                self._renew()
            except DatabaseUnavailable:
                # A full disk or a lock of another program keeps from writing, not from reading.
                if not self._is_held_by_what_can_be_read() and self._clock() - self._renewed >= self._ttl_s:
                    raise

    def release(self) -> None:
        """Give the lease back, so that the next controller need not wait. It runs out by itself where this fails."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=RELEASE_TIMEOUT_S)
        try:
            self._store.release_lease(self._run_id, self._owner, self.token)
        except DatabaseUnavailable as error:
            self.behind = str(error)

    def _renew(self) -> None:
        """Renew the lease; only with the turn held.

        Raises:
            LeaseLost, DatabaseUnavailable: as :meth:`require`.
        """
        if self._lost is not None:
            raise LeaseLost(str(self._lost))
        began = self._clock()
        try:
            self._store.renew_lease(self._run_id, self._owner, self.token, self._ttl_s)
        except DatabaseUnavailable as error:
            self.behind = str(error)
            raise
        except LeaseLost as error:
            self._lost = error
            raise
        self.behind = ""
        self._renewed = began

    def _is_held_by_what_can_be_read(self) -> bool:
        try:
            self._store.verify_lease(self._run_id, self._owner, self.token)
        except DatabaseUnavailable:
            return False
        except LeaseLost as error:
            self._lost = error
            raise
        return True

    def _keep_renewing(self) -> None:
        while not self._over.wait(self._every_s / 4):
            now = self._clock()
            if now - self._used > HANG_S:
                continue  # a hung controller must not keep its run forever
            if now - self._renewed < self._every_s:
                continue
            with self._turn:
                if self._over.is_set():
                    return
                try:
                    self._renew()
                except DatabaseUnavailable:
                    continue  # tried again a moment later; keep() and require() know how old the last renewal is
                except LeaseLost:
                    return


def refuse_if_driven(store: HistoryStore, run_id: str) -> None:
    """Find out, without waiting, whether a controller of this host drives a run.

    Raises:
        LeaseLost: one does, and its process is alive.
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
    timeout_s: float = TTL_S + 5,
    fail_if_held: bool = False,
    ttl_s: float = TTL_S,
) -> HeldLease:
    """Take the lease of a run: at once if it is free or its owner is known dead, otherwise once it expires.

    Args:
        on_wait: called once with the reason for waiting and the longest wait (seconds).
        above: highest token in the run's journal; ours will be higher, even when the database is younger than that.
        timeout_s: how long to wait for a lease that is not renewed; 0 not to wait.
        fail_if_held: Raise as soon as the owner is known to be alive, instead of waiting: its process runs on this
            host, or, on another host, the lease was renewed meanwhile. Meant for commands; a retried flow run may have
            to wait for its own previous process to end.
        ttl_s: how long the lease holds without being renewed.

    Raises:
        LeaseLost: another controller keeps renewing it.
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
                continue  # given back just now
            if (fail_if_held and _is_alive(found, first or found)) or clock() - started >= timeout_s:
                raise LeaseLost(_driven_by(run_id, found, first or found)) from None
            if first is None:
                first = found
                on_wait(str(error), timeout_s)
            sleep(1.0)
            continue
        return HeldLease(store, run_id, owner, token, clock, ttl_s)


def _is_alive(found: LeaseHolder, first: LeaseHolder) -> bool:
    """Return True if the owner of a lease is known to be alive. On another host that takes a renewal since the first
    query."""
    owner = Owner.parse(found.controller)
    if owner is not None and owner.is_here():
        return not owner.is_known_dead()
    return found.expires_at > first.expires_at


def _driven_by(run_id: str, found: LeaseHolder, first: LeaseHolder) -> str:
    """Message that names the controller of a run and says what to do."""
    owner = Owner.parse(found.controller)
    who = found.controller if owner is None else f"{owner.user} on {owner.host}, process {owner.pid}"
    since = f", since {found.since:%Y-%m-%d %H:%M:%S} UTC" if found.since is not None else ""
    where = f", flow run {found.flow_run_url}" if found.flow_run_url else ""
    alive = "It is alive: " if _is_alive(found, first) else ""
    return (
        f"run {run_id} is driven by another controller: {who}{since}{where}. {alive}`rlhf watch {run_id}` shows the "
        f"run, `rlhf cancel {run_id}` ends it. Should it hang, its lease runs out in {found.left_s:.0f} s unless "
        f"renewed, and `rlhf resume {run_id}` takes over then"
    )
