"""Tracker files of training programs: each names the checkpoint to resume from, in the folder of the checkpoints.

DeepSpeed, and OpenRLHF with it, writes the name of the checkpoint's folder into ``latest``; Megatron and verl write the
step into ``latest_checkpointed_iteration.txt``; others have a symbolic link to the checkpoint. A program that finds a
name there but no such checkpoint ends with an error.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlhf_core.files.reading import UnfitFile, read_document
from rlhf_core.files.whole import write_text

OF_NAMES = "latest"
OF_STEPS = "latest_checkpointed_iteration.txt"
_MAX_BYTES = 4096

Place = tuple[int, Path]
"""Step and path of a checkpoint."""


def correct_trackers(output_dir: Path, leaving: Sequence[Place], resumed: Place | None) -> None:
    """Let trackers name the checkpoint that the program resumes from; remove those that name one that leaves.

    Call it before the checkpoints are moved: if this process is killed in between, the next one repeats both.

    Args:
        leaving: Checkpoints to be moved out of the output folder.
        resumed: The checkpoint that the program is to find by itself; None if it is not to find one.

    Raises:
        OSError: a tracker cannot be read or written.
    """
    every = [*leaving, *([resumed] if resumed is not None else [])]
    for folder in {folder for _, path in every for folder in _folders_of(path, output_dir)}:
        names = {_name_in(folder, path) for _, path in leaving if folder in path.parents}
        is_here = resumed is not None and folder in resumed[1].parents
        name, step = (_name_in(folder, resumed[1]), str(resumed[0])) if resumed is not None and is_here else ("", "")
        _correct(folder / OF_NAMES, names, name)
        _correct(folder / OF_STEPS, {str(number) for number, _ in leaving}, step)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for link in [path for path in folder.iterdir() if path.is_symlink()]:
                _correct_link(link, names, name)


def remove_emptied(output_dir: Path, left: Iterable[Place]) -> None:
    """Remove folders that are empty since their checkpoints have left: OpenRLHF insists on resuming if its folder
    exists."""
    for folder in sorted({folder for _, path in left for folder in _folders_of(path, output_dir)}, reverse=True):
        if folder != output_dir and not any(folder.iterdir()):
            folder.rmdir()


def _folders_of(path: Path, output_dir: Path) -> Iterator[Path]:
    """Folders that a checkpoint is in, up to the output folder."""
    for folder in path.parents:
        yield folder
        if folder == output_dir:
            return


def _name_in(folder: Path, path: Path) -> str:
    return path.relative_to(folder).parts[0]


def _correct(tracker: Path, leaving: set[str], resumed: str) -> None:
    try:
        named = read_document(tracker, _MAX_BYTES, follow_link=True).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, UnfitFile):
        return  # a folder of this name, for instance, is no tracker
    # A file of another form belongs to something else.
    if resumed and named != resumed and _form(named) == _form(resumed):
        write_text(tracker, resumed)
    elif not resumed and named in leaving:
        tracker.unlink()


def _correct_link(link: Path, leaving: set[str], resumed: str) -> None:
    target = link.readlink()
    if target.name not in leaving or target.parent not in (Path(), link.parent):
        return
    link.unlink()
    if resumed:
        link.symlink_to(target.with_name(resumed))


def _form(name: str) -> str:
    return re.sub(r"\d+", "0", name)
