"""Progress shown by scalars in TensorBoard event files.

Detects a job that no longer makes steps. Cannot tell which rank is to blame, since usually the first rank writes for
all, and misses anything shorter than the time between two logged steps. torch's writer writes each event to the file at
once unless TensorFlow is installed too: then up to 120 s later (``flush_secs``). transformers flushes at every log.

Records are read here by offset rather than with TensorBoard's loader, which keeps the file open, so that a network file
system may serve stale content, reads images of any size to verify them in Python, and does not notice a replaced file.
The content of a record is TensorBoard's own (``event.proto``; frames: TFRecord, ``tensorflow/core/lib/io``).
"""

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlhf_core.files.reading import open_regular
from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.following import by_step
from rlhf_core.worker.command.found_checkpoints import name_pattern
from rlhf_core.worker.command.observation import Reading, StepFigures, Watched, is_step

POLL_S = 1.0
"""Minimum time between readings, in seconds."""
SEARCH_S = 5.0
"""Time between searches for new files, in seconds."""
MAX_FOLDERS = 2_000
"""Maximum number of folders searched, not counting those of checkpoints."""
MAX_RECORD_BYTES = 256 << 10
"""Largest record read; a scalar takes some 60 bytes, larger records are images, texts and histograms."""
MAX_BYTES_PER_POLL = 1 << 20
"""Maximum read per poll, to keep it short; the rest follows at the next one."""
_NAME = re.compile(r"events\.out\.tfevents\..+")
_NOT_BY_STEP = re.compile(r".+ vs samples|Train/Samples/.+|ray/.+")
"""Scalars of Megatron and DeepSpeed that are written at a number of samples instead of a step, and those of NeMo-RL's
monitor of GPUs, written at the seconds since its start."""
_HEADER, _FOOTER = 12, 4
_CHECKED_LENGTH = struct.Struct("<QI")
_DT_FLOAT, _DT_DOUBLE = 1, 2
"""Data types, from ``types.proto``."""


class TensorBoard:
    """Scalars written since the program started."""

    kind = ProgressSource.TENSORBOARD

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._files: dict[Path, _EventFile] = {}
        self._step: int | None = None
        self._next_poll_s = self._next_search_s = float("-inf")

    def poll(self, now_s: float) -> Reading:
        """Read once a second; in between, return an empty reading."""
        if now_s < self._next_poll_s:
            return Reading(step=self._step)
        self._next_poll_s = now_s + POLL_S
        problem, found = "", list[StepFigures | None]()
        try:
            if now_s >= self._next_search_s:
                self._next_search_s = now_s + SEARCH_S
                problem = self._search()
            for file in self._files.values():
                found += file.new_scalars(self._watched)
                problem = problem or file.problem
        except ImportError as error:
            problem = (
                f"TensorBoard's event files cannot be read: {error}; install tensorboard beside rlhf-flows (included "
                "in rlhf-flows[training])"
            )
        except OSError as error:
            problem = f"TensorBoard's event files cannot be read: {error}; expected files that the job can read"
        figures = [one for one in found if one is not None]
        if figures:
            # Epochs and the like are lower than the step.
            self._step = max(one.step for one in figures)
        return Reading(bool(found), self._step, metrics=by_step(figures), problem=problem)

    def _search(self) -> str:
        """Find new files; returns a sentence if there were more folders than could be searched."""
        # Folders of checkpoints hold many files and no events.
        checkpoint = name_pattern(Path(self._watched.trainer.checkpoint_name).name)
        for number, (folder, folders, names) in enumerate(os.walk(self._watched.output_dir)):
            folders[:] = sorted(name for name in folders if not checkpoint.fullmatch(name))
            if number >= MAX_FOLDERS:
                return (
                    f"found more than {MAX_FOLDERS} folders in {self._watched.output_dir}, expected fewer to search "
                    "for TensorBoard's event files; those in the remaining folders are ignored"
                )
            for name in names:
                path = Path(folder) / name
                if _NAME.fullmatch(name) and path not in self._files:
                    self._files[path] = _EventFile(path)
        return ""


# ---------------------------------------------------------------------------------------------------------------------


class _Record(NamedTuple):
    end: int
    """Offset just past the record."""
    content: bytes
    """Empty for a record too large to be a scalar."""


class _EventFile:
    """One event file, read from after its last complete record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._mark = (0, 0)
        self.problem = ""
        """Sentence on a damaged record: nothing after it can be read."""

    def new_scalars(self, watched: Watched) -> list[StepFigures | None]:
        """Scalars found since the last call that were written after the start; None in place of those of no step.

        Raises:
            OSError: the file exists but cannot be read.
            ImportError: tensorboard is not installed.
        """
        try:
            found = self._path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return []
        mark = (found.st_mtime_ns, found.st_size)
        # Allow a minute before the start for another file server: each record carries the time at which it was written.
        if mark == self._mark or found.st_mtime < watched.files_since_s - 60:
            return []
        if found.st_size < self._offset and mark[0] > self._mark[0]:
            self._offset, self.problem = 0, ""
        end = self._offset + MAX_BYTES_PER_POLL
        figures: list[StepFigures | None] = []
        with open_regular(self._path) as file:
            for record in self._records(file, found.st_size):
                self._offset = record.end
                figures += _scalars(record.content, watched.started_at_s)
                if self._offset > end:
                    return figures
        self._mark = mark
        return figures

    def _records(self, file: BinaryIO, size: int) -> Iterator[_Record]:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        offset = self._offset
        while not self.problem and offset + _HEADER <= size:
            file.seek(offset)
            header = file.read(_HEADER)
            if len(header) < _HEADER:
                return
            length, check = _CHECKED_LENGTH.unpack(header)
            if masked_crc32c(header[:8]) != check:
                self.problem = (
                    f"{self._path} is damaged at byte {offset}: found a record with a length that does not match its "
                    "checksum; the rest of this file is ignored"
                )
                return
            end = offset + _HEADER + length + _FOOTER
            if end > size:
                return  # it is still being written
            yield _Record(end, file.read(length) if length <= MAX_RECORD_BYTES else b"")
            offset = end


def _scalars(content: bytes, started_at_s: float) -> Iterator[StepFigures | None]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    event: Any = Event()
    try:
        event.ParseFromString(content)
    except DecodeError:
        return
    if event.wall_time < started_at_s:
        return
    values = {value.tag: number for value in event.summary.value if (number := _number(value)) is not None}
    of_step = {tag: number for tag, number in values.items() if _NOT_BY_STEP.fullmatch(tag) is None}
    if values:
        yield StepFigures(int(event.step), of_step) if of_step and is_step(event.step) else None


def _number(value: Any) -> float | None:
    """The value of a scalar in its old form (torch) or as a tensor (TensorFlow 2, JAX); None for anything else."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or any(one.size != 1 for one in value.tensor.tensor_shape.dim):
        return None
    given = {_DT_FLOAT: ("<f", value.tensor.float_val), _DT_DOUBLE: ("<d", value.tensor.double_val)}
    form, numbers = given.get(value.tensor.dtype, ("", ()))
    if len(numbers) == 1:
        return float(numbers[0])
    raw = value.tensor.tensor_content
    return float(struct.unpack(form, raw)[0]) if form and len(raw) == struct.calcsize(form) else None
