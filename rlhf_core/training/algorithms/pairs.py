"""Common parts of pairwise losses: one number per sequence, and the comparison of the two sequences of a pair."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.training.algorithms.aggregation import Stats, masked_stat
from rlhf_core.training.algorithms.objective import MetricDef, PolicyOutput, StepSums

PAIR_METRICS = (
    MetricDef("preference/accuracy", ("accuracy",)),
    MetricDef("preference/margin", ("margin",)),
    MetricDef("preference/chosen_reward", ("chosen_reward",)),
    MetricDef("preference/rejected_reward", ("rejected_reward",)),
)
"""Metrics of every algorithm that learns from pairs; wrapped trainers use the same names."""


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]`` values -> ``[B]``, their sums where ``mask`` is true."""
    return torch.where(mask, values, 0.0).sum(-1)


def sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]`` values -> ``[B]``, their means where ``mask`` is true; 0 for a sequence without any."""
    return sequence_sums(values, mask) / mask.sum(-1).clamp(min=1)


def log_ratios(output: PolicyOutput) -> Tensor:
    """``[B, T]`` log-ratios of policy and reference, for an algorithm that has one."""
    assert output.ref_logprobs is not None
    return output.logprobs - output.ref_logprobs


def pair_losses(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of each pair, by the formulas of ``dpo.py`` and ``cpo.py``.

    Args:
        chosen: ``[P]`` log-probabilities, or log-ratios of policy and reference: sums over tokens, for ``ipo`` means.
        rejected: ``[P]``, likewise.
        beta: factor of the difference.
        label_smoothing: share of flipped pairs, below one half; of ``sigmoid`` and ``robust`` only.

    Returns:
        ``[P]``, with gradient.
    """
    difference = chosen - rejected
    if loss == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if loss == "hinge":
        return torch.relu(1 - beta * difference)
    if loss == "robust":
        clean, flipped = logsigmoid(beta * difference), logsigmoid(-beta * difference)
        return (-(1 - label_smoothing) * clean + label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return smoothed_losses(beta * difference, label_smoothing)


def smoothed_losses(logits: Tensor, label_smoothing: float) -> Tensor:
    """``[P]`` logits of the pairs -> ``[P]``, their cross-entropy assuming that a share of the pairs is flipped."""
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def chosen_nll(logprobs: Tensor, mask: Tensor, sums: StepSums, coefficient: float = 1.0) -> tuple[Tensor, Stats]:
    """Cross-entropy of the chosen sequences, which some algorithms add to the loss of the pairs.

    Args:
        logprobs: ``[2P, T]``, those of the chosen sequences first.
        mask: ``[2P, T]`` bool, true for the tokens that count.
        coefficient: weight in the loss.

    Returns:
        The micro-batch's share of the loss of the step, and as statistics ``nll`` and that share as ``loss/nll`` over
        pairs.
    """
    nll, mask = (values.chunk(2)[0] for values in (-logprobs, mask))
    share = coefficient * torch.where(mask, nll, 0.0).sum() / sums.num_chosen_tokens
    num_pairs = torch.tensor(len(nll), dtype=torch.float64, device=nll.device)
    return share, {
        "nll": masked_stat(nll, mask),
        "loss/nll": (share.detach().double() * sums.num_pairs, num_pairs),
    }


def pair_stats(rewards: Tensor) -> Stats:
    """Statistics for :data:`PAIR_METRICS`.

    Args:
        rewards: ``[2P]``, those of the chosen completions first.
    """
    with torch.no_grad():
        chosen, rejected = rewards.detach().double().chunk(2)
        found = {
            "accuracy": (chosen > rejected).double(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        return {name: value_stat(values) for name, values in found.items()}


def value_stat(values: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) of values, one per pair or sequence, for the statistics of a loss."""
    with torch.no_grad():
        return values.double().sum(), torch.tensor(values.numel(), dtype=torch.float64, device=values.device)
