"""Weight loading in vLLM's worker processes, through its own interface (``weight_transfer``, from 0.25 on). vLLM loads
this module by name in each of its workers; it cannot be imported without vLLM.

An engine on one GPU has one worker, in its own process; a split engine has one process per GPU, and every call goes to
all of them: ``start_weight_update``, ``update_weights`` for each part, ``finish_weight_update``. The weights are
already staged, so our backend takes tensors of the same process or their places in shared memory, and transfers nothing
over a network.
"""

import contextlib
import gc
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf_core.machine.shared_names import PREFIX_VARIABLE, name_shared_memory
from rlhf_core.training.rollouts.checkpoint_layout import CheckpointLayout
from rlhf_core.training.rollouts.shared_tensors import MappedRow, TensorPlace
from rlhf_core.training.rollouts.vllm.adapter import LoadedAdapter, count_differing
from rlhf_core.training.rollouts.vllm.gpt_oss import through_weight_loaders

if PREFIX_VARIABLE in os.environ:  # vLLM's workers load this module before they make any shared memory
    name_shared_memory(os.environ[PREFIX_VARIABLE])

gc.freeze()  # vLLM collects five times while it starts, and would scan its own modules each time


# At every version, vLLM warns of layers that a checkpoint has nothing for: tied heads, tables of rotary embeddings.
# Weights that are really missing are found by the outputs, which are compared with the trainer's.
logging.getLogger(finalize_layerwise_reload.__module__).addFilter(
    lambda record: "Failed to load" not in str(record.msg)
)


@dataclass
class StagedPart(WeightTransferUpdateInfo):
    """A part of a version: whole tensors, valid until the version is complete, because vLLM keeps them until then."""

    tensors: Iterable[tuple[str, Tensor]] = ()
    """Tensors of this process."""
    places: Sequence[TensorPlace] = ()
    """Tensors in memory shared by another process."""


class StagedWeights(WeightTransferEngine):
    """Loads versions from staging: vLLM's loader fuses, repacks, splits and places them layer by layer."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = StagedPart

    def __init__(self, *arguments: Any) -> None:
        """Start without a version. Arguments are vLLM's."""
        super().__init__(*arguments)
        self._row = MappedRow()
        with set_current_vllm_config(self.vllm_config):  # vLLM changes the classes of some models, which read it
            self._layout = CheckpointLayout(Path(self.model_config.model))
        self._is_begun = False

    def init_transfer_engine(self, init_info: Any) -> None:
        """Do nothing: there are no connections."""

    def start_weight_update(self) -> None:
        """Prepare the model for new weights in the layout of a checkpoint."""
        if self._is_begun:
            # vLLM would count layer parts of an aborted update as parts of this one, and consider the layer complete
            # too early.
            self._layout.reset()
            self.finish_weight_update()
        with self._loading():
            initialize_layerwise_reload(self.model)
        self._is_begun = True

    def receive_weights(self, update_info: StagedPart) -> None:
        """Copy a part of a version into the model."""
        placed = ((place.name, self._row.tensor(place)) for place in update_info.places)
        with self._loading():
            self._load(self._layout.convert(itertools.chain(update_info.tensors, placed)))

    def finish_weight_update(self) -> None:
        """Finish the update of the model."""
        with self._loading():
            self._load(self._layout.rest())
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                _pack_tied_head(self.model)
        self._is_begun = False

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Return no sender; vLLM up to 0.27 asks for one."""
        raise NotImplementedError("weights are staged by rlhf_core.weight_sync")

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self.model_config.hf_config.model_type == "gpt_oss":
            tensors = through_weight_loaders(self.model, tensors)
        self.model.load_weights(tensors)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        packing = _packed_experts(self.model) if self.device.type == "cpu" else contextlib.nullcontext()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), packing:
            yield


WeightTransferEngineFactory.register_engine(__name__, StagedWeights)


class WeightExtension:
    """Extension of vLLM's worker (``worker_extension_cls``); its attributes are those of the worker."""

    model_runner: Any
    _weight_update_active: bool

    def give_up_weight_update(self) -> None:
        """End an aborted update, for which vLLM has no call: the next one would be refused."""
        self._weight_update_active = False

    def count_differing(self, adapter: LoadedAdapter, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Number of tensors of an adapter whose parts in the active layers differ in any bit."""
        return count_differing(self.model_runner, adapter, tensors)

    def count_differing_shared(self, adapter: LoadedAdapter, places: Sequence[TensorPlace]) -> int:
        """The same with tensors in memory shared by another process."""
        row = MappedRow()
        return self.count_differing(adapter, [(place.name, row.tensor(place)) for place in places])


@contextlib.contextmanager
def _packed_experts(model: nn.Module) -> Iterator[None]:
    """Have vLLM pack the experts that are loaded within the block for its kernels on CPU. By itself, it packs only
    those of the first weights (0.32)."""
    methods: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    kernels = [(one, one.moe_kernel) for one in methods if getattr(one, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None  # as before the first weights
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def _pack_tied_head(model: nn.Module) -> None:
    """Repack the tied ``lm_head`` of a model on CPU from its embedding."""
    whole: Any = getattr(model, "language_model", model)
    head = getattr(whole, "lm_head", None)
    embedding = getattr(getattr(whole, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not whole.config.tie_word_embeddings:
        return
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)
