"""The lease on a run: one controller drives it. The database gives it; its fencing token goes into the journal."""

import getpass
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from rlhf_core.errors import DatabaseUnavailable, LeaseLost
from rlhf_core.history.store import HistoryStore

TTL_S = 60.0
"""How long a lease holds without being renewed. Longer than anything a controller does between two renewals."""

RENEW_EVERY_S = 15.0
"""How often it is renewed."""


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
        """Whether it is, or was, a process of this host."""
        return self.host == socket.gethostname()

    def is_known_dead(self) -> bool:
        """Whether this host can tell that the process is gone. About other hosts nothing is known: False."""
        if not self.is_here():
            return False
        try:
            process = psutil.Process(self.pid)
            # Start times are worked out from the boot time, which the system's clock may correct by a little.
            same = abs(process.create_time() - self.started) < 2.0
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def user_name() -> str:
    """The user's name; the number where the system does not know one (containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def known_dead(owner_text: str) -> bool:
    """Whether the owner of a lease is known to be gone, so that its lease may be taken over before it runs out."""
    owner = Owner.parse(owner_text)
    return owner is not None and owner.is_known_dead()


class Lease:
    """The lease this process holds on a run. Use :func:`acquire`."""

    def __init__(
        self, store: HistoryStore, run_id: str, owner: str, token: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.token = token
        self.behind = ""
        """Why the database could not be reached at the last renewal; empty when it could."""
        self._store = store
        self._run_id = run_id
        self._owner = owner
        self._clock = clock
        self._renewed = clock()

    def keep(self) -> None:
        """Renew the lease when it is time to. Cheap; call it often.

        A database that does not answer is tolerated: training goes on, and the renewal is tried again.

        Raises:
            LeaseLost: another controller has the run. Stop at once and change nothing more.
        """
        if self._clock() - self._renewed < RENEW_EVERY_S:
            return
        try:
            self._store.renew_lease(self._run_id, self._owner, self.token, TTL_S)
        except DatabaseUnavailable as error:
            self.behind = str(error)
            return
        self.behind = ""
        self._renewed = self._clock()

    def release(self) -> None:
        """Give the lease back, so that the next controller need not wait. It runs out by itself where this fails."""
        try:
            self._store.release_lease(self._run_id, self._owner, self.token)
        except DatabaseUnavailable as error:
            self.behind = str(error)


def acquire(
    store: HistoryStore,
    run_id: str,
    *,
    on_wait: Callable[[str, float], None],
    above: int = 0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    patience_s: float = TTL_S + 5,
) -> Lease:
    """Take the lease of a run: at once when it is free or its owner is known dead, else when it runs out.

    Args:
        on_wait: told once what is waited for and for how long at most (seconds).
        above: highest token in the run's journal; ours will be higher, even when the database is younger than that.
        patience_s: how long to wait for a lease that is not renewed; 0 not to wait.

    Raises:
        LeaseLost: another controller keeps renewing it.
    """
    owner = str(Owner.this_process())
    started = clock()
    waiting = False
    while True:
        try:
            token = store.acquire_lease(run_id, owner, TTL_S, takeover=known_dead, above=above)
        except LeaseLost as error:
            if clock() - started >= patience_s:
                raise LeaseLost(
                    f"{error} It is alive: `rlhf watch {run_id}` shows the run, `rlhf cancel {run_id}` ends it."
                ) from None
            if not waiting:
                waiting = True
                on_wait(str(error), patience_s)
            sleep(1.0)
            continue
        return Lease(store, run_id, owner, token, clock)
