"""Slurm's queue, queried once for all jobs of this user and shared between all processes that need it.

Two hundred controllers that each query every second would be a load that administrators notice. The answer of one
batched ``squeue`` is kept for two seconds in a small file; its lock lets one process query while the others read, so
the number of calls does not grow with the number of jobs. ``scontrol ping`` comes first: it answers in milliseconds if
the controller is down, while every other command would hang until its timeout.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from rlhf_core.errors import SchedulerError
from rlhf_core.files import private as private_files
from rlhf_core.scheduler.slurm import commands
from rlhf_core.schemas.resources import job_marker

FRESH_S = 2.0
"""Maximum age of a cached answer."""
LOCK_S = commands.COMMAND_S + commands.PING_S
"""Longest wait for another process that queries; one that takes longer is suspended (Ctrl-Z)."""
_FORMAT = "%i|%T|%r|%N|%S|%Z\t%j\t%k"
"""Fields of :class:`QueuedJob`. No folder or name of a run's job contains a tab: a submission with one is refused."""
_ATTEMPT_FOLDER = re.compile(r".*/([^/]+)/attempts/([0-9]{1,9})/scheduler/?", re.DOTALL)


@dataclass(frozen=True)
class QueuedJob:
    """One job in the queue; ended jobs remain for some minutes."""

    job_id: str
    state: str
    """Slurm's name for the state, for instance ``NODE_FAIL``."""
    reason: str
    nodes: str
    """Its nodes, in Slurm's short form."""
    start: str
    """Actual or expected start; ``N/A`` if Slurm does not know."""
    comment: str
    folder: str = ""
    """Its working folder; empty if unknown."""
    name: str = ""
    """Its own name; empty if unknown."""

    @property
    def attempt(self) -> tuple[str, int] | None:
        """Run and attempt whose folder it works in; None if it is another folder, or unknown."""
        found = _ATTEMPT_FOLDER.fullmatch(self.folder)
        return (found[1], int(found[2])) if found else None

    @property
    def marker(self) -> str:
        """Marker of its attempt, by its working folder: plug-ins of a site may rewrite comments. For all other jobs,
        their comment: users also start jobs of their own in the folder of an attempt, under other names than the
        run's."""
        found = self.attempt
        return job_marker(*found) if found and self.name == found[0] else self.comment


@dataclass(frozen=True)
class Listing:
    """One snapshot of the queue."""

    queried_at: float
    """Time before the query, in seconds since the epoch."""
    rows: Mapping[str, QueuedJob]
    """Jobs by job id."""
    problem: str = ""
    """Reason why there is no answer; empty if there is one."""


_CACHE = TypeAdapter(Listing)
"""Content of the file that the processes share."""


def listing(max_age_s: float = FRESH_S) -> Listing:
    """Return the queue, at most ``max_age_s`` old. Failed queries are cached too, so an outage causes no extra
    queries."""
    path = _cache_file()
    with _locked(path) as held:
        # Without a lock (a read-only home, a suspended process that holds it), every process queries on its own.
        kept = _read(path) if held else None
        if kept is not None and 0 <= time.time() - kept.queried_at < max_age_s:
            return kept
        fresh = _query()
        if held:
            _write(path, fresh)
        return fresh


def _query() -> Listing:
    queried_at = time.time()
    try:
        commands.require_controller()
        return Listing(queried_at, selected(f"--user={os.getuid()}"))
    except SchedulerError as error:
        return Listing(queried_at, {}, str(error))


def selected(option: str) -> dict[str, QueuedJob]:
    """Query the jobs that an option of squeue selects, by job id.

    Raises:
        SchedulerError: as :func:`rlhf_core.scheduler.slurm.commands.run`.
    """
    # --all: without it, Slurm leaves out the jobs in hidden partitions, also for the user who owns them.
    text = commands.run("squeue", "--all", "--noheader", "--states=all", option, f"--format={_FORMAT}")
    rows = [_row(line) for line in text.splitlines() if line.count("|") >= 5]
    return {row.job_id: row for row in rows}


def _row(line: str) -> QueuedJob:
    job_id, state, reason, nodes, start, last = line.split("|", 5)
    folder, _, last = last.partition("\t")
    name, _, comment = last.partition("\t")
    return QueuedJob(job_id, state, reason, nodes, start, comment, folder, name)


# ---------------------------------------------------------------------------------------------------------------------
# The file shared by the processes


def _cache_file() -> Path:
    """Path of the cache: one per user, cluster and host, as two clusters may share the home folders."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf"
    place = "\n".join([socket.gethostname(), *commands.cluster_variables()])
    return folder / f"squeue-{hashlib.sha256(place.encode()).hexdigest()[:12]}.json"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    try:
        private_files.make_folder(path.parent)  # a process that can open a lock can also hold it
        lock = path.with_suffix(".lock").open("w")
    except OSError:
        yield False
        return
    with lock:
        yield _take(lock)


def _take(lock: IO[str]) -> bool:
    """Wait for a lock, up to ``LOCK_S`` seconds; False if it cannot be had."""
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        except OSError:
            return False
        else:
            return True


def _read(path: Path) -> Listing | None:
    try:
        return _CACHE.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _write(path: Path, listing: Listing) -> None:
    with contextlib.suppress(OSError):
        path.write_bytes(_CACHE.dump_json(listing))
