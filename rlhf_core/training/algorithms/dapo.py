"""Decoupled clip and dynamic sampling policy optimisation (DAPO, Yu et al. 2025, arXiv 2503.14476).

GRPO's advantage and clipped surrogate with

- ``clip_high`` above ``clip_low`` (eq. 8, clip-higher), and the mean over all tokens of the update (token-level loss);
- groups whose rewards are all equal replaced by others (eq. 8, dynamic sampling: ``trainers/sampling.py``);
- completions that were cut off left out of the loss (sec. 3.4, overlong filtering);
- a reward for length ``n`` with ``N`` the longest and ``C`` the buffer (eq. 13, soft overlong punishment):

      0 if n <= N - C,  ((N - C) - n) / C * overlong_penalty  otherwise

Mean and deviation are those of the rewards with this one, as where it is one of TRL's reward functions.
"""

from torch import Tensor

from rlhf_core.schemas.algorithms.policy_gradient import DapoSpec
from rlhf_core.training.algorithms.grpo import GroupRelativePolicyOptimisation
from rlhf_core.training.algorithms.objective import SampledBatch


def overlong_rewards(lengths: Tensor, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Rewards for lengths ``[B]`` alone: from 0 down to ``-penalty`` at the longest length, ``[B]`` float64."""
    if not buffer:
        return lengths.double() * 0
    excess = (lengths.double() - (max_new_tokens - buffer)).clamp(min=0)
    return -excess.clamp(max=buffer) / buffer * penalty


class DecoupledClip(GroupRelativePolicyOptimisation):
    """GRPO on rewards with the punishment."""

    def shaped(self, batch: SampledBatch, max_new_tokens: int, spec: DapoSpec) -> Tensor:
        """See :func:`overlong_rewards`."""
        added = overlong_rewards(batch.mask.sum(-1), max_new_tokens, spec.overlong_buffer, spec.overlong_penalty)
        return batch.rewards + added.view_as(batch.rewards)


OBJECTIVE = DecoupledClip()
