"""Weights in the processes in which vLLM computes, through its own interface for them (``weight_transfer``, from 0.25
on). vLLM loads this module in each of its workers, by name; without vLLM it cannot be imported.

An engine of one GPU has one worker, in its own process; one that is split over several has a process for each, and
every call goes to all of them: ``start_weight_update``, ``update_weights`` for each part, ``finish_weight_update``.
The weights are staged by then. So vLLM is given a backend of ours, which takes tensors of the same process, or their
places in a row that its processes share, and moves nothing over a network.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf_core.training.rollouts.shared_tensors import MappedRow, TensorPlace
from rlhf_core.training.rollouts.vllm.adapter import AdapterInForce, count_differing


@dataclass
class StagedPart(WeightTransferUpdateInfo):
    """A part of a version: whole tensors, valid until it is complete, as vLLM keeps them until their layer is."""

    tensors: Iterable[tuple[str, Tensor]] = ()
    """Those of this process."""
    places: Sequence[TensorPlace] = ()
    """Those in a row that another process shares."""


class StagedWeights(WeightTransferEngine):
    """Takes versions over from staging: joined, repacked, split and placed layer by layer, by vLLM's loader."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = StagedPart

    def __init__(self, *arguments: Any) -> None:
        """Take none yet. Arguments are vLLM's."""
        super().__init__(*arguments)
        self._row = MappedRow()
        self._is_begun = False

    def init_transfer_engine(self, init_info: Any) -> None:
        """Connect to nothing."""

    def start_weight_update(self) -> None:
        """Prepare the model for new weights in the layout of a checkpoint."""
        if self._is_begun:
            # Of an update that was broken off vLLM would count the parts of a layer as those of this one, and take the
            # layer for complete before it is.
            self.finish_weight_update()
        with self._loading():
            initialize_layerwise_reload(self.model)
        self._is_begun = True

    def receive_weights(self, update_info: StagedPart) -> None:
        """Copy a part of a version into the model."""
        with self._loading():
            self.model.load_weights(update_info.tensors)
            self.model.load_weights((place.name, self._row.tensor(place)) for place in update_info.places)

    def finish_weight_update(self) -> None:
        """Complete the model."""
        self._is_begun = False
        with self._loading():
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                _pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Let go of nothing."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Be no sender. Asked for by vLLM up to 0.27."""
        raise NotImplementedError("weights are staged by rlhf_core.weight_sync")

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            yield


WeightTransferEngineFactory.register_engine(__name__, StagedWeights)


class WeightExtension:
    """Further methods of vLLM's worker (``worker_extension_cls``), whose attributes are that worker's."""

    model_runner: Any
    _weight_update_active: bool

    def give_up_weight_update(self) -> None:
        """End an update that was broken off, which vLLM has no call for: the next one would be refused."""
        self._weight_update_active = False

    def count_differing(self, adapter: AdapterInForce, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Number of tensors of an adapter of which the layers in use do not hold their part bit for bit."""
        return count_differing(self.model_runner, adapter, tensors)

    def count_differing_shared(self, adapter: AdapterInForce, places: Sequence[TensorPlace]) -> int:
        """The same with tensors in memory that another process shares."""
        row = MappedRow()
        return self.count_differing(adapter, [(place.name, row.tensor(place)) for place in places])


def _pack_tied_head(model: nn.Module) -> None:
    """Pack the tied ``lm_head`` of a model on CPU anew from its embedding."""
    whole: Any = getattr(model, "language_model", model)
    head = getattr(whole, "lm_head", None)
    embedding = getattr(getattr(whole, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not whole.config.tie_word_embeddings:
        return
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)
