"""Presence of the services of a home folder: the process of each, and its state.

A service holds an exclusive lock on ``services/<name>.lock`` as long as it lives, and the kernel releases it however
the process ends. So no service ever runs twice, whether supervisord, systemd or a terminal started it, and a file left
by a killed service misleads no reader. Next to the lock are the record of the process, used to signal it, and its
heartbeat, used by the health check.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from rlhf_core.errors import BadInput
from rlhf_core.files import private as private_files
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.machine.process_identity import boot_id, started_ticks
from rlhf_core.schemas.base import Schema, utc_now
from rlhf_core.services.processes import terminate, wait_until

STARTED_BY = "RLHF_STARTED_BY"
"""Environment variable that names the supervisor of a service: ``rlhf up``, or a name set by a unit or container."""
OURS = "rlhf up"

HEARTBEAT_INTERVAL_S = 2.0
HEARTBEAT_TIMEOUT_S = 30.0
"""Age of the last heartbeat at which a service counts as silent. A machine under load skips some."""
LOCK_TIMEOUT_S = 2.0
"""Time that a starting service keeps trying for its lock: readers hold it briefly."""


class ServiceState(StrEnum):
    """State of a service."""

    STOPPED = "stopped"
    """No process holds its lock."""
    STARTING = "starting"
    """Its process is alive but has not been ready yet."""
    RUNNING = "running"
    """It is healthy."""
    SILENT = "silent"
    """Its process is alive but no longer sends heartbeats."""
    ELSEWHERE = "elsewhere"
    """Its lock is held by a process on another machine or container that shares the home folder."""


class ServiceRecord(Schema):
    """``services/<name>.json``: the process of a service."""

    pid: int
    started_ticks: int
    """Start time of the process in clock ticks since boot; with the next field, it rules out a later process with the
    same pid."""
    boot_id: str
    host: str
    since: datetime
    started_by: str
    address: str = ""
    """For the server: the address of its UI."""

    @property
    def is_alive(self) -> bool:
        """True if the process is alive, on this machine."""
        here = self.host == socket.gethostname() and self.boot_id == boot_id()
        return here and started_ticks(self.pid) == self.started_ticks

    def end(self, timeout_s: float) -> bool:
        """End the process, killing it after ``timeout_s`` seconds. Return True if it had to be killed."""
        return terminate(self.pid, lambda: self.is_alive, timeout_s)


@dataclass(frozen=True)
class ServiceFiles:
    """The files of one service."""

    home: Path
    name: str

    @property
    def lock(self) -> Path:
        """Locked by the service while it lives."""
        return self.home / "services" / f"{self.name}.lock"

    @property
    def record(self) -> Path:
        """Its process (:class:`ServiceRecord`)."""
        return self.home / "services" / f"{self.name}.json"

    @property
    def heartbeat(self) -> Path:
        """Time of its last heartbeat, on the machine's monotonic clock."""
        return self.home / "services" / f"{self.name}.beat"

    @property
    def log(self) -> Path:
        """Its output if ``rlhf up`` started it."""
        return self.home / "logs" / f"{self.name}.log"


@dataclass(frozen=True)
class ServiceStatus:
    """A service as another process sees it."""

    name: str
    state: ServiceState
    record: ServiceRecord | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 if there is none."""
        return self.record.pid if self.record else 0


def service_status(home: Path, name: str) -> ServiceStatus:
    """Current state of a service."""
    files = ServiceFiles(home, name)
    if not _is_held(files.lock):
        return ServiceStatus(name, ServiceState.STOPPED)
    record = read_model(files.record, ServiceRecord)
    if record is None:
        return ServiceStatus(name, ServiceState.STARTING)
    if record.host != socket.gethostname():
        return ServiceStatus(name, ServiceState.ELSEWHERE, record)
    if not record.is_alive:
        return ServiceStatus(name, ServiceState.STARTING)  # the new holder has not written its own record yet
    heartbeat = _read_heartbeat(files.heartbeat)
    if heartbeat is None:
        return ServiceStatus(name, ServiceState.STARTING, record)
    fresh = time.monotonic() - heartbeat <= HEARTBEAT_TIMEOUT_S
    return ServiceStatus(name, ServiceState.RUNNING if fresh else ServiceState.SILENT, record)


@contextmanager
def holding(home: Path, name: str, address: str = "") -> Iterator[Callable[[], None]]:
    """Hold a service's lock for the duration of the block. Yields the function that sends a heartbeat.

    Raises:
        BadInput: another process already runs this service.
    """
    files = ServiceFiles(home, name)
    with _opened(files.lock) as lock:
        if not wait_until(lambda: _locked(lock), LOCK_TIMEOUT_S):
            record = read_model(files.record, ServiceRecord)
            holder = f"process {record.pid} on {record.host}" if record else "another process"
            raise BadInput(
                f"the {name} of {home} is already running: {holder}. `rlhf up --status` shows it, `rlhf down` ends it"
            )
        files.heartbeat.unlink(missing_ok=True)
        write_model(files.record, _this_process(address))
        yield lambda: _write_heartbeat(files.heartbeat)


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Lock out other processes that start or stop services of this home folder, once they are done."""
    with _opened(home / "services" / "up.lock") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        yield


def private_folder(path: Path) -> None:
    """Create a folder that only its owner may enter; restrict an existing one.

    Any process that can open a lock file can hold the lock, even without write permission.

    Raises:
        BadInput: it belongs to another user, or cannot be created.
    """
    try:
        private_files.make_folder(path)
        found = path.stat()
    except OSError as error:
        raise BadInput(f"cannot make {path} private to this user: {error.strerror}") from None
    if found.st_uid != os.geteuid():
        raise BadInput(
            f"{path} belongs to user {found.st_uid}, expected a folder of user {os.geteuid()}: use another RLHF_HOME"
        )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a lock file of this user, in a folder that no other user may enter.

    Raises:
        BadInput: it is a link, or belongs to another user.
    """
    private_folder(path.parent)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, private_files.FILE_MODE)
    except OSError as error:
        raise BadInput(f"cannot open {path}: {error.strerror}; expected a file of this user, or none") from None
    with os.fdopen(descriptor, "r+b") as lock:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, private_files.FILE_MODE)  # created by an earlier version
        yield lock


def _this_process(address: str) -> ServiceRecord:
    ticks = started_ticks(os.getpid())
    assert ticks is not None, "this process lives"
    return ServiceRecord(
        pid=os.getpid(),
        started_ticks=ticks,
        boot_id=boot_id(),
        host=socket.gethostname(),
        since=utc_now(),
        started_by=os.environ.get(STARTED_BY, "hand"),
        address=address,
    )


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _locked(lock: BinaryIO) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _write_heartbeat(path: Path) -> None:
    """Write in place and with a fixed length, so that a reader sees either the old time or the new one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, private_files.FILE_MODE)
    try:
        os.pwrite(descriptor, f"{time.monotonic():020.3f}\n".encode("ascii"), 0)
    finally:
        os.close(descriptor)


def _read_heartbeat(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
