"""Checkpoints of an external trainer, found by name and judged by the files they contain.

A checkpoint is complete once every pattern of ``trainer.checkpoint_complete`` matches a file in it and nothing in it
has changed for some seconds: with many ranks, the last file that one rank writes need not be the last of all. A pattern
that begins with ``../`` is a tracker file beside it, which must name this checkpoint or a later one.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rlhf_core.files.reading import read_document
from rlhf_core.schemas.command_trainer import STEP_FIELD, CommandTrainer
from rlhf_core.worker.command.checkpoint_trackers import OF_NAMES
from rlhf_core.worker.command.following import output_folders
from rlhf_core.worker.command.observation import is_step

QUIET_S = 2.0
"""Time a checkpoint must remain unchanged before it counts as complete, in seconds."""
QUIET_OF_NODES_S = 10.0
"""The same for a job of several nodes: NFS shows a file that grows on another node unchanged for 3 s and more
(``acregmin``)."""
REREAD_S = 30.0
"""Time between readings of a complete checkpoint that is not the newest, in seconds: every rank reads them, all from
the same file server."""

CRITIC = "_critic"
_ACTOR = "_actor"
_BESIDE = "../"
_TRACKER_OF_DEEPSPEED = _BESIDE + OF_NAMES


@dataclass(frozen=True)
class CheckpointContent:
    """The files of a checkpoint at one moment."""

    num_files: int
    num_bytes: int
    changed_ns: int
    """Last modification of any file or folder in it, in nanoseconds since the epoch, by the file system's clock."""

    def with_other(self, other: "CheckpointContent") -> "CheckpointContent":
        """Content of both."""
        return CheckpointContent(
            self.num_files + other.num_files,
            self.num_bytes + other.num_bytes,
            max(self.changed_ns, other.changed_ns),
        )


@dataclass(frozen=True)
class FoundCheckpoint:
    """A path that matches the pattern of checkpoints."""

    step: int
    """Number in its name."""
    path: Path
    complete: bool
    """True if it has all its files and none is still being written."""
    lacks: tuple[str, ...] = ()
    """Patterns of ``trainer.checkpoint_complete`` that match no file."""
    content: CheckpointContent = CheckpointContent(0, 0, 0)


@dataclass(frozen=True)
class _LastReading:
    """Result of one reading of a checkpoint; times are in seconds of the monotonic clock."""

    content: CheckpointContent
    lacks: tuple[str, ...]
    since_s: float
    """First reading with this content."""
    read_s: float

    def is_complete(self, now_s: float, quiet_s: float) -> bool:
        return not self.lacks and now_s - self.since_s >= quiet_s

    def is_settled(self, now_s: float, quiet_s: float) -> bool:
        return self.is_complete(self.read_s, quiet_s) and now_s - self.read_s < REREAD_S


class WatchedCheckpoints:
    """The checkpoints of a running program. Two readings by this machine's clock show that one is unchanged: a file
    server's clock may be ahead or behind."""

    def __init__(self, trainer: CommandTrainer, output_dir: Path, quiet_s: float = QUIET_S) -> None:
        self._trainer = trainer
        self._output_dir = output_dir
        self._quiet_s = quiet_s
        self._read: dict[Path, _LastReading] = {}

    def find(self, now_s: float, *, has_ended: bool = False) -> list[FoundCheckpoint]:
        """List the checkpoints again.

        Args:
            now_s: Monotonic time in seconds.
            has_ended: The program has exited by itself, so what it has written is whole.

        Returns:
            All checkpoints in the output folder and in ms-swift's version folders, by step; among those with the same
            step the most recently changed comes last.

        Raises:
            OSError: a folder cannot be read.
        """
        found, readings = [], {}
        folders = list(checkpoint_folders(self._trainer.checkpoint_name, self._output_dir))
        newest = max((step for step, _ in folders), default=0)
        for step, path in folders:
            last = self._read.get(path)
            is_settled = last is not None and step < newest and last.is_settled(now_s, self._quiet_s) and not has_ended
            reading = last if last is not None and is_settled else self._reading(step, path, now_s)
            readings[path] = reading
            is_complete = reading.is_complete(now_s, self._quiet_s) or (has_ended and not reading.lacks)
            found.append(FoundCheckpoint(step, path, is_complete, reading.lacks, reading.content))
        self._read = readings
        return sorted(found, key=lambda one: (one.step, one.content.changed_ns, one.path))

    def _reading(self, step: int, path: Path, now_s: float) -> _LastReading:
        complete, critic = self._trainer.checkpoint_complete, critic_of(path)
        if critic is not None and self._trainer.framework == "openrlhf":  # other programs may have such a folder too
            complete = tuple(dict.fromkeys([*complete, _TRACKER_OF_DEEPSPEED]))
        content, lacks = _inspect(complete, step, path)
        if critic is not None and critic.parent.is_dir():
            of_critic, missing = _inspect((_TRACKER_OF_DEEPSPEED,), step, critic)
            content = content.with_other(of_critic)
            lacks += () if of_critic.num_files and not missing else (f"{CRITIC}/{critic.name}",)
        before = self._read.get(path)
        since_s = before.since_s if before and before.content == content else now_s
        return _LastReading(content, lacks, since_s, now_s)


