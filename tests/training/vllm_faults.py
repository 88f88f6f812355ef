"""vLLM workers with faults that a test requests."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from rlhf_core.training.rollouts.vllm import worker as vllm_worker
from rlhf_core.training.rollouts.vllm.adapter import LoadedAdapter
from rlhf_core.training.rollouts.vllm.worker import StagedPart, StagedWeights, WeightExtension


def _is_to_skip(rank: int) -> bool:
    return rank == 1 and Path(os.environ["SKIP_PART"]).exists()


class ObeyingWeights(StagedWeights):
    """Leaves weights out in the second process of an engine as long as a file says so."""

    def receive_weights(self, update_info: StagedPart) -> None:
        """Copy a part of a version into the model, or skip it."""
        if not _is_to_skip(self.parallel_config.rank):
            super().receive_weights(update_info)


WeightTransferEngineFactory._registry[vllm_worker.__name__] = lambda: ObeyingWeights


class ObeyingExtension(WeightExtension):
    """Holds a different adapter from the one it was given, as long as a file says so."""

    rank: int

    def count_differing(self, adapter: LoadedAdapter, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Examine layers, one of which has a different adapter, by less than any token would show."""
        if _is_to_skip(self.rank):
            modules = self.model_runner.lora_manager._adapter_manager.modules
            modules["model.layers.0.mlp.down_proj"].lora_b_stacked[0].add_(1e-6)
        return super().count_differing(adapter, tensors)
