"""The common words of the sources of progress: a reading, and the place that a source looks at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_core.schemas.command_trainer import CommandTrainer, ProgressSource
from rlhf_core.schemas.reports import Phase


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step, in the words of the program."""

    step: int
    """Optimizer step, from 1."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Reading:
    """News of one source since its last poll; an empty one says that there are none."""

    moved: bool = False
    """Something happened that shows progress (or life, for a source that is not strong)."""
    step: int | None = None
    """Newest step that the source knows; None where it knows none."""
    phase: Phase | None = None
    """Phase that the rank is in; None where the source does not know."""
    metrics: Sequence[StepFigures] = ()
    """Metrics that were not in an earlier reading, oldest first."""
    problem: str = ""
    """Sentence on a source that cannot be read; told once."""


@dataclass(frozen=True)
class Watched:
    """The program that is looked at, from the view of one of its ranks."""

    trainer: CommandTrainer
    output_dir: Path
    """Folder of the program's own files; may not exist yet."""
    started_at_s: float
    """Time of its start in seconds since the epoch: files that were there before count as read."""
    first_step: int = 0
    """Step of the checkpoint that it goes on from; 0 from the beginning."""
    logs: Sequence[Path] = ()
    """Output of the program, as far as it can be read on this node."""
    pids: Callable[[], Sequence[int]] = tuple
    """Present processes that carry the rank, on this node."""


class Source(Protocol):
    """One way to learn of progress. Polled a few times a second by one thread; a poll takes milliseconds."""

    kind: ProgressSource

    def poll(self, now_s: float) -> Reading:
        """Look once.

        Args:
            now_s: Monotonic time in seconds.
        """
