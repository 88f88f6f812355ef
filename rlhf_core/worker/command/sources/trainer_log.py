"""Progress shown by the trainer's log, one line of JSON per logged step.

Reads ``logging.jsonl`` (ms-swift) and ``trainer_log.jsonl`` (LLaMA-Factory) or, if there is neither, the
``log_history`` in the ``trainer_state.json`` of every checkpoint (transformers, TRL).

Detects a job that no longer makes steps. Cannot tell which rank is to blame, since the first rank writes for all, and
misses anything shorter than the time between two lines (``logging_steps``; without a log, between two checkpoints).
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.files.reading import read_document
from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.following import (
    FollowedLines,
    by_step,
    is_of_this_start,
    numbers_of,
    output_folders,
)
from rlhf_core.worker.command.found_checkpoints import checkpoint_folders
from rlhf_core.worker.command.observation import Reading, StepFigures, Watched, is_step

POLL_S = 1.0
"""Minimum time between readings, in seconds."""
LOG_NAMES = ("logging.jsonl", "trainer_log.jsonl")
STATE_NAME = "trainer_state.json"
SUMMARY_KEY = "log_history"
"""Key of ms-swift's last line, which summarises the training and belongs to no step."""
STEP_KEYS = ("global_step/max_steps", "iteration", "current_steps", "global_step", "step")
"""Keys that may hold the step, first match wins: of ms-swift, its Megatron trainer, LLaMA-Factory and transformers. The
first two have the form ``3/8``."""
_OTHER_STEP_KEYS = ("total_steps", "max_steps")
_STEP = re.compile(r"(\d+)(?:/\d+)?")


class TrainerLog:
    """Lines written to the trainer's log since it started."""

    kind = ProgressSource.TRAINER_LOG

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._logs: dict[Path, FollowedLines] = {}
        self._states: dict[Path, tuple[int, int]] = {}
        self._step: int | None = None
        self._reported_step = watched.first_step
        self._next_poll_s = float("-inf")
        self._problem = ""
        try:
            for log in self._known_logs():
                if not is_of_this_start(log.path, watched):
                    log.skip_to_end()
            self._states = {path: mark for path, mark in self._present_states() if not is_of_this_start(path, watched)}
        except OSError as error:
            self._problem = _error_text(error)

    def poll(self, now_s: float) -> Reading:
        """Read once a second; in between, return an empty reading."""
        if now_s < self._next_poll_s:
            return Reading(step=self._step)
        self._next_poll_s = now_s + POLL_S
        problem, self._problem = self._problem, ""
        moved, figures = False, []
        try:
            for log in self._known_logs():
                lines = log.new_lines()
                moved |= bool(lines)
                figures += self._figures_of_lines(line.text for line in lines)
            if not self._logs:
                found = self._figures_of_states()
                moved |= bool(found)
                figures += found
        except OSError as error:
            problem = problem or _error_text(error)
        if figures:
            self._step = figures[-1].step
            self._reported_step = self._step
        metrics = [one for one in by_step(figures) if one.values]
        return Reading(moved, self._step, metrics=metrics, problem=problem)

    def _known_logs(self) -> list[FollowedLines]:
        for folder in output_folders(self._watched.output_dir):
            for name in LOG_NAMES:
                path = folder / name
                if path not in self._logs and path.is_file():
                    self._logs[path] = FollowedLines(path)
        return list(self._logs.values())

    def _figures_of_lines(self, texts: Iterator[bytes | None]) -> list[StepFigures]:
        figures = []
        for text in texts:
            content = _parsed(text)
            step = _step_of(content)
            if step is not None:
                values = {} if SUMMARY_KEY in content else _values_of(content)
                figures.append(StepFigures(step, values))
        return figures

    # -----------------------------------------------------------------------------------------------------------------

    def _present_states(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        """State files of the checkpoints and the output folder, each with a mark that changes when it is written."""
        found_checkpoints = checkpoint_folders(self._watched.trainer.checkpoint_name, self._watched.output_dir)
        folders = [path for _, path in sorted(found_checkpoints)]
        for folder in [*folders, *output_folders(self._watched.output_dir)]:
            path = folder / STATE_NAME
            try:
                found = path.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield path, (found.st_mtime_ns, found.st_size)

    def _figures_of_states(self) -> list[StepFigures]:
        """History entries not reported yet. A file that is being written is read again later."""
        figures, reported = [], self._reported_step
        for path, mark in self._present_states():
            if self._states.get(path) == mark:
                continue
            self._states[path] = mark
            state = _parsed(_document(path))
            # A new file that ends before the last reported step: the trainer has restarted, and its steps with it.
            reported = reported if (_step_of(state) or 0) >= reported else 0
            figures += [one for one in _history(state) if one.step > reported]
            reported = max([reported, *(one.step for one in figures[-1:])])
        return figures


def history_of(checkpoint: Path) -> list[StepFigures]:
    """Figures of all steps up to a checkpoint, from its state file; empty if it has none.

    Raises:
        OSError: the file exists but cannot be read.
    """
    return by_step(_history(_parsed(_document(checkpoint / STATE_NAME))))


def _history(state: Mapping[str, Any]) -> Iterator[StepFigures]:
    entries = state.get(SUMMARY_KEY)
    for entry in entries if isinstance(entries, list) else []:
        step = _step_of(entry) if isinstance(entry, dict) else None
        if step is not None:
            yield StepFigures(step, _values_of(entry))


def _document(path: Path) -> bytes:
    try:
        return read_document(path)
    except FileNotFoundError:
        return b""  # the trainer has removed its checkpoint in the meantime


def _parsed(text: bytes | None) -> dict[str, Any]:
    """The JSON object in a line; empty for anything else, such as a line left unfinished by a killed trainer."""
    try:
        content = json.loads(text or b"")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _step_of(content: Mapping[str, Any]) -> int | None:
    for key in STEP_KEYS:
        found = _STEP.fullmatch(str(content[key])) if key in content else None
        if found and is_step(int(found[1])):
            return int(found[1])
    return None


def _values_of(content: Mapping[str, Any]) -> dict[str, float]:
    return numbers_of(content, leave_out=(*STEP_KEYS, *_OTHER_STEP_KEYS))


def _error_text(error: OSError) -> str:
    return f"the trainer's log cannot be read: {error}; expected an output folder that the job can read"
