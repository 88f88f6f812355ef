"""Advantages from rewards, token by token: penalty, returns, generalised advantage estimation, whitening.

All functions are pure, over ``[B, T]`` float64 tensors on the CPU; masks are true for sampled tokens, which come first
in each row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_core.schemas.algorithms.policy_gradient import PolicyGradientSpec
from rlhf_core.training.algorithms.kl import divergence
from rlhf_core.training.algorithms.objective import SampledBatch

_LEAST_VARIANCE = 1e-8
_DEVIATION_EPSILON = 1e-4


def kl_penalties(batch: SampledBatch, spec: PolicyGradientSpec) -> Tensor:
    """Penalty of each token, subtracted from the rewards: ``kl_coefficient * kl_t``, or 0 without a penalty."""
    if not spec.kl_coefficient:
        return torch.zeros(batch.mask.shape, dtype=torch.float64)
    assert batch.logprobs is not None  # AlgorithmSpec.scores_first
    assert batch.ref_logprobs is not None  # AlgorithmSpec.reference
    estimates = divergence(batch.logprobs.double(), batch.ref_logprobs.double(), spec.kl_estimator)
    return spec.kl_coefficient * torch.where(batch.mask, estimates, 0.0)


def token_rewards(rewards: Tensor, batch: SampledBatch, spec: PolicyGradientSpec) -> Tensor:
    """Reward of each token: that of the whole completion ``[B]`` at its last token, minus the penalty at each token."""
    num_tokens = batch.mask.sum(-1)
    last = torch.arange(batch.mask.shape[1]) == (num_tokens - 1)[:, None]
    return torch.where(last, rewards.double()[:, None], 0.0) - kl_penalties(batch, spec)


def discounted_returns(rewards: Tensor, discount: float) -> Tensor:
    """``G_t = r_t + discount * G_{t+1}``."""
    returns = torch.zeros_like(rewards)
    after = torch.zeros(rewards.shape[0], dtype=rewards.dtype)
    for position in reversed(range(rewards.shape[1])):
        after = rewards[:, position] + discount * after
        returns[:, position] = after
    return returns


def generalised_advantages(rewards: Tensor, values: Tensor, mask: Tensor, discount: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    ``delta_t = r_t + discount * V_{t+1} - V_t`` and ``A_t = delta_t + discount * gae_lambda * A_{t+1}``, with 0 for the
    value after the last token, truncated or not.
    """
    values = torch.where(mask, values.double(), 0.0)
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], -1)
    deltas = torch.where(mask, rewards + discount * after - values, 0.0)
    return discounted_returns(deltas, discount * gae_lambda)


def moments(values: Tensor) -> list[float]:
    """Count, sum and sum of squares of the values, which add up over ranks."""
    return [values.numel(), float(values.double().sum()), float(values.double().square().sum())]


def whitened_tokens(advantages: Tensor, mask: Tensor, sums: Sequence[float]) -> Tensor:
    """Advantages with mean 0 and variance 1 over all tokens, as in OpenRLHF: ``(A - mean) / sqrt(max(var, 1e-8))``.

    Args:
        sums: :func:`moments` of all ranks.
    """
    count, total, squares = sums
    mean = total / max(1.0, count)
    variance = max(squares / max(1.0, count) - mean * mean, _LEAST_VARIANCE)
    return torch.where(mask, (advantages - mean) / variance**0.5, 0.0)


def whitened_sequences(advantages: Tensor, mask: Tensor, sums: Sequence[float]) -> Tensor:
    """Advantages whitened over completions, as in TRL 1.16.0's RLOO: ``(A - mean) / (std + 1e-4)``, std with count -
    1."""
    count, total, squares = sums
    mean = total / max(1.0, count)
    deviation = max(0.0, (squares - total * mean) / max(1.0, count - 1)) ** 0.5
    return torch.where(mask, (advantages - mean) / (deviation + _DEVIATION_EPSILON), 0.0)
