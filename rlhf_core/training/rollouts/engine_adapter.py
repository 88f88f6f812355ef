"""Adapters in rollout engines: each engine reads the base model itself and receives the LoRA tensors of every version.

A version of a model with an adapter consists of the trained tensors only. The engine keeps them separate from the base
model, as the trainer does: merging into bfloat16 weights would round away the small changes of a few steps (decision
0041). Nothing accumulates from version to version, so nothing can drift.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Size, Tensor, dtype, nn
from transformers import PreTrainedModel

from rlhf_core.schemas.model import LoraSpec
from rlhf_core.training.models.adapters import add_adapter, has_adapter
from rlhf_core.training.models.causal_lm import load_causal_lm
from rlhf_core.training.models.gathering import named_weights, weight_shapes


def given_shapes(model: nn.Module) -> dict[str, tuple[dtype, Size]]:
    """Types and shapes of the tensors of a version: the adapter of ``model``, or all its weights."""
    return weight_shapes(model, trained_only=has_adapter(model))


def given_weights(model: nn.Module, beat: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of :func:`given_shapes`, in that order. Collective if the model is split."""
    return named_weights(model, beat, trained_only=has_adapter(model))


def adapted_causal_lm(folder: Path, dtype: str, lora: LoraSpec) -> PreTrainedModel:
    """Load a base model for an engine, with an adapter whose initial weights do not belong to any version.

    Raises:
        BadConfig: ``folder`` holds no model, or the model has no layer for the adapter.
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
        held: the tensors in the engine's model, on any device.
    """
    return sum(name not in held or not torch.equal(held[name].cpu(), tensor.cpu()) for name, tensor in given)
