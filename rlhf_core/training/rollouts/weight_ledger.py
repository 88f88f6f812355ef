"""Ledger of the weights given to rollout engines: each sync is recorded before it begins and after it ends."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from rlhf_core.files.appended import LineWriter
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.weight_sync import WeightSyncLine
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import ContinuousSampling, RolloutEngine, Sampling, WeightTransfer
from rlhf_core.training.types import Completion


class RecordedEngine:
    """A rollout engine whose weight syncs are recorded in the run's ledger.

    Args:
        path: file of the ledger, which rank 0 appends to.
        num_engines: number of engines that load each version, over all ranks.
        on_loss: called with a message if the file was deleted or truncated during writing.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        ranks: Ranks,
        path: Path,
        num_engines: int,
        on_loss: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._file = LineWriter(path, on_loss) if ranks.is_first else None
        self._num_engines = num_engines
        self._number = 0

    @property
    def version(self) -> int | None:
        """Version of the current weights; None before the first."""
        return self._engine.version

    @property
    def continuous(self) -> ContinuousSampling | None:
        """Sampling of prompts that become known meanwhile, if the engine supports it."""
        return self._engine.continuous

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> WeightTransfer | None:
        """Load the weights of ``model``; see :class:`rlhf_core.training.rollouts.base.RolloutEngine`.

        Collective. It returns once the engines of all ranks have responded: none samples before the others can.
        """
        if self.version == version:
            return self._engine.load(model, version, beat)
        line = WeightSyncLine(number=self._number, time=utc_now(), version=version, engines=self._num_engines)
        self._number += 1
        self._write(line)
        started = time.monotonic()
        transfer = self._engine.load(model, version, beat)
        own = transfer or _NOTHING
        numbers = [own.acknowledged, own.bytes, time.monotonic() - started, own.wire_s, own.apply_s]
        self._write(line.model_copy(update=_over_ranks(own.transport, self._ranks.gather_numbers(numbers))))
        return transfer

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample completions; see :class:`rlhf_core.training.rollouts.base.RolloutEngine`."""
        return self._engine.sample(prompts, seeds, sampling, version, beat)

    def take_counts(self) -> Mapping[str, float]:
        """Metrics of this rank's calls since the last call."""
        return self._engine.take_counts()

    def sleep(self) -> None:
        """Release the memory that only sampling needs."""
        self._engine.sleep()

    def close(self) -> None:
        """Release the engine's resources, and close the ledger."""
        self._engine.close()
        if self._file is not None:
            self._file.close()

    def _write(self, line: WeightSyncLine) -> None:
        if self._file is not None:
            self._file.write(line)


_NOTHING = WeightTransfer("", 0, wire_s=0.0, apply_s=0.0, acknowledged=0)
"""Transfer of a rank that sends nothing and has no engine."""


def _over_ranks(transport: str, answered: Sequence[Sequence[float]]) -> dict[str, object]:
    """Combine the ranks' figures: engines and bytes are summed; for seconds, the slowest rank counts."""
    acknowledged, sizes, seconds, wire_s, apply_s = zip(*answered, strict=True)
    return {
        "time": utc_now(),
        "acknowledged": int(sum(acknowledged)),
        "transport": transport,
        "bytes": int(sum(sizes)),
        "seconds": max(seconds),
        "wire_s": max(wire_s),
        "apply_s": max(apply_s),
    }
