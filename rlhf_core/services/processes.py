"""The service processes of a site, as other processes see them: who holds a service, since when, and is it well.

A service holds an exclusive lock on ``services/<name>.lock`` of the home folder for as long as it lives; the kernel
gives it back however the process ends. So no two are ever there, and a file that a killed service left behind misleads
nobody. Beside it lie the record of the process, by which it is signalled, and its beat, which grows while it is well.
"""

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import psutil

from rlhf_core import private_files
from rlhf_core.errors import BadInput
from rlhf_core.run_dir import read_model, write_model
from rlhf_core.schemas.base import Schema, utc_now

SERVICES = ("server", "worker", "keeper")
"""The services of a site, in the order in which they are started; they are ended in the opposite order."""

STARTED_BY = "RLHF_STARTED_BY"
"""Variable that says who keeps a service running: ``rlhf up`` when it is not set otherwise by a unit or a container."""
OURS = "rlhf up"

HOME_MARKER = "RLHF_SERVICES_HOME"
"""Variable that the services of a home folder carry, and so everything they start."""

BEAT_S = 2.0
"""How often a service that is well says so."""
STALE_S = 30.0
"""How old the last beat of a service may be. A machine under load skips some."""
LOCK_PATIENCE_S = 2.0
"""How long a starting service tries to get its lock: somebody who only looks holds it for a moment."""


class ServiceState(StrEnum):
    """How a service stands."""

    STOPPED = "stopped"
    """Nobody holds it."""
    STARTING = "starting"
    """Its process lives and has not been ready yet."""
    RUNNING = "running"
    """It is well."""
    SILENT = "silent"
    """Its process lives and does not answer any more."""
    ELSEWHERE = "elsewhere"
    """A process of another machine or container that shares the home folder holds it."""


class ServiceRecord(Schema):
    """``services/<name>.json``: the process of a service."""

    pid: int
    started_ticks: int
    """When the process was started, in clock ticks since the machine's start: with the next field, no other process of
    this id is taken for it."""
    boot_id: str
    host: str
    since: datetime
    started_by: str
    address: str = ""
    """Of the server: its UI."""


@dataclass(frozen=True)
class ServiceFiles:
    """The files of one service."""

    home: Path
    name: str

    @property
    def lock(self) -> Path:
        """Held by the service while it lives."""
        return self.home / "services" / f"{self.name}.lock"

    @property
    def record(self) -> Path:
        """Which process it is."""
        return self.home / "services" / f"{self.name}.json"

    @property
    def beat(self) -> Path:
        """When it was last well, on the monotonic clock of the machine."""
        return self.home / "services" / f"{self.name}.beat"

    @property
    def log(self) -> Path:
        """What it writes when ``rlhf up`` starts it."""
        return self.home / "logs" / f"{self.name}.log"


@dataclass(frozen=True)
class ServiceStatus:
    """What is seen of a service."""

    name: str
    state: ServiceState
    record: ServiceRecord | None = None

    @property
    def pid(self) -> int:
        """Its process; 0 where there is none."""
        return self.record.pid if self.record else 0


def look(home: Path, name: str) -> ServiceStatus:
    """How a service stands now."""
    files = ServiceFiles(home, name)
    if not _is_held(files.lock):
        return ServiceStatus(name, ServiceState.STOPPED)
    record = read_model(files.record, ServiceRecord)
    if record is None:
        return ServiceStatus(name, ServiceState.STARTING)
    if record.host != socket.gethostname():
        return ServiceStatus(name, ServiceState.ELSEWHERE, record)
    if not _lives(record):
        return ServiceStatus(name, ServiceState.STARTING)  # the next holder has not written its own record yet
    beat = _read_beat(files.beat)
    if beat is None:
        return ServiceStatus(name, ServiceState.STARTING, record)
    fresh = time.monotonic() - beat <= STALE_S
    return ServiceStatus(name, ServiceState.RUNNING if fresh else ServiceState.SILENT, record)


