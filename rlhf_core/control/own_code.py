"""The user's code in a resumed run: the run keeps using its copy, unless the user asks for the current files."""

import shutil
from functools import partial

from rlhf_core.control.controller import Controller
from rlhf_core.control.views.timeline import trials_of
from rlhf_core.errors import BadInput, RunDirError
from rlhf_core.launch.code_changes import add_code_copy, changed_code, code_folder, copy_code_again
from rlhf_core.launch.journal import read_record
from rlhf_core.launch.prepare import git_revision
from rlhf_core.machine.accounts import account
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.journal import CodeTaken
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
                add_code_copy(trial, partial(shutil.copytree, run_dir.code))
    except OSError as error:
        raise RunDirError(f"cannot copy the code to {run_dir.root}: {error.strerror}") from None
    revision = git_revision(code_folder(stored))
    controller.journal.append(
        CodeTaken(copy_number=copy, revision=revision, changed=tuple(changed[:_SHOWN]), by=account())
    )
    return f"copied the code again; changed: {listed(changed, _SHOWN)}"
