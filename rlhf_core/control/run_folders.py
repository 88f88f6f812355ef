"""Folders of run directories: the one of a site, which may have several paths, and others without a daemon."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rlhf_core.files.lookups import is_there
from rlhf_core.history.queries.controllers import LeaseHolder, lease_holder
from rlhf_core.history.queries.open_runs import OpenRun
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RUN_ENDS

ADVICE = (
    "set RLHF_RUNS to that folder, or move its run directories to the folder that is set now; if it belongs to another "
    "site, start the daemon there"
)
"""Advice on a folder without a daemon."""


def is_same(folder: Path, other: Path) -> bool:
    """True if two paths lead to the same folder: one may be a link, or another mount point of its file system."""
    if folder == other:
        return True
    with suppress(OSError):  # missing, or its file system does not respond
        return folder.samefile(other)
    return False


def lease_name(runs: Path) -> str:
    """Name of the lease that one daemon holds. It includes the folder of run directories, since a history may serve
    several, and it includes it without links, so that it is the same for every path."""
    return earlier_lease_name(Path(os.path.realpath(runs)))


def earlier_lease_name(runs: Path) -> str:
    """Name of the lease that a daemon of version 0.1 holds."""
    return f"site:keeper:{runs}"


def daemon_of(runs: Path, store: HistoryStore) -> LeaseHolder | None:
    """Find the daemon that looks after a folder, also one of version 0.1; None if there is none.

    Raises:
        HistoryError: the history does not answer.
    """
    return lease_holder(store, lease_name(runs)) or lease_holder(store, earlier_lease_name(runs))


def moved_here(runs: Path, recorded: Mapping[str, str]) -> list[str]:
    """Runs whose directory is in a folder and no longer at its recorded path, because all were moved, for instance.

    Args:
        recorded: path of the directory by run id, according to the history.
    """
    others = {folder for folder in {Path(path).parent for path in recorded.values()} if not is_same(folder, runs)}
    return [run_id for run_id, path in recorded.items() if Path(path).parent in others and _has_moved(path, runs)]


def _has_moved(recorded: str, runs: Path) -> bool:
    before = RunDir(Path(recorded))
    with suppress(OSError):  # it cannot be told which of them is the right one
        return is_there(RunDir(runs / before.run_id).spec) and not is_there(before.spec)
    return False


def without_daemon(runs: Path, found: Iterable[OpenRun], store: HistoryStore) -> list[Path]:
    """Other folders that have open runs and no daemon.

    Raises:
        HistoryError: the history does not answer.
    """
    recorded = {one.run_id: one.run_dir for one in found if one.state not in RUN_ENDS}
    for run_id in moved_here(runs, recorded):
        del recorded[run_id]  # the next ingestion corrects its path
    folders = sorted({Path(path).parent for path in recorded.values()})
    return [folder for folder in folders if not is_same(folder, runs) and daemon_of(folder, store) is None]
