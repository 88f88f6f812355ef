"""Aggregation of token losses into one number, and of statistics into sums and counts.

``token_mean``      sum over all tokens / tokens of the optimizer step              (DAPO, arXiv 2503.14476, eq. 8)
``sequence_mean``   sum over sequences of their token mean / sequences of the step  (GRPO, arXiv 2402.03300, eq. 3)
``fixed_length``    sum over all tokens / (sequences of the step x longest length)  (Dr. GRPO, arXiv 2503.20783, sec. 3)

The divisor always counts the whole optimizer step over all ranks. A mean per micro-batch would give short micro-batches
more weight, and the gradient would depend on how the batch was split.
"""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]

Stats = dict[str, tuple[Tensor, Tensor]]
"""Name to (sum, count), both float64 scalars without gradient. Sums and counts add up over micro-batches and ranks;
their quotient is the mean."""


def step_normaliser(aggregation: Aggregation, num_tokens: float, num_sequences: float, max_new_tokens: int) -> float:
    """Divisor of the summed loss of a whole optimizer step.

    Args:
        num_tokens: completion tokens of the step, over all ranks.
        num_sequences: completions of the step, over all ranks.
        max_new_tokens: the fixed length of ``fixed_length``.
    """
    if aggregation == "token_mean":
        return max(1.0, num_tokens)
    if aggregation == "sequence_mean":
        return max(1.0, num_sequences)
    return max(1.0, num_sequences * max_new_tokens)


def summed(token_losses: Tensor, mask: Tensor, aggregation: Aggregation) -> Tensor:
    """One micro-batch's share of the step's loss, before the division by :func:`step_normaliser`.

    Args:
        token_losses: ``[B, T]``.
        mask: ``[B, T]`` bool, true for completion tokens. A sequence without any contributes nothing.
    """
    kept = torch.where(mask, token_losses, 0.0)
    if aggregation == "sequence_mean":
        return (kept.sum(-1) / mask.sum(-1).clamp(min=1)).sum()
    return kept.sum()


def masked_stat(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) of the values ``[B, T]`` where ``mask`` is true, for :data:`Stats`."""
    with torch.no_grad():
        return torch.where(mask, values, 0.0).double().sum(), mask.double().sum()
