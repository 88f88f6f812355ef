"""Metrics of an external trainer as lines of ``metrics.jsonl``, by step, under this project's names."""

from collections.abc import Collection, Iterable
from pathlib import Path

from rlhf_core.files.appended import append_lines
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.command_trainer import CommandTrainer, ProgressSource
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.worker.command.metric_names import MetricNames
from rlhf_core.worker.command.observation import StepFigures

HOLD_S = 3.0
"""Time that the newest step waits for more figures, in seconds: some writers log one figure at a time."""


class StepMetricsFile:
    """Writes each figure of a step once; used by rank 0's worker.

    A step may have several lines: transformers logs the loss of a step, evaluates for minutes, and then logs the
    results of the evaluation at the same step.
    """

    def __init__(self, path: Path, trainer: CommandTrainer, first_step: int) -> None:
        self._path = path
        self._loop = trainer.algorithm
        self._names = MetricNames(trainer)
        self._order = trainer.sources
        self._owner: ProgressSource | None = None
        self._pending: dict[int, dict[str, float]] = {}
        self._touched_s: dict[int, float] = {}
        self._first_step = first_step
        self._last = first_step
        """Newest step written; later figures for earlier steps are ignored."""
        self._names_of_last: frozenset[str] = frozenset()
        """Metrics written for it."""

    def add(self, source: ProgressSource, found: Iterable[StepFigures], now_s: float) -> None:
        """Add figures from a source. Only one source counts: two would repeat figures with different rounding.

        Args:
            source: Their source; the first in the trainer's order that has any figures wins.
            found: The figures.
            now_s: Monotonic time in seconds.
        """
        figures = [one for one in found if one.step > self._first_step and one.step >= self._last]
        if not figures:
            return
        if self._owner is None or self._order.index(source) < self._order.index(self._owner):
            self._owner = source
        if source is not self._owner:
            return
        for one in figures:
            written = self._names_of_last if one.step == self._last else frozenset()
            new = {name: value for name, value in self._names.rename(one.values).items() if name not in written}
            if new:
                self._pending.setdefault(one.step, {}).update(new)
                self._touched_s[one.step] = now_s

    def recover(self, found: Iterable[StepFigures], recorded: Collection[int]) -> None:
        """Add figures of steps before this start's first that no earlier start recorded: it was killed between reading
        and writing them, after its checkpoint had been saved.

        Args:
            found: Figures up to the checkpoint that the program resumes from.
            recorded: Steps that already have a line in the run.
        """
        for one in found:
            if one.step <= self._last and one.step not in recorded:
                self._pending[one.step] = self._names.rename(one.values)
                self._touched_s[one.step] = float("-inf")

    def write(self, now_s: float, *, all_of_them: bool = False) -> list[MetricsLine]:
        """Append the complete steps: all before the newest, and the newest once it has waited ``HOLD_S``.

        Args:
            now_s: Monotonic time in seconds.
            all_of_them: The program has exited: write every step.

        Returns:
            The lines written.

        Raises:
            OSError: the file cannot be written; the lines are kept for the next call.
        """
        newest = max(self._pending, default=0)
        ready = [
            step
            for step in sorted(self._pending)
            if all_of_them or step < newest or now_s - self._touched_s[step] > HOLD_S
        ]
        now = utc_now()
        lines = [MetricsLine(step=step, time=now, loop=self._loop, metrics=self._pending[step]) for step in ready]
        if lines:
            append_lines(self._path, *lines)
        for line in lines:
            del self._pending[line.step], self._touched_s[line.step]
            if line.step >= self._last:
                earlier = self._names_of_last if line.step == self._last else frozenset()
                self._last, self._names_of_last = line.step, earlier | line.metrics.keys()
        return lines
