"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300, sec. 4.1).

For each prompt a group of G completions is sampled. With ``r_i`` the reward of completion ``i``

    A_i     = (r_i - mean(r)) / (std(r) + epsilon)
    rho_it  = policy(token t of i) / old policy(token t of i)
    L_it    = - min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i) + kl_coefficient * k3_it

and the loss aggregates ``L_it`` over tokens (``aggregation.py``). Options: ``std`` of the group, of the batch, or none
(Dr. GRPO, arXiv 2503.20783); ``clip_high > clip_low`` (clip-higher of DAPO, arXiv 2503.14476). Values and gradients
agree with TRL 1.16.0: its ``loss_type`` grpo is ``sequence_mean``, dapo and bnpo are ``token_mean`` (bnpo with the
tokens of one micro-batch as divisor), dr_grpo is ``fixed_length``.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_core.schemas.algorithms import GrpoSpec
from rlhf_core.training.algorithms.aggregation import Aggregation, Stats, masked_stat, step_normaliser, summed
from rlhf_core.training.algorithms.kl import k3
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums


def group_advantages(
    rewards: Tensor,
    scale: Literal["group", "batch", "none"] = "group",
    epsilon: float = 1e-4,
    batch_std: float | None = None,
) -> Tensor:
    """How much better each completion is than its group.

    Args:
        rewards: ``[P, G]``; computed in float64 whatever comes in.
        scale: what the differences are divided by: standard deviation (with G-1, as in TRL) of the group, of the
            batch, or nothing.
        epsilon: added to the standard deviation.
        batch_std: standard deviation over the batch of all ranks (:func:`std_of_moments`), for ``batch``; without it
            that of the rewards given.

    Returns:
        ``[P, G]`` float64. A group whose rewards are all equal has advantages of exactly 0.
    """
    rewards = rewards.double()
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if scale == "group":
        advantages = advantages / (rewards.std(-1, keepdim=True) + epsilon)
    elif scale == "batch":
        advantages = advantages / ((float(rewards.std()) if batch_std is None else batch_std) + epsilon)
    return torch.where(zero_std_groups(rewards)[:, None], 0.0, advantages)


def zero_std_groups(rewards: Tensor) -> Tensor:
    """``[P, G]`` rewards -> ``[P]`` bool: groups with nothing to learn from, because all their rewards are equal."""
    return rewards.amax(-1) == rewards.amin(-1)


def std_of_moments(count: float, total: float, total_of_squares: float) -> float:
    """Standard deviation (with count-1) from sums that can be added up over ranks."""
    if count < 2:
        return 0.0
    return float(max(0.0, (total_of_squares - total * total / count) / (count - 1)) ** 0.5)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    normaliser: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ref_logprobs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    aggregation: Aggregation = "token_mean",
) -> tuple[Tensor, Stats]:
    """Loss of one micro-batch.

    Args:
        logprobs: ``[B, T]`` log-probabilities under the policy, with gradient.
        old_logprobs: ``[B, T]`` under the policy that sampled; None where that is the same one (strictly on-policy):
            the ratio is then 1, and its gradient that of the log-probability.
        advantages: ``[B]``.
        mask: ``[B, T]`` bool, true for completion tokens.
        normaliser: ``step_normaliser`` of the whole optimizer step.
        clip_low: the ratio counts down to ``1 - clip_low``.
        clip_high: the ratio counts up to ``1 + clip_high``.
        ref_logprobs: ``[B, T]`` under the reference model; needed for the penalty, and to measure the divergence.
        kl_coefficient: weight of the k3 penalty.
        aggregation: how token losses become one number.

    Returns:
        The scalar loss, to be summed over micro-batches and ranks, and (sum, count) over tokens of ``loss/policy``
        (penalty included; a mean over tokens whatever the aggregation), ``policy/ratio``, ``policy/clip_low_share``
        and ``policy/clip_high_share`` (tokens whose gradient the clip took away), and ``policy/kl`` where there is a
        reference.

    Raises:
        ValueError: a penalty is asked for without ``ref_logprobs``.
    """
    if kl_coefficient and ref_logprobs is None:
        raise ValueError(
            f"found kl_coefficient = {kl_coefficient} without ref_logprobs; the penalty needs a reference model"
        )
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    gain = advantages.to(logprobs.dtype)[:, None]
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_losses = -torch.min(ratio * gain, clipped * gain)
    stats: Stats = {
        "policy/ratio": masked_stat(ratio, mask),
        "policy/clip_low_share": masked_stat(((ratio < 1 - clip_low) & (gain < 0)).double(), mask),
        "policy/clip_high_share": masked_stat(((ratio > 1 + clip_high) & (gain > 0)).double(), mask),
    }
    if ref_logprobs is not None:
        divergence = k3(logprobs, ref_logprobs)
        stats["policy/kl"] = masked_stat(divergence, mask)
        token_losses = token_losses + kl_coefficient * divergence if kl_coefficient else token_losses
    stats["loss/policy"] = masked_stat(token_losses, mask)
    return summed(token_losses, mask, aggregation) / normaliser, stats


class GroupRelativePolicyOptimisation(Objective):
    """:func:`group_advantages` and :func:`grpo_loss` as an objective, strictly on-policy."""

    metrics = (
        MetricDef("train/loss", ("loss/policy",), "Policy loss, penalty included; near 0 is normal."),
        MetricDef(
            "policy/clip_share",
            ("policy/clip_low_share", "policy/clip_high_share"),
            "Share of tokens whose probability ratio was clipped; 0 when strictly on-policy.",
        ),
        MetricDef("policy/kl", ("policy/kl",), "Divergence from the reference model (k3), in nats per token."),
    )

    def advantages(self, rewards: Tensor, sums: StepSums, spec: GrpoSpec) -> Tensor:
        """See :func:`group_advantages`."""
        batch_std = std_of_moments(sums.num_sequences, sums.reward_total, sums.reward_squares)
        return group_advantages(rewards, spec.advantage_scale, spec.advantage_epsilon, batch_std)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: GrpoSpec) -> tuple[Tensor, Stats]:
        """See :func:`grpo_loss`."""
        assert batch.advantages is not None  # of every loop that samples
        return grpo_loss(
            output.logprobs,
            None,
            batch.advantages,
            batch.mask,
            normaliser=step_normaliser(spec.loss_aggregation, sums.num_tokens, sums.num_sequences, sums.max_new_tokens),
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            ref_logprobs=output.ref_logprobs,
            kl_coefficient=spec.kl_coefficient,
            aggregation=spec.loss_aggregation,
        )


OBJECTIVE = GroupRelativePolicyOptimisation()
