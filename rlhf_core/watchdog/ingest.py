"""Ingestion of a run directory's files into the history: exactly once, even if killed at any point.

Each round reads the stored offsets, reads the files from there, and passes both to the store, which writes rows and new
offsets in one transaction. A kill before the transaction changes nothing; after it, the offsets are current. If two
ingesters collide (a controller and ``rlhf show``), the store rejects the slower one's whole batch, and it starts again.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import RlhfError
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir, run_dirs
from rlhf_core.watchdog.ingest_reader import IngestReader, SyncReport

GONE_MARK = "directory-gone"
"""Mark stored for a run that was closed because its directory was gone (``gone_run.py``)."""


@dataclass(frozen=True)
class RebuildReport:
    """Result of a rebuild."""

    runs: dict[str, SyncReport]
    """Result by run id."""
    failed: dict[str, str]
    """Reason for the failure by run id."""
    kept: tuple[str, ...]
    """Runs without a directory, whose rows were left unchanged."""


def sync(run_dir: RunDir, store: HistoryStore, first_attempt: int = 1) -> SyncReport:
    """Update the history from a run directory.

    A directory without a journal is not a run yet and is skipped.

    Args:
        first_attempt: the first attempt to read, if the history has the run; earlier ones have been read to their end.

    Raises:
        RunDirError: it has no readable ``spec.json``.
        JournalDamaged: a line of its journal cannot be read. The lines before it and all other files were ingested.
        IllegalMove: its journal has a change of state that the table of moves does not allow.
        DatabaseUnavailable: nothing, or not everything, was written; the next call continues from there.
        OSError: the file system of the run directory does not answer; the next call continues as well.
    """
    report = SyncReport()
    while True:
        state = store.ingest_state(run_dir.run_id)
        if state.stamp and not run_dir.spec.is_file():
            return report  # gone or unreachable: files that agents write into re-created folders do not count
        if GONE_MARK in state.offsets:
            store.forget(run_dir.run_id)  # it is back: drop the rows written in its absence
            continue
        if not state.offsets:  # new, or forgotten since
            first_attempt = 1
        reader = IngestReader(run_dir, state, first_attempt)
        batch = reader.read()
        if not batch.is_empty():
            if not store.apply(run_dir.run_id, batch):
                continue  # another ingester was faster: read again from its offsets
            report.add(reader.report)
        if batch.is_empty() or not reader.left_some:
            if reader.damage is not None:
                raise reader.damage
            return report


def files_digest(run_dir: RunDir) -> int | None:
    """Digest of the state of the files that :func:`sync` reads; None if there is no directory.

    A reader of many runs compares it with the digest taken before its last read: if they are equal, there is nothing
    new, and no database query is needed.
    """
    marks = [f"{path}:{size}:{time_ns}" for path, size, time_ns in _file_marks(run_dir.root, 0)]
    if not marks:
        return None
    text = os.fsencode("\n".join(sorted(marks)))  # file names may be any bytes, UTF-8 or not
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


_UNREAD = frozenset(
    {"code", "commands", "initial_model", "logs", "model", "outcomes", "probe", "scheduler", "trainer_state"}
)
"""Folders of a run directory without files for the history."""


def _file_marks(folder: str | Path, depth: int) -> Iterator[tuple[str, int, int]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name in _UNREAD:
                    continue
                if entry.is_dir(follow_symlinks=depth == 0):
                    yield from _file_marks(entry.path, depth + 1)
                else:
                    # Of a link itself: one to nothing would end the folder's list here.
                    status = entry.stat(follow_symlinks=False)
                    yield entry.path, status.st_size, status.st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return  # removed in the meantime: the next digest differs


def rebuild(runs: Path, store: HistoryStore, on_run: Callable[[str], None] = lambda run_id: None) -> RebuildReport:
    """Rebuild the history of every run directory from its files alone. Runs without a directory keep their rows.

    Args:
        runs: folder of the run directories.
        on_run: called with each run before it is read.
    """
    done: dict[str, SyncReport] = {}
    failed: dict[str, str] = {}
    found = run_dirs(runs)
    for run_dir in found:
        on_run(run_dir.run_id)
        try:
            run_dir.read_spec()  # first: an unreadable directory must not cost the existing rows
            store.forget(run_dir.run_id)
            done[run_dir.run_id] = sync(run_dir, store)
        except (RlhfError, OSError) as error:
            failed[run_dir.run_id] = str(error)
    present = {run_dir.run_id for run_dir in found}
    return RebuildReport(done, failed, tuple(sorted(set(store.run_ids()) - present)))
