"""Building blocks for the losses of algorithms that sample. Pure functions over ``[B, T]`` tensors.

With ``rho_t = policy(t) / old policy(t)`` of a token and ``A_t`` its advantage, the clipped surrogate is

    L_t = - min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)      (Schulman et al. 2017, arXiv 1707.06347)

For ``A_t < 0`` it grows with ``rho_t`` without bound. The dual clip (Ye et al. 2020, arXiv 1912.09729) replaces
the first ``rho_t`` by ``min(rho_t, dual_clip)``, which beyond ``1 + clip_high`` changes negative advantages alone.

The sampling engine and the trainer give the same token slightly different probabilities. The correction weights ``L_t``
with ``w = old policy / sampler``, of each token or of a whole completion, truncated at a cap or set to 0 above it
(truncated importance sampling: https://fengyao.notion.site/off-policy-rl; formulas as in TRL 1.16.0).
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_core.training.algorithms.aggregation import Stats, masked_stat

MAX_LOG_RATIO = 20.0
"""Bound of the log-ratios (as in verl). Without one, a ratio that the clip replaces overflows, and its gradient is 0
times infinity: NaN."""

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Probability ratio of each token, ``[B, T]``."""
    return _exp(logprobs - old_logprobs)


def mean_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Geometric mean of the ratios of a sequence at each of its tokens, ``[B, T]`` (GSPO, arXiv 2507.18071, eq. 7)."""
    differences = torch.where(mask, logprobs - old_logprobs, 0.0)
    mean = differences.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return _exp(mean).expand_as(differences)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Ratio of the probabilities of a whole sequence at each of its tokens, ``[B, T]``."""
    differences = torch.where(mask, logprobs - old_logprobs, 0.0)
    return _exp(differences.sum(-1, keepdim=True)).expand_as(differences)


def _exp(log_ratios: Tensor) -> Tensor:
    return torch.exp(log_ratios.clamp(max=MAX_LOG_RATIO))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Stats]:
    """Clipped surrogate loss of each token.

    Args:
        ratio: ``[B, T]``.
        advantages: ``[B, T]`` or ``[B, 1]``.
        mask: ``[B, T]`` bool, true for tokens that count.
        clip_low: the ratio counts down to ``1 - clip_low``.
        clip_high: the ratio counts up to ``1 + clip_high``.
        dual_clip: at a negative advantage, the ratio counts up to this, more than ``1 + clip_high``; 0: no bound.

    Returns:
        ``[B, T]`` losses, and ``policy/clip_low_share`` and ``policy/clip_high_share`` (tokens whose gradient the clip
        removed), and with a dual clip ``policy/dual_clip_share``, likewise.
    """
    gain = advantages.to(ratio.dtype)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    stats: Stats = {
        "policy/clip_low_share": masked_stat(((ratio < 1 - clip_low) & (gain < 0)).double(), mask),
        "policy/clip_high_share": masked_stat(((ratio > 1 + clip_high) & (gain > 0)).double(), mask),
    }
    if dual_clip:
        stats["policy/dual_clip_share"] = masked_stat(((ratio > dual_clip) & (gain < 0)).double(), mask)
        ratio = ratio.clamp(max=dual_clip)
    return -torch.min(ratio * gain, clipped * gain), stats


def mismatch_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, correction: Correction, cap: float
) -> Tensor:
    """Weights that correct the mismatch of sampler and trainer; without gradient.

    Args:
        old_logprobs: ``[B, T]`` under the policy at the beginning of the step, by the trainer.
        sampler_logprobs: ``[B, T]`` by the engine that sampled; a token for which it reported none (NaN) has ratio 1.
        mask: ``[B, T]`` bool, true for sampled tokens.
        correction: ratio of each token or of the whole completion; truncated at ``cap`` or 0 above it.
        cap: largest ratio that counts.

    Returns:
        ``[B, T]``, or ``[B, 1]`` for completions.
    """
    differences = torch.where(mask, (old_logprobs - sampler_logprobs).detach(), 0.0).nan_to_num(nan=0.0)
    if correction.startswith("sequence"):
        differences = differences.sum(-1, keepdim=True)
    ratio = torch.exp(differences)
    return ratio.clamp(max=cap) if correction.endswith("truncate") else torch.where(ratio > cap, 0.0, ratio)
