"""Tail the files that an external trainer writes, and merge their figures by step."""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhf_core.files.appended import FilePosition, read_on
from rlhf_core.files.reading import FileLine
from rlhf_core.worker.command.observation import StepFigures, Watched

VERSION_FOLDER = re.compile(r"v\d+-.+")
"""Folder that ms-swift creates in the output folder for every start: ``v0-20261122-170333`` (``--add_version``)."""

_AFTER_NUMBER = ",;:.|)]}"
_IN_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(?![\d,])")


def output_folders(output_dir: Path) -> list[Path]:
    """The output folder and its version folders, if they exist.

    Raises:
        OSError: the folder exists but cannot be read.
    """
    try:
        with os.scandir(output_dir) as entries:
            versions = [
                entry.name
                for entry in entries
                if VERSION_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [output_dir, *(output_dir / name for name in sorted(versions))]


def is_of_this_start(path: Path, watched: Watched) -> bool:
    """True if a file was changed after the program was started.

    Raises:
        OSError: the file does not exist.
    """
    return path.stat().st_mtime >= watched.files_since_s


class FollowedLines:
    """Lines of one growing file. An incomplete last line is held back; a replaced file is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = FilePosition()
        self._changed_ns = 0

    def skip_to_end(self) -> None:
        """Treat all complete lines present now as read.

        Raises:
            OSError: the file cannot be read.
        """
        while self.new_lines():
            pass

    def new_lines(self) -> list[FileLine]:
        """Complete lines added since the last call, at most about 16 MiB; lines that are too long have no text.

        Raises:
            OSError: the file exists but cannot be read.
        """
        try:
            found = self.path.stat(follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # The file was rewritten with the same first line, as after a restart with the same seed: only its timestamp
        # distinguishes that from an older version of the file, which another machine may see for a while.
        if stat.S_ISREG(found.st_mode) and found.st_size < self._place.offset and found.st_mtime_ns > self._changed_ns:
            self._place = FilePosition()
        self._changed_ns = max(self._changed_ns, found.st_mtime_ns)
        lines, self._place, _ = read_on(self.path, self._place)
        return lines


def numbers_of(values: Mapping[str, object], leave_out: Iterable[str] = ()) -> dict[str, float]:
    """The values that are numbers, including infinities, NaN and numbers written as text, such as ``1,024.5;``."""
    left_out = set(leave_out)
    found = {}
    for name, value in values.items():
        number = None if name in left_out else _number(value)
        if number is not None:
            found[name] = number
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        value = value.strip().rstrip(_AFTER_NUMBER)
        value = value.replace(",", "") if _IN_THOUSANDS.match(value) else value
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def by_step(figures: Iterable[StepFigures]) -> list[StepFigures]:
    """Merge figures of the same step, in order of first appearance; later values win."""
    merged: dict[int, dict[str, float]] = {}
    for one in figures:
        merged.setdefault(one.step, {}).update(one.values)
    return [StepFigures(step, values) for step, values in merged.items()]
