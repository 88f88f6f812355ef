"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300, sec. 4.1).

For each prompt a group of G completions is sampled. With ``r_i`` the reward of completion ``i``

    A_i     = (r_i - mean(r)) / (std(r) + epsilon)
    rho_it  = policy(token t of i) / old policy(token t of i)
    L_it    = - min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i) + kl_coefficient * kl_it

and the loss aggregates ``L_it`` over tokens (``aggregation.py``). Options: ``std`` of the group, of the batch, or none;
the estimator ``kl``, k3 in the paper. Values and gradients agree with TRL 1.16.0: its ``loss_type`` grpo is
``sequence_mean``, dapo and bnpo are ``token_mean`` (bnpo with the tokens of one micro-batch as divisor), dr_grpo is
``fixed_length``.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_core.schemas.algorithms.policy_gradient import GroupSpec
from rlhf_core.training.algorithms.aggregation import Aggregation
from rlhf_core.training.algorithms.objective import Advantages, SampledBatch, StepSums, per_token
from rlhf_core.training.algorithms.policy_gradient import PolicyGradient


def group_advantages(
    rewards: Tensor,
    scale: Literal["group", "batch", "none"] = "group",
    epsilon: float = 1e-4,
    batch_std: float | None = None,
) -> Tensor:
    """Advantage of each completion relative to its group.

    Args:
        rewards: ``[P, G]``; converted to float64.
        scale: divisor of the differences: standard deviation (with G-1, as in TRL) of the group, of the batch, or
            nothing.
        epsilon: added to the standard deviation.
        batch_std: standard deviation over the batch of all ranks (:func:`std_of_moments`), for ``batch``; that of the
            given rewards if omitted.

    Returns:
        ``[P, G]`` float64. A group whose rewards are all equal has advantages of exactly 0.
    """
    rewards = rewards.double()
    if not len(rewards):  # DAPO left out all groups of the rank, and torch warns of the deviation of nothing
        return rewards
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if scale == "group":
        advantages = advantages / (rewards.std(-1, keepdim=True) + epsilon)
    elif scale == "batch":
        advantages = advantages / ((float(rewards.std()) if batch_std is None else batch_std) + epsilon)
    return torch.where(zero_std_groups(rewards)[:, None], 0.0, advantages)


def zero_std_groups(rewards: Tensor) -> Tensor:
    """``[P, G]`` rewards -> ``[P]`` bool: groups that give no signal because all their rewards are equal."""
    return rewards.amax(-1) == rewards.amin(-1)


def std_of_moments(count: float, total: float, total_of_squares: float) -> float:
    """Standard deviation (with count-1) from sums that add up over ranks."""
    if count < 2:
        return 0.0
    return float(max(0.0, (total_of_squares - total * total / count) / (count - 1)) ** 0.5)


class GroupRelativePolicyOptimisation(PolicyGradient):
    """:func:`group_advantages` with the clipped surrogate."""

    def advantages(self, batch: SampledBatch, sums: StepSums, spec: GroupSpec) -> Advantages:
        """See :func:`group_advantages`."""
        batch_std = std_of_moments(sums.num_sequences, sums.reward_total, sums.reward_squares)
        rewards = self.shaped(batch, sums.max_new_tokens, spec)
        by_group = group_advantages(rewards, spec.advantage_scale, spec.advantage_epsilon, batch_std)
        return Advantages(per_token(by_group.flatten(), batch.mask))

    def aggregation(self, spec: GroupSpec) -> Aggregation:
        """Return ``loss_aggregation``."""
        return spec.loss_aggregation

    def weighs_penalty(self, spec: GroupSpec) -> bool:
        """Return ``kl_weighted``."""
        return spec.kl_weighted


OBJECTIVE = GroupRelativePolicyOptimisation()
