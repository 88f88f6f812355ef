"""The user's code in a resumed run: the run keeps using its copy, unless the user asks for the current files."""

import filecmp
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rlhf_core.control.controller import Controller
from rlhf_core.control.views.timeline import trials_of
from rlhf_core.errors import BadInput, RunDirError
from rlhf_core.files.whole import remove_tree
from rlhf_core.launch.journal import read_record
from rlhf_core.launch.prepare import code_folder, code_sources, git_revision, keep_code, not_code
from rlhf_core.machine.accounts import account
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.journal import CodeTaken
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.text.formatting import listed

_SHOWN = 10
"""Number of changed files that are listed."""


def advise_about_code(controller: Controller) -> str:
    """List the files of the user's code that have changed since the run copied them, and how to use them; empty if none
    has, or if they cannot be read."""
    try:
        changed = changed_code(controller.run_dir, controller.stored)
    except OSError:
        return ""
    if not changed:
        return ""
    run_dir = controller.run_dir
    return (
        f"{listed(changed, _SHOWN)} changed since this run copied its code to {run_dir.code}, and the run uses that "
        f"copy. To use the present files, end the run and resume it with `rlhf resume {run_dir.run_id} --code`"
    )


def take_code(controller: Controller) -> str:
    """Copy the user's current code for the attempts from here on. Returns a sentence about the changes.

    Raises:
        BadInput: the run has not ended, so a job may be using its copy; or part of the code is gone.
        RunDirError: the code cannot be copied.
    """
    run_dir, stored = controller.run_dir, controller.stored
    if not controller.journal.record.ended:
        raise BadInput(
            f"run {run_dir.run_id} has not ended: its job may be using its copy of the code. "
            f"`rlhf cancel {run_dir.run_id}` ends it; then `rlhf resume {run_dir.run_id} --code` continues it with the "
            "present code, from the last complete checkpoint"
        )
    try:
        changed = changed_code(run_dir, stored)
        if not changed:
            return f"the code in {code_folder(stored)} is the one that the run has: nothing changed"
        copy = copy_code_again(run_dir, stored)
        for trial in trials_of(run_dir):
            if read_record(trial).state is not RunState.COMPLETED:  # it has to be repeated
                _add_copy(trial, partial(shutil.copytree, run_dir.code))
    except OSError as error:
        raise RunDirError(f"cannot copy the code to {run_dir.root}: {error.strerror}") from None
    revision = git_revision(code_folder(stored))
    controller.journal.append(
        CodeTaken(copy_number=copy, revision=revision, changed=tuple(changed[:_SHOWN]), by=account())
    )
    return f"copied the code again; changed: {listed(changed, _SHOWN)}"


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
    return _add_copy(run_dir, lambda copy: keep_code(copy, stored.spec, folder, git_revision(folder)))


def _add_copy(run_dir: RunDir, fill: Callable[[Path], object]) -> int:
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
