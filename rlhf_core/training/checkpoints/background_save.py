"""Background writing of one checkpoint: one thread per rank, coordinated through a store.

The threads never enter a collective: two threads of a rank would issue collectives in an order that may differ from
that of another rank, which is a deadlock. The little that the ranks must exchange goes through their store: the
checksums of each rank's files, and rank 0's verdict.
"""

import hashlib
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import Field
from torch.distributed.distributed_c10d import Store

from rlhf_core.files.whole import comes_from_full_disk
from rlhf_core.schemas.base import Message, Schema
from rlhf_core.schemas.checkpoint_files import FileChecksum
from rlhf_core.survival import Survived
from rlhf_core.training.models.tensor_files import chunks, write_pieces

FIRST_POLL_S, LONGEST_POLL_S = 0.02, 0.5
"""First and longest interval at which a rank polls for the other ranks' results."""

Content = Mapping[str, mmap.mmap | bytes]
"""File contents by path in the checkpoint."""


class Report(Schema):
    """Outcome of one rank's part."""

    files: dict[str, FileChecksum] = Field(default_factory=dict)
    problem: Message = ""
    """Failure message; empty if there was none."""
    is_disk_full: bool = False


class BackgroundSave:
    """One checkpoint in progress."""

    def __init__(self, step: int, work: Callable[["BackgroundSave"], Report]) -> None:
        """Start the thread.

        Args:
            work: writes the files, calls :meth:`advance` regularly, and returns the verdict over all ranks; never
                raises.
        """
        self.step = step
        self._work = work
        self._advanced_at_s = time.monotonic()
        self._is_written = threading.Event()
        self._over = threading.Event()
        self._verdict: Report | None = None
        self._seconds = 0.0
        # A daemon: a thread stuck in a file system must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    @property
    def verdict(self) -> Report | None:
        """Outcome on all ranks; None while in progress."""
        return self._verdict if self._over.is_set() else None

    @property
    def stands_still_s(self) -> float:
        """Time since this rank's own part last made progress, in seconds; 0 once it is written."""
        return 0.0 if self._is_written.is_set() else time.monotonic() - self._advanced_at_s

    def take_seconds(self) -> float:
        """Return the time that the save took; 0 on later calls."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def advance(self) -> None:
        """Record progress of this rank's part. Called from the thread."""
        self._advanced_at_s = time.monotonic()

    def is_written(self) -> None:
        """Record that this rank's part is written and that it now waits for the others. Called from the thread."""
        self._is_written.set()

    def wait(self, beat: Callable[[], None], waiting_for_others: Callable[[], AbstractContextManager[None]]) -> Report:
        """Wait for the verdict, with a heartbeat whenever there is progress, so that a stuck save is detected as a
        hang.

        Args:
            waiting_for_others: marks this rank as waiting for its peers, as in a collective.
        """
        seen_s = 0.0
        while not self._is_written.wait(FIRST_POLL_S):
            if self._advanced_at_s != seen_s:
                seen_s = self._advanced_at_s
                beat()
        # Even if the save is over by now: every rank has to mark it equally often.
        with waiting_for_others():
            self._over.wait()
        beat()
        assert self._verdict is not None
        return self._verdict

    def leave(self, timeout_s: float) -> None:
        """Wait after an error that ends this process, until the save is over or has made no progress for
        ``timeout_s``."""
        while not self._over.wait(FIRST_POLL_S):
            if time.monotonic() - self._advanced_at_s > timeout_s:
                return

    def _run(self) -> None:
        started_s = time.monotonic()
        self._verdict = self._work(self)
        self._seconds = time.monotonic() - started_s
        self._over.set()


def checksums_of(content: Content, advance: Callable[[], None]) -> dict[str, FileChecksum]:
    """Compute size and SHA-256 of files in memory."""
    found = {}
    for name, data in content.items():
        digest = hashlib.sha256()
        for piece in chunks(data):
            digest.update(piece)
            advance()
        found[name] = FileChecksum(bytes=len(data), sha256=digest.hexdigest())
    return found


def write_files(root: Path, content: Content, advance: Callable[[], None]) -> None:
    """Write files from memory and sync them to disk.

    Raises:
        OSError: a file cannot be written.
    """
    for name, data in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_pieces(path, chunks(data), advance)


def awaited(store: Store, key: str, timeout_s: float) -> bytes:
    """Poll for a key that another rank sets; a blocking wait would lock the store for all other threads.

    Raises:
        RuntimeError: torch's own, for a lost store.
        TimeoutError: the key was not set in time.
    """
    interval_s, deadline = FIRST_POLL_S, time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{key} was not set within {timeout_s:.0f} s")
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, LONGEST_POLL_S)
    return bytes(store.get(key))


def reported(work: Callable[[], dict[str, FileChecksum]]) -> Report:
    """Run a function that returns checksums of files, and report its outcome."""
    with Survived() as outcome:  # any error must reach the step and the other ranks
        return Report(files=work())
    return Report(problem=outcome.problem, is_disk_full=comes_from_full_disk(outcome.error))


def combined(reports: Sequence[Report]) -> Report:
    """Combine the outcomes of all ranks."""
    problems = [f"rank {rank}: {one.problem}" for rank, one in enumerate(reports) if one.problem]
    files = {name: found for one in reports for name, found in one.files.items()}
    return Report(files=files, problem="; ".join(problems), is_disk_full=any(one.is_disk_full for one in reports))
