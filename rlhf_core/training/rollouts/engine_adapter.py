"""Adapters as rollout engines see them: a base model that each engine has read itself, and the LoRA tensors of every
version beside it.

Of a model with an adapter a version is the trained tensors alone. They stay beside the base in the engine too, as in
the trainer: merged into weights of bfloat16, the small changes of a few steps would be rounded away (decision 0041).
Nothing is added up from version to version, so nothing can drift.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Size, Tensor, dtype, nn
from transformers import PreTrainedModel

from rlhf_core.schemas.checkpoint_files import BaseModelRecord
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.training.models.adapters import add_adapter, base_files, has_adapter
from rlhf_core.training.models.causal_lm import load_causal_lm
from rlhf_core.training.models.gathering import named_weights, weight_shapes


def given_shapes(model: nn.Module) -> dict[str, tuple[dtype, Size]]:
    """Types and shapes of what a version brings to engines: the adapter of ``model``, or all its weights."""
    return weight_shapes(model, trained_only=has_adapter(model))


def given_weights(model: nn.Module, beat: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of :func:`given_shapes`, in that order. Collective where the model is split."""
    return named_weights(model, beat, trained_only=has_adapter(model))


def base_digest(folder: Path, beat: Callable[[], None]) -> str:
    """Digest of the configuration and the weights of a base model, from the checksums of its files."""
    record = BaseModelRecord(files=base_files(folder, beat))
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()


def adapted_causal_lm(folder: Path, dtype: str, lora: LoraSpec) -> PreTrainedModel:
    """A base model for an engine, with an adapter whose first weights are those of no version.

    Raises:
        BadConfig: there is no model in ``folder``, or no layer that the adapter is for.
    """
    model = load_causal_lm(folder, dtype)
    add_adapter(model, lora, seed=0)
    model.eval()
    return model


def taken_weights(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of an engine's model that a version is copied into, by name."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: named[name] for name in given_shapes(model)}


def count_differing(given: Iterable[tuple[str, Tensor]], held: Mapping[str, Tensor]) -> int:
    """Number of tensors of a version that an engine's model does not hold bit for bit.

    Args:
        held: tensors as they are in the model, on any device.
    """
    return sum(name not in held or not torch.equal(held[name].cpu(), tensor.cpu()) for name, tensor in given)
