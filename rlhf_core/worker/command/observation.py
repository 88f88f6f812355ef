"""Types shared by the sources of progress: a reading, and the program that a source watches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_core.schemas.command_trainer import CommandTrainer, ProgressSource
from rlhf_core.schemas.reports import Phase


def is_step(number: float) -> bool:
    """False for a number too large for a step, such as one of tokens or a date."""
    return abs(number) < 2**31


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step, under the program's own names."""

    step: int
    """Optimizer step, from 1."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Reading:
    """Observations of one source since its last poll; empty if nothing is new."""

    moved: bool = False
    """True if something shows progress (or, for a source that is not strong, life)."""
    step: int | None = None
    """Newest step known to the source, if any."""
    phase: Phase | None = None
    """Phase of the rank; None if the source does not know it."""
    metrics: Sequence[StepFigures] = ()
    """Metrics not contained in an earlier reading, oldest first."""
    problem: str = ""
    """Sentence on why the source cannot be read; :class:`JobRecord` prints each once."""


@dataclass(frozen=True)
class Watched:
    """The watched program, as seen by one of its ranks."""

    trainer: CommandTrainer
    output_dir: Path
    """Folder for the program's own files; may not exist yet."""
    started_at_s: float
    """Time of its start in seconds since the epoch."""
    files_since_s: float
    """The same by the clock of the file server, which may be minutes ahead or behind: files that were not changed since
    count as read."""
    first_step: int = 0
    """Step of the checkpoint that it resumes from; 0 if it starts from the beginning."""
    logs: Callable[[], Sequence[Path]] = tuple
    """Returns the current logs of the rank."""
    pids: Callable[[], Sequence[int]] = tuple
    """Returns the current processes of the rank on this node: the rank itself, then its descendants."""


class Source(Protocol):
    """One way to observe progress. Polled a few times a second by a single thread; a poll takes milliseconds."""

    kind: ProgressSource

    def poll(self, now_s: float) -> Reading:
        """Poll once.

        Args:
            now_s: Monotonic time in seconds.
        """
