"""vLLM's workers with faults that a test asks for."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from rlhf_core.training.rollouts.vllm_adapter import AdapterInForce
from rlhf_core.training.rollouts.vllm_worker import WeightExtension


class ObeyingExtension(WeightExtension):
    """Leaves weights out in the second process of an engine for as long as a file says so."""

    rank: int

    def take_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a part of a version into the model, or not."""
        if self._is_to_skip:
            list(tensors)
        else:
            super().take_tensors(tensors)

    def count_differing(self, adapter: AdapterInForce, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Look at layers of which one has another adapter, by less than any token shows."""
        if self._is_to_skip:
            modules = self.model_runner.lora_manager._adapter_manager.modules
            modules["model.layers.0.mlp.down_proj"].lora_b_stacked[0].add_(1e-6)
        return super().count_differing(adapter, tensors)

    @property
    def _is_to_skip(self) -> bool:
        return self.rank == 1 and Path(os.environ["SKIP_PART"]).exists()