# ---------------------------------------------------------------------------------------------------------------------


def critic_of(path: Path) -> Path | None:
    """Path of the critic that OpenRLHF saves and loads together with an actor; None for any other checkpoint."""
    return path.parent.with_name(CRITIC) / path.name if path.parent.name == _ACTOR else None


def _is_named(tracker: Path, step: int) -> bool:
    """True once a tracker file, which programs write last, names the checkpoint of this step or a later one."""
    try:
        named = read_document(tracker, follow_link=True).decode("utf-8", errors="replace")
    except OSError:
        return False
    number = re.search(r"(\d+)\s*\Z", named, re.ASCII)
    return number is not None and int(number[1]) >= step


def checkpoint_folders(checkpoint_name: str, output_dir: Path) -> Iterator[tuple[int, Path]]:
    """Step and folder of every checkpoint with such a name, complete or not.

    Raises:
        OSError: a folder cannot be read.
    """
    parts = [name_pattern(part) for part in Path(checkpoint_name).parts]
    for folder in output_folders(output_dir):
        yield from _matching(folder, parts, None)


def name_pattern(part: str) -> re.Pattern[str]:
    """Pattern of the names that one part of ``trainer.checkpoint_name`` stands for."""
    text = re.escape(part).replace(re.escape("*"), ".*")
    # If a name contains the step twice, both numbers must be equal.
    text = text.replace(re.escape(STEP_FIELD), r"(?P<step>\d+)", 1).replace(re.escape(STEP_FIELD), "(?P=step)")
    return re.compile(text)


def _matching(folder: Path, parts: list[re.Pattern[str]], step: int | None) -> Iterator[tuple[int, Path]]:
    if not parts:
        if step is not None:
            yield step, folder
        return
    try:
        with os.scandir(folder) as entries:
            # A checkpoint may be a single file; the path components above it are folders.
            may_be_file = len(parts) == 1
            names = sorted(
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) or (may_be_file and entry.is_file(follow_symlinks=False))
            )
    except (FileNotFoundError, NotADirectoryError):
        return  # the program has removed it in the meantime
    for name in names:
        found = parts[0].fullmatch(name)
        if found is None:
            continue
        number = found.groupdict().get("step")
        if number is not None and not is_step(int(number)):
            continue
        if number is not None and step is not None and int(number) != step:
            continue
        yield from _matching(folder / name, parts[1:], step if number is None else int(number))


def _inspect(complete: Sequence[str], step: int, path: Path) -> tuple[CheckpointContent, tuple[str, ...]]:
    """Content of a checkpoint, and the patterns that match no file in it, or no tracker beside it that names it."""
    expected = () if path.is_file() else complete
    trackers = [pattern for pattern in expected if pattern.startswith(_BESIDE)]
    unnamed = [tracker for tracker in trackers if not _is_named(path / tracker, step)]
    patterns = {
        pattern: Path(pattern.replace(STEP_FIELD, str(step))).parts for pattern in expected if pattern not in trackers
    }
    num_files = num_bytes = changed_ns = 0
    for name, found in _files(path):
        changed_ns = max(changed_ns, found.st_mtime_ns)
        if name is None:
            continue
        num_files += 1
        num_bytes += found.st_size
        parts = Path(name).parts
        patterns = {pattern: wanted for pattern, wanted in patterns.items() if not _fits(parts, wanted)}
    return CheckpointContent(num_files, num_bytes, changed_ns), (*patterns, *unnamed)


def _fits(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _files(path: Path) -> Iterator[tuple[str | None, os.stat_result]]:
    """All files below a folder with their relative paths; folders are yielded with None as path."""
    if path.is_file():
        yield path.name, path.stat()
        return
    for folder, _, names in os.walk(path):
        for name in ["", *names]:
            try:
                found = (Path(folder) / name).stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # renamed or removed in the meantime
            yield (os.path.relpath(Path(folder) / name, path) if name else None), found
