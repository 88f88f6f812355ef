"""Checkpoints of one start of a rank as its loops see them: begun at the end of a step, and waited for at the end."""

import time
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.checkpoints.memory.copies import MemoryCopy
from rlhf_core.training.checkpoints.memory.peer_copies import peer_copies
from rlhf_core.training.checkpoints.saving import SavedModel
from rlhf_core.training.checkpoints.state import Progress
from rlhf_core.training.checkpoints.writer import CheckpointWriter
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.types import WorkerContext


class Saving:
    """Saves, and counts what the steps wait for it."""

    def __init__(
        self,
        context: WorkerContext,
        ranks: Ranks,
        tokenizer: PreTrainedTokenizerBase,
        beat: Callable[[Phase], None],
        sync_files: Callable[[], None],
    ) -> None:
        """Make the writer. Collective.

        Args:
            sync_files: brings to the disk what the loops append to: the steps that a checkpoint makes final must not be
                lost to a power cut.
        """
        self._ranks = ranks
        self._reporter = context.reporter
        self._beat = beat
        self._sync_files = sync_files
        self._waited_s = 0.0
        self._wait_s = 0.0
        self._writer = CheckpointWriter(
            context.run_dir,
            context.spec,
            tokenizer,
            ranks,
            lambda: beat(Phase.CHECKPOINT),
            lambda: context.run_dir.is_superseded(context.attempt),
            memory=_memory_of(context, ranks),
            peer=peer_copies(context, ranks),
        )

    def request(self) -> str:
        """Vote of this rank at the end of a step: what the agent asks of it, unless a checkpoint has failed.

        Raises:
            FileSystemStalled: one is not written on.
        """
        return "failed" if self._writer.has_failed() else self._reporter.request()

    def times(self) -> dict[str, float]:
        """Seconds since they were asked for last: the step waited, for the checkpoint before, and one was written."""
        found = {
            "checkpoint": self._waited_s,
            "checkpoint_wait": self._wait_s,
            "checkpoint_write": self._writer.take_write_s(),
        }
        self._waited_s = self._wait_s = 0.0
        return found

    def save(
        self,
        progress: Progress,
        model: PreTrainedModel,
        engine: Engine,
        critic: SavedModel | None,
        in_flight: dict[str, Any] | None,
        *,
        is_last: bool,
    ) -> None:
        """Begin a checkpoint.

        Args:
            in_flight: completions of this rank for the next step, if there are any.
            is_last: what comes after it needs it whole.

        Raises:
            DiskFull, WorkerError: this one, or the one before, cannot be written; raised by every rank.
        """
        started = time.monotonic()
        self.finish()
        self._wait_s = time.monotonic() - started
        self._beat(Phase.CHECKPOINT)
        self._sync_files()
        saved = self._writer.begin(progress, model, engine.state(), critic, in_flight)
        if is_last:
            self.finish()
        self._waited_s = time.monotonic() - started
        how = "saving" if self._writer.is_writing else "saved"
        self._ranks.log(f"{how} {saved.root.name}: training waited {self._waited_s:.2f} s")

    def finish(self) -> None:
        """Wait for the checkpoint that is on its way, if there is one.

        Raises:
            DiskFull, WorkerError: it could not be written; raised by every rank.
        """
        self._writer.finish()

    def close(self) -> None:
        """Wait likewise, at the end of all loops.

        Raises:
            DiskFull, WorkerError: as :meth:`finish`.
        """
        self._writer.close()

    def leave(self) -> None:
        """Let it end well, if it can, after an error that ends this process."""
        self._writer.leave()


def _memory_of(context: WorkerContext, ranks: Ranks) -> MemoryCopy | None:
    if context.memory is None or context.spec.checkpoint.memory == "off":
        return None
    return MemoryCopy(context.memory, ranks.rank, context.attempt)
