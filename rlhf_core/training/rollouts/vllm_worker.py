"""Weights in the processes in which vLLM computes: methods that vLLM adds to its worker (``worker_extension_cls``).

An engine of one GPU has one worker, in its own process; one that is split over several has a process for each, and
every call goes to all of them.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.training.rollouts.shared_tensors import MappedRow, TensorPlace
from rlhf_core.training.rollouts.vllm_adapter import AdapterInForce, count_differing

EXTENSION = "rlhf_core.training.rollouts.vllm_worker.WeightExtension"
"""Name of the class below, for vLLM."""


class WeightExtension:
    """Takes versions of the weights over, through vLLM's own loader. Its attributes are those of vLLM's worker."""

    vllm_config: Any
    model_config: Any
    model_runner: Any
    device: torch.device
    _row: MappedRow | None = None

    def begin_version(self) -> None:
        """Prepare the model for new weights in the layout of a checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with self._loading():
            initialize_layerwise_reload(self.model_runner.model)

    def take_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a part of a version into the model: joined, repacked, split and placed layer by layer.

        Args:
            tensors: whole ones, valid until the version is complete: vLLM keeps them until their layer is.
        """
        with self._loading():
            self.model_runner.model.load_weights(tensors)

    def take_shared_tensors(self, places: Sequence[TensorPlace]) -> None:
        """The same with tensors in memory that another process shares."""
        self.take_tensors(self._shared(places))

    def end_version(self) -> None:
        """Complete the model."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.model
        with self._loading():
            finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu":
                _pack_tied_head(model)

    def count_differing(self, adapter: AdapterInForce, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Number of tensors of an adapter of which the layers in use do not hold their part bit for bit."""
        return count_differing(self.model_runner, adapter, tensors)

    def count_differing_shared(self, adapter: AdapterInForce, places: Sequence[TensorPlace]) -> int:
        """The same with tensors in memory that another process shares."""
        return self.count_differing(adapter, list(self._shared(places)))

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            yield

    def _shared(self, places: Sequence[TensorPlace]) -> Iterator[tuple[str, Tensor]]:
        row = self._row = self._row or MappedRow()  # vLLM calls no constructor of an extension
        return ((place.name, row.tensor(place)) for place in places)


def _pack_tied_head(model: nn.Module) -> None:
    """Pack the tied ``lm_head`` of a model on CPU anew from its embedding."""
    whole: Any = getattr(model, "language_model", model)
    head = getattr(whole, "lm_head", None)
    embedding = getattr(getattr(whole, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not whole.config.tie_word_embeddings:
        return
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)