@contextmanager
def holding(home: Path, name: str, address: str = "") -> Iterator[Callable[[], None]]:
    """Be a service for as long as the block lasts. Yields what is to be called while the service is well.

    Raises:
        BadInput: another process is this service already.
    """
    files = ServiceFiles(home, name)
    with _opened(files.lock) as lock:
        if not _locked(lock.fileno(), LOCK_PATIENCE_S):
            record = read_model(files.record, ServiceRecord)
            who = f"process {record.pid} on {record.host}" if record else "another process"
            raise BadInput(
                f"the {name} of {home} is running already: {who}. `rlhf up --status` shows it, `rlhf down` ends it"
            )
        files.beat.unlink(missing_ok=True)
        write_model(files.record, _this_process(address))
        yield lambda: _write_beat(files.beat)


@contextmanager
def alone(home: Path, *, wait: bool = True) -> Iterator[bool]:
    """Be the one who starts or ends services of this home folder, once nobody else does; False, with ``wait`` false,
    where another process does just now."""
    with _opened(home / "services" / "up.lock") as lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def end(record: ServiceRecord, timeout_s: float) -> bool:
    """End the process of a service: asked first, killed after ``timeout_s`` seconds. Whether it had to be killed.

    A process that only has the same id is left alone.
    """
    if not _lives(record):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
        os.kill(record.pid, signal.SIGCONT)  # one that was stopped hears nothing else
    if _gone(record, timeout_s):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGKILL)
    _gone(record, timeout_s)
    return True


def flow_processes(home: Path) -> list[psutil.Process]:
    """The processes of flow runs that a worker of this home folder started, whether or not it still lives."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and is_flow_process(process, home):
                found.append(process)
    return found


def is_flow_process(process: psutil.Process, home: Path) -> bool:
    """Whether a process drives a flow run of this home folder. The jobs that it started carry the same variables."""
    if "prefect.engine" not in process.cmdline():
        return False
    return process.environ().get(HOME_MARKER) == str(home) and process.status() != psutil.STATUS_ZOMBIE


def end_all(processes: list[psutil.Process], timeout_s: float) -> None:
    """End processes: asked first, then killed."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, remaining = psutil.wait_procs(processes, timeout=timeout_s)
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(remaining, timeout=timeout_s)


def started_ticks(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was (proc(5), field 22); None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter; close one that others may.

    Whoever can open a lock can hold it, whatever its permissions say about writing.

    Raises:
        BadInput: it is another user's, or cannot be made.
    """
    try:
        private_files.make_folder(path)
        found = path.stat()
    except OSError as error:
        raise BadInput(f"cannot make {path} a folder of this user alone: {error.strerror}") from None
    if found.st_uid != os.geteuid():
        raise BadInput(
            f"{path} belongs to user {found.st_uid}, expected a folder of user {os.geteuid()}: use another RLHF_HOME"
        )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A lock of this user, in a folder that nobody else may enter.

    Raises:
        BadInput: it is a link, or another user's.
    """
    private_folder(path.parent)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, private_files.FILE_MODE)
    except OSError as error:
        raise BadInput(f"cannot open {path}: {error.strerror}; expected a file of this user, or none") from None
    with os.fdopen(descriptor, "r+b") as lock:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, private_files.FILE_MODE)  # made by an earlier version
        yield lock


def _this_process(address: str) -> ServiceRecord:
    ticks = started_ticks(os.getpid())
    assert ticks is not None, "this process lives"
    return ServiceRecord(
        pid=os.getpid(),
        started_ticks=ticks,
        boot_id=_boot_id(),
        host=socket.gethostname(),
        since=utc_now(),
        started_by=os.environ.get(STARTED_BY, "hand"),
        address=address,
    )


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _lives(record: ServiceRecord) -> bool:
    here = record.host == socket.gethostname() and record.boot_id == _boot_id()
    return here and started_ticks(record.pid) == record.started_ticks


def _gone(record: ServiceRecord, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _lives(record):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


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


def _locked(descriptor: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def _write_beat(path: Path) -> None:
    """In place and of one length, so that a reader sees the old beat or the new one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, private_files.FILE_MODE)
    try:
        os.pwrite(descriptor, f"{time.monotonic():020.3f}\n".encode("ascii"), 0)
    finally:
        os.close(descriptor)


def _read_beat(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
