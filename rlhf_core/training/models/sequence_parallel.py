"""Rows shared by several ranks, each with a part of the tokens (Ulysses: Jacobs et al. 2023, arXiv 2309.14509).

All layers but attention process each token by itself, so a rank runs them over its own piece of the row. For attention,
an all-to-all turns ``[tokens / N, heads]`` into ``[tokens, heads / N]``: each rank attends over the whole row with some
of the heads, and a second all-to-all turns the result back. Activations shrink to 1/N; the number of heads bounds N.

    forward     piece --> q, k, v --all-to-all--> attention --all-to-all--> piece --> log-probabilities --sum--> whole
    backward    the same way back; of the gradient of the whole, a rank takes that of its own values

Every rank of the group computes the same loss from the whole log-probabilities, and the part of its gradient that flows
through its own tokens. The parts of all ranks add up to the gradient, as those of different rows do: neither losses nor
the reduction of gradients know about pieces.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rlhf_core.schemas.trainers import MOVING_ROPES
from rlhf_core.training.distributed import SequenceGroup


def whole(values: Tensor, group: SequenceGroup) -> Tensor:
    """Values of all tokens, from those of this rank's tokens: ``values`` has 0 for the others.

    Exact, because each sum has one term that is not 0. The gradient is that of the rank's own values alone: each rank
    of the group derives the same loss, so adding up their gradients would count it once per rank.
    """
    found: Tensor = _Whole.apply(values, group)
    return found


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup) -> tuple[Tensor, Tensor, Tensor]:
    """``[1, heads, tokens / N, D]`` of all heads -> ``[1, heads / N, tokens, D]`` of all tokens, in one all-to-all.

    Key-value heads whose number is no multiple of ``N`` are repeated until it is one.
    """
    repeats = group.size // math.gcd(group.size, key.shape[1])
    key, value = (tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor for tensor in (key, value))
    parts = [tensor[0].unflatten(0, (group.size, -1)).transpose(1, 2) for tensor in (query, key, value)]
    swapped = _swapped(torch.cat([part.flatten(2) for part in parts], -1), group).flatten(0, 1)
    columns = swapped.split([part.shape[2] * part.shape[3] for part in parts], -1)
    query, key, value = (
        column.unflatten(-1, part.shape[2:]).transpose(0, 1)[None] for column, part in zip(columns, parts, strict=True)
    )
    return query, key, value


def to_tokens(output: Tensor, group: SequenceGroup) -> Tensor:
    """``[1, tokens, heads / N, D]`` of all tokens -> ``[1, tokens / N, heads, D]`` of all heads."""
    swapped = _swapped(output[0].unflatten(0, (group.size, -1)), group)
    return swapped.transpose(0, 1).flatten(1, 2)[None]


def why_not_shared(config: Any, size: int) -> str:
    """Reason why ``size`` ranks cannot share the tokens of a model that mixes them by full attention; empty if they
    can.

    Args:
        config: transformers configuration of its layers.
    """
    heads, kind = int(config.num_attention_heads), rope_type(config)
    if heads % size:
        return f"has {heads} attention heads, which {size} ranks cannot share evenly"
    if kind in MOVING_ROPES:
        return f"has rotary embeddings of type {kind}, which depend on the longest sequence of a pass"
    return ""


def rope_type(config: Any) -> str:
    """Type of the rotary embeddings in a transformers configuration; empty if it names none."""
    settings = getattr(config, "rope_parameters", None) or {}
    return str(settings.get("rope_type", ""))


class _Whole(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        return group.total(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.swap(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.swap(grad), None


def _swapped(parts: Tensor, group: SequenceGroup) -> Tensor:
    swapped: Tensor = _Swap.apply(parts, group)
    return swapped
