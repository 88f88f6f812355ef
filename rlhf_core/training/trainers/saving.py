"""Checkpointing, as the loops of one rank use it: saves begin at the end of a step and are waited for at the end of
training."""

import time
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.checkpoints.memory.copies import MemoryCopy
from rlhf_core.training.checkpoints.memory.peer_copies import kept_ranks, peer_copies
from rlhf_core.training.checkpoints.state import Progress
from rlhf_core.training.checkpoints.writer import CheckpointWriter
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.types import WorkerContext


class Saving:
    """Saves checkpoints and measures how long the steps wait for them."""

    def __init__(
        self,
        context: WorkerContext,
        ranks: Ranks,
        tokenizer: PreTrainedTokenizerBase,
        beat: Callable[[Phase], None],
        sync_files: Callable[[], None],
    ) -> None:
        """Create the writer. Collective.

        Args:
            sync_files: syncs the loops' append-only files to disk, so that a power cut cannot lose steps before a
                checkpoint.
        """
        self._ranks = ranks
        self._reporter = context.reporter
        self._beat = beat
        self._sync_files = sync_files
        self._waited_s = 0.0
        self._wait_s = 0.0
        self._blocked_s = 0.0
        self._write_s = 0.0
        self.writer = CheckpointWriter(
            context.run_dir,
            context.spec,
            tokenizer,
            ranks,
            lambda: beat(Phase.CHECKPOINT),
            context.attempt,
            memory=_memory_of(context, ranks),
            peer=peer_copies(context, ranks),
        )

    def request(self) -> str:
        """Vote of this rank at the end of a step: the agent's request, unless a checkpoint has failed.

        Raises:
            FileSystemStalled: writing a checkpoint makes no progress.
        """
        return "failed" if self.writer.has_failed() else self._reporter.request()

    def times(self) -> dict[str, float]:
        """Seconds accumulated since the last call: total waiting time of steps, waiting for the previous checkpoint,
        and writing."""
        write_s = self.writer.take_write_s()
        self._write_s = write_s or self._write_s
        found = {"checkpoint": self._waited_s, "checkpoint_wait": self._wait_s, "checkpoint_write": write_s}
        self._waited_s = self._wait_s = 0.0
        return found

    def save_s(self) -> float:
        """Time in seconds that a checkpoint would take until it is complete, judged by the last one; 0 while none is
        complete."""
        if self.writer.is_writing and not self._write_s:
            return 0.0
        return self._blocked_s + self._write_s * (2 if self.writer.is_writing else 1)

    def save(
        self,
        progress: Progress,
        model: PreTrainedModel,
        engine: Engine,
        critic: Engine | None,
        in_flight: Callable[[bool], list[dict[str, Any]]] | None,
        *,
        is_last: bool,
    ) -> None:
        """Begin a checkpoint.

        Args:
            critic: the engine of a value model.
            in_flight: returns this rank's completions for the next step, after waiting for them unless ``is_last``.
            is_last: the checkpoint must be complete before the caller continues.

        Raises:
            DiskFull, WorkerError: this checkpoint or the previous one cannot be written; raised by every rank.
        """
        started = time.monotonic()
        self.writer.finish()
        self._wait_s = time.monotonic() - started
        sampled = in_flight(is_last) if in_flight else []
        self._beat(Phase.CHECKPOINT)
        self._sync_files()
        state: dict[str, Any] = {"engine": engine.state()}
        if critic is not None:
            state["critic"] = critic.state()
        if sampled:
            state["in_flight"] = sampled
        saved = self.writer.begin(progress, model, state, critic.model if critic is not None else None)
        self._blocked_s = time.monotonic() - started - self._wait_s
        if is_last:
            self.writer.finish()
        self._waited_s = time.monotonic() - started
        how = "saving" if self.writer.is_writing else "saved"
        self._ranks.log(f"{how} {saved.root.name}: training waited {self._waited_s:.2f} s")


def _memory_of(context: WorkerContext, ranks: Ranks) -> MemoryCopy | None:
    """Collective unless the settings turn copies off."""
    if context.spec.checkpoint.memory == "off":
        return None
    nodes = ranks.gather(context.node)
    if context.memory is None:
        return None
    is_first_here = nodes.index(context.node) == ranks.rank
    kept = kept_ranks(nodes, context.node) if is_first_here else None
    return MemoryCopy(context.memory, ranks.rank, kept)
