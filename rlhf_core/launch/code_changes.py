"""The user's code since it was copied into a run directory: its changes, and a newer copy."""

import filecmp
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_core.errors import BadInput
from rlhf_core.files.whole import remove_tree
from rlhf_core.launch.prepare import code_sources, git_revision, keep_code, not_code
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.stored_spec import StoredSpec


def code_folder(stored: StoredSpec) -> Path:
    """Folder in which the user's modules are looked for: the one of the request, or the current one if not recorded."""
    return Path(stored.code_folder) if stored.code_folder else Path.cwd()


def changed_code(run_dir: RunDir, stored: StoredSpec) -> list[str]:
    """List the files of the user's code that differ from the copy that the run uses.

    A module that is missing as a whole is left out: its folder may have been moved.

    Raises:
        OSError: a file cannot be read.
    """
    snapshot = run_dir.code / "snapshot"
    sources = code_sources(stored.spec, code_folder(stored))
    return [change for source in sources if source.exists() for change in _changes(source, snapshot / source.name)]


def copy_code_again(run_dir: RunDir, stored: StoredSpec) -> int:
    """Copy the current code for the attempts from here on, and return the number of the copy. Earlier ones are kept.

    Raises:
        BadInput: part of the code is missing.
        OSError: it cannot be copied.
    """
    folder = code_folder(stored)
    present = {source.name for source in code_sources(stored.spec, folder) if source.exists()}
    missing = sorted(path.name for path in (run_dir.code / "snapshot").iterdir() if path.name not in present)
    if missing:
        raise BadInput(
            f"{', '.join(missing)} of this run's code is no longer in {folder}. Put it back, or resume without --code"
        )
    return add_code_copy(run_dir, lambda copy: keep_code(copy, stored.spec, folder, git_revision(folder)))


def add_code_copy(run_dir: RunDir, fill: Callable[[Path], object]) -> int:
    """Give a run another copy of code, and return its number. It appears as a whole: a controller may be killed at any
    time.

    Args:
        fill: creates the given folder.
    """
    number = run_dir.newest_code_copy() + 1
    unfinished = run_dir.root / ".code.new"
    remove_tree(unfinished)
    fill(unfinished)
    unfinished.rename(run_dir.code_copy(number))
    return number


def _changes(source: Path, copy: Path) -> Iterator[str]:
    current, copied = dict(_files(source)), dict(_files(copy))
    for name in sorted({*current, *copied}):
        if name not in copied:
            yield f"{name} (new)"
        elif name not in current:
            yield f"{name} (removed)"
        elif not filecmp.cmp(current[name], copied[name]):
            yield name


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Files of a module or a folder that are copied as code, by name relative to the parent of that folder."""
    if root.is_file():
        yield root.name, root
    for folder, folders, names in os.walk(root, followlinks=True):  # as in the copy
        left_out = not_code(folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in left_out]
        for name in names:
            if name not in left_out:
                path = Path(folder, name)
                yield str(path.relative_to(root.parent)), path
