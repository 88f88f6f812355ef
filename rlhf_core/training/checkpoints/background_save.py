"""Background writing of one checkpoint, from the snapshot to ``COMPLETE``: one thread per rank, coordinated through a
store.

The threads never enter a collective: two threads of a rank would issue collectives in an order that may differ from
that of another rank, which is a deadlock. The little that the ranks must exchange goes through their store: the
checksums of each rank's files, and rank 0's verdict.
"""

import contextlib
import hashlib
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from rlhf_core.files.whole import comes_from_full_disk, remove_tree
from rlhf_core.schemas.base import Message, Schema
from rlhf_core.schemas.checkpoint_files import FileChecksum
from rlhf_core.survival import Survived
from rlhf_core.training.checkpoints.saving import CheckpointPart, CheckpointPublication
from rlhf_core.training.distributed import POLL_S, Ranks, awaited
from rlhf_core.training.models.tensor_files import chunks, write_pieces

Content = Mapping[str, mmap.mmap | bytes]
"""File contents by path in the checkpoint."""


class Report(Schema):
    """Outcome of one rank's part."""

    files: dict[str, FileChecksum] = Field(default_factory=dict)
    problem: Message = ""
    """Failure message; empty if there was none."""
    is_disk_full: bool = False


class BackgroundSave:
    """One checkpoint on its way to the disk, in a thread of each rank.

    Every thread writes the files of its rank and reports the outcome. That of rank 0 publishes the checkpoint once all
    ranks have written theirs, or removes it, and reports the verdict, which all ranks wait for.
    """

    def __init__(
        self,
        part: CheckpointPart,
        content: Content,
        ranks: Ranks,
        publication: CheckpointPublication,
        topic: str,
        timeout_s: float,
        *,
        keep: Callable[[dict[str, FileChecksum]], None],
        release: Callable[[], None],
    ) -> None:
        """Start the thread.

        Args:
            content: files of this rank; they stay as they are until the save is over.
            topic: key of this save, and of no other, in the store of the ranks.
            timeout_s: longest wait for the outcome of another rank.
            keep: called with the checksums of the files before they are written.
            release: returns once nothing else reads the content; called last.
        """
        self.step = part.progress.step
        self._part = part
        self._content = content
        self._ranks = ranks
        self._publication = publication
        self._topic = topic
        self._timeout_s = timeout_s
        self._keep = keep
        self._release = release
        self._advanced_at_s = time.monotonic()
        self._is_written = threading.Event()
        self._over = threading.Event()
        self._verdict = Report()
        self._seconds = 0.0
        # A daemon: a thread stuck in a file system must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{self.step}", daemon=True)
        self._thread.start()

    # -----------------------------------------------------------------------------------------------------------------
    # For the step

    @property
    def is_over(self) -> bool:
        """True once the checkpoint is complete, or has failed, on all ranks."""
        return self._over.is_set()

    @property
    def has_failed(self) -> bool:
        """True if the checkpoint could not be written, on any rank."""
        return self.is_over and bool(self._verdict.problem)

    @property
    def stands_still_s(self) -> float:
        """Time since this rank's own part last made progress, in seconds; 0 once it is written."""
        return 0.0 if self._is_written.is_set() else time.monotonic() - self._advanced_at_s

    def take_seconds(self) -> float:
        """Return the time that the save took; 0 on later calls."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until the save is over, with a heartbeat whenever there is progress, so that a stuck save is detected as
        a hang. All ranks call it."""
        seen_s = 0.0
        while not self._is_written.wait(POLL_S):
            if self._advanced_at_s != seen_s:
                seen_s = self._advanced_at_s
                beat()
        # Even if the save is over by now: every rank has to mark it equally often.
        with self._ranks.reporter.collective():
            self._over.wait()
        beat()

    def require_complete(self) -> None:
        """Raise the failure of a save that is over, if it has failed.

        Raises:
            DiskFull, WorkerError: a rank could not write, or a newer attempt has superseded this one; the same on every
                rank.
        """
        if self.has_failed:
            verdict = self._verdict
            raise self._publication.failure(self.step, verdict.problem, disk_full=verdict.is_disk_full)

    def leave(self, timeout_s: float) -> None:
        """Wait after an error that ends this process, until the save is over or has made no progress for
        ``timeout_s``."""
        while not self._over.wait(POLL_S):
            if time.monotonic() - self._advanced_at_s > timeout_s:
                return

    # -----------------------------------------------------------------------------------------------------------------
    # In the thread

    def _run(self) -> None:
        started_s = time.monotonic()
        own = reported(self._write)
        self._is_written.set()
        self._verdict = self._verdict_of_all(own)
        self._release()
        self._seconds = time.monotonic() - started_s
        self._over.set()

    def _write(self) -> dict[str, FileChecksum]:
        files = checksums_of(self._content, self._advance)  # in memory, so that reading reveals what the disk corrupts
        self._keep(files)
        write_files(self._part.checkpoint.partial.root, self._content, self._advance)
        return files

    def _advance(self) -> None:
        """Record progress of this rank's part."""
        self._advanced_at_s = time.monotonic()

    def _verdict_of_all(self, own: Report) -> Report:
        """Report this rank's outcome to the others; returns the verdict over all ranks."""
        store, rank = self._ranks.store, self._ranks.rank
        try:
            store.set(f"{self._topic}/{rank}", own.model_dump_json())
            if self._ranks.is_first:
                verdict = self._publish_or_remove()
                # Without the files, which no other rank needs: the store keeps it until the end of the job.
                store.set(f"{self._topic}/verdict", verdict.model_dump_json(exclude={"files"}))
                return verdict
            return Report.model_validate_json(awaited(store, f"{self._topic}/verdict", self._timeout_s))
        except Exception as error:  # noqa: BLE001 - torch's store, hosted by the agent, is gone: the step must learn of it
            return Report(problem=f"rank {rank} no longer received messages from the others: {error}")

    def _publish_or_remove(self) -> Report:
        """Publish the checkpoint once all ranks have written their files, on rank 0; if one could not, remove it."""
        store = self._ranks.store
        names = [f"{self._topic}/{rank}" for rank in range(self._ranks.num_ranks)]
        verdict = combined([Report.model_validate_json(awaited(store, name, self._timeout_s)) for name in names])
        for name in names:
            store.delete_key(name)
        if not verdict.problem:
            verdict = combined([reported(lambda: self._publish(verdict.files))])
        if verdict.problem:
            with contextlib.suppress(OSError):
                remove_tree(self._part.checkpoint.partial.root)
        return verdict

    def _publish(self, files: dict[str, FileChecksum]) -> dict[str, FileChecksum]:
        manifest = self._publication.manifest(self._part.progress, files)
        self._publication.publish(self._part.checkpoint, manifest)
        return files


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
