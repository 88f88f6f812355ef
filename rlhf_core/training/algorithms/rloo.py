"""REINFORCE leave-one-out (RLOO, Ahmadian et al. 2024, arXiv 2402.14740, sec. 2.3).

For each prompt G completions are sampled. With the penalty of the whole completion subtracted from its reward

    R_i = r_i - kl_coefficient * sum over t of kl_it
    A_i = R_i - mean of R_j over the other G - 1 completions
    L   = - mean over completions of min(rho_i A_i, clip(rho_i, 1 - clip_low, 1 + clip_high) A_i)

where ``rho_i`` is the ratio of the probabilities of the whole completion. A truncated completion that is left out of
the loss (``mask_truncated``) pays no penalty. As in TRL 1.16.0, which only adds the constant ``-A_i`` of such a
completion to the value of the loss.
"""

from typing import Any

import torch
from torch import Tensor

from rlhf_core.schemas.algorithms.policy_gradient import RlooSpec
from rlhf_core.training.algorithms.advantages import kl_penalties
from rlhf_core.training.algorithms.aggregation import Aggregation
from rlhf_core.training.algorithms.objective import Advantages, SampledBatch, StepSums, Whitening, per_token
from rlhf_core.training.algorithms.policy_gradient import PolicyGradient
from rlhf_core.training.algorithms.surrogate import sequence_ratio


def leave_one_out(rewards: Tensor) -> Tensor:
    """``[P, G]`` rewards -> difference of each from the mean of the others in its group, ``[P, G]`` float64."""
    rewards = rewards.double()
    return rewards - (rewards.sum(-1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


class ReinforceLeaveOneOut(PolicyGradient):
    """:func:`leave_one_out` with the clipped surrogate of whole completions."""

    def advantages(self, batch: SampledBatch, sums: StepSums, spec: RlooSpec) -> Advantages:
        """See :func:`leave_one_out`."""
        penalties = torch.where(batch.trained, kl_penalties(batch, spec), 0.0).sum(-1).view_as(batch.rewards)
        return Advantages(per_token(leave_one_out(batch.rewards - penalties).flatten(), batch.mask))

    def whitens(self, spec: RlooSpec) -> Whitening:
        """Whiten over completions, if the settings enable it."""
        return "sequences" if spec.normalise_advantages else "no"

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        """See :func:`surrogate.sequence_ratio`."""
        return sequence_ratio(logprobs, old_logprobs, mask)

    def aggregation(self, spec: Any) -> Aggregation:
        """Mean over completions, each with one ratio."""
        return "sequence_mean"


OBJECTIVE = ReinforceLeaveOneOut()
