"""Proximal policy optimisation with a value model (PPO, Schulman et al. 2017, arXiv 1707.06347).

The reward of a completion comes at its last token, and each token pays ``kl_coefficient * kl_t`` for leaving the
reference (Ouyang et al. 2022, arXiv 2203.02155, sec. 3.5). Advantages are those of generalised advantage estimation,
whitened to mean 0 and variance 1 over all tokens of the step, on all ranks. The policy minimises the clipped surrogate;
the value model, with value ``v_t``, old value ``v'_t`` and return ``R_t = A_t + v'_t``, minimises

    L_t = 1/2 max((v_t - R_t)^2, (clip(v_t, v'_t - value_clip, v'_t + value_clip) - R_t)^2)

Both are means over all tokens of the update.
"""

import torch
from torch import Tensor

from rlhf_core.schemas.algorithms.policy_gradient import PpoSpec
from rlhf_core.training.algorithms.advantages import generalised_advantages, token_rewards
from rlhf_core.training.algorithms.aggregation import Stats, masked_stat, summed
from rlhf_core.training.algorithms.objective import Advantages, MetricDef, SampledBatch, StepSums, Whitening
from rlhf_core.training.algorithms.policy_gradient import POLICY_METRICS, PolicyGradient


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, normaliser: float, value_clip: float
) -> tuple[Tensor, Stats]:
    """Clipped loss of the value model for one micro-batch.

    Args:
        values: ``[B, T]`` with gradient.
        old_values: ``[B, T]`` at the beginning of the step.
        returns: ``[B, T]`` targets.
        mask: ``[B, T]`` bool, true for tokens that count.
        normaliser: tokens of the whole update, over all ranks.
        value_clip: largest distance from the old value at which the new one counts.

    Returns:
        The scalar loss, to be summed over micro-batches and ranks, and ``value/loss`` and ``value/clip_share``.
    """
    returns, old_values = returns.to(values.dtype), old_values.to(values.dtype)
    clipped = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    losses, bounded = (values - returns).square(), (clipped - returns).square()
    token_losses = torch.max(losses, bounded) / 2
    stats = {
        "value/loss": masked_stat(token_losses, mask),
        "value/clip_share": masked_stat((bounded > losses).double(), mask),
    }
    return summed(token_losses, mask, "token_mean") / normaliser, stats


class ProximalPolicyOptimisation(PolicyGradient):
    """GAE with the clipped surrogate, and the clipped loss of the value model."""

    metrics = (
        *POLICY_METRICS,
        MetricDef("value/loss", ("value/loss",)),
        MetricDef("value/clip_share", ("value/clip_share",)),
    )

    def advantages(self, batch: SampledBatch, sums: StepSums, spec: PpoSpec) -> Advantages:
        """See :func:`advantages.generalised_advantages`."""
        assert batch.values is not None  # of every algorithm with a critic
        rewards = token_rewards(batch.rewards.flatten(), batch, spec)
        found = generalised_advantages(rewards, batch.values, batch.mask, spec.discount, spec.gae_lambda)
        return Advantages(found, torch.where(batch.mask, found + batch.values.double(), 0.0))

    def whitens(self, spec: PpoSpec) -> Whitening:
        """Whiten over tokens."""
        return "tokens"


OBJECTIVE = ProximalPolicyOptimisation()
