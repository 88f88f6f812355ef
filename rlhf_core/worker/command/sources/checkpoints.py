"""Progress shown by new checkpoints.

Detects a job that no longer saves checkpoints. Cannot tell which rank is to blame, and misses anything shorter than the
checkpoint interval: a job that hangs right after a checkpoint looks healthy until the next one is overdue.
"""

from pathlib import Path

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.command.found_checkpoints import CheckpointContent, WatchedCheckpoints
from rlhf_core.worker.command.observation import Reading, Watched

POLL_S = 1.0
"""Minimum time between readings, in seconds: each stats every file of every checkpoint."""


class Checkpoints:
    """New checkpoints in the output folder. While one is being written, the phase is ``checkpoint``."""

    kind = ProgressSource.CHECKPOINTS

    def __init__(self, watched: Watched) -> None:
        self._checkpoints = WatchedCheckpoints(watched.trainer, watched.output_dir)
        self._old: dict[Path, CheckpointContent] = {}
        self._contents: dict[Path, CheckpointContent] = {}
        self._complete: set[Path] = set()
        self._step: int | None = None
        self._next_poll_s = float("-inf")
        self._problem = ""
        try:
            self._old = {one.path: one.content for one in self._checkpoints.find(0.0)}
        except OSError as error:
            self._problem = _error_text(error)

    def poll(self, now_s: float) -> Reading:
        """Read once a second; in between, return an empty reading."""
        if now_s < self._next_poll_s:
            return Reading(step=self._step)
        self._next_poll_s = now_s + POLL_S
        try:
            found = self._checkpoints.find(now_s)
        except OSError as error:
            return Reading(step=self._step, problem=_error_text(error))
        contents = {one.path: one.content for one in found}
        # A checkpoint that existed before counts once the program writes into it, but not while it is removed.
        self._old = {
            path: contents[path]
            for path, before in self._old.items()
            if path in contents and (contents[path] == before or contents[path].num_files < before.num_files)
        }
        new = [one for one in found if one.path not in self._old]
        grown = [one for one in new if contents[one.path] != self._contents.get(one.path)]
        complete = {one.path for one in new if one.complete}
        moved = bool(grown) or not complete <= self._complete
        self._step = max((one.step for one in new if one.complete), default=self._step)
        self._contents, self._complete = contents, complete
        is_written = any(one.path not in complete for one in grown)
        return Reading(moved, self._step, Phase.CHECKPOINT if is_written else None, problem=self._problem)


def _error_text(error: OSError) -> str:
    return f"cannot search for checkpoints: {error}; expected an output folder that the job can read"
