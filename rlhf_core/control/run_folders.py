"""Folders of run directories: the one of a site, which may have several paths, and others without a daemon."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

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

TIMEOUT_S = 3.0
"""Time in which the file system of another folder has to respond."""

Found = TypeVar("Found")

_unanswered: dict[Path, threading.Thread] = {}
"""By folder, the newest lookup that was not answered in time."""


def is_same(folder: Path, other: Path) -> bool:
    """True if a folder is the same as another by its path or on disk: one path may be a link, or another mount point
    of its file system. A folder that is missing or does not respond in time is not the same."""
    return folder == other or bool(_looked_up(folder, partial(folder.samefile, other)))


def _looked_up(folder: Path, lookup: Callable[[], Found]) -> Found | None:
    """Result of a lookup in a folder that may be of another site; None if its file system fails or does not respond.

    On a hard NFS mount, a lookup waits until the server is back. The folder is left alone until then.
    """
    waiting = _unanswered.get(folder)
    if waiting is not None and waiting.is_alive():
        return None
    found: list[Found] = []

    def run() -> None:
        with suppress(OSError):
            found.append(lookup())

    thread = threading.Thread(target=run, name=f"lookup in {folder}", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        _unanswered[folder] = thread
    return found[0] if found else None


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
    return _holder(store, lease_name(runs), earlier_lease_name(runs))


def _holder(store: HistoryStore, *names: str) -> LeaseHolder | None:
    return next((holder for name in names if (holder := lease_holder(store, name)) is not None), None)


def moved_here(runs: Path, recorded: Mapping[str, str]) -> list[str]:
    """Runs whose directory is in a folder and no longer at its recorded path, because all were moved, for instance.

    Args:
        recorded: path of the directory by run id, according to the history.
    """
    return [run_id for run_id, path in _elsewhere(runs, recorded).items() if _has_moved(path, runs)]


def _elsewhere(runs: Path, recorded: Mapping[str, str]) -> dict[str, str]:
    """Those of the recorded paths that are in another folder."""
    others = {folder for folder in {Path(path).parent for path in recorded.values()} if not is_same(folder, runs)}
    return {run_id: path for run_id, path in recorded.items() if Path(path).parent in others}


def _has_moved(recorded: str, runs: Path) -> bool:
    before = RunDir(Path(recorded))
    with suppress(OSError):  # it cannot be told which of them is the right one
        is_here = is_there(RunDir(runs / before.run_id).spec)
        return is_here and _looked_up(before.root.parent, partial(is_there, before.spec)) is False
    return False


def without_daemon(runs: Path, found: Iterable[OpenRun], store: HistoryStore) -> list[Path]:
    """Other folders that have open runs without a controller, and no daemon as far as this machine can tell: there, a
    link may lead elsewhere. Folders that do not respond are left out.

    Raises:
        HistoryError: the history does not answer.
    """
    recorded = {one.run_id: one.run_dir for one in found if one.state not in RUN_ENDS and not one.is_driven}
    # The next ingestion corrects the paths of those that were moved.
    lost = [path for path in _elsewhere(runs, recorded).values() if not _has_moved(path, runs)]
    names = {
        folder: _looked_up(folder, partial(lease_name, folder)) for folder in sorted({Path(one).parent for one in lost})
    }
    return [one for one, name in names.items() if name and _holder(store, name, earlier_lease_name(one)) is None]
