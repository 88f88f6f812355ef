"""Decoupled clip and dynamic sampling policy optimisation (DAPO, Yu et al. 2025, arXiv 2503.14476).

GRPO's advantage and clipped surrogate with

- ``clip_high`` above ``clip_low`` (eq. 8, clip-higher), and the mean over all tokens of the update (token-level loss);
- replacement of groups whose rewards are all equal (eq. 8, dynamic sampling: ``trainers/sampling.py``);
- exclusion of truncated completions from the loss (sec. 3.4, overlong filtering);
- a reward for length ``n`` (observations between turns included), with ``N`` the maximum length and ``C`` the buffer
  (eq. 13, soft overlong punishment):

      0 if n <= N - C,  ((N - C) - n) / C * overlong_penalty  otherwise

Mean and deviation include this reward, as they do if it is passed to TRL as a reward function.
"""

from torch import Tensor

from rlhf_core.schemas.algorithms.policy_gradient import DapoSpec
from rlhf_core.training.algorithms.grpo import GroupRelativePolicyOptimisation
from rlhf_core.training.algorithms.objective import SampledBatch


def overlong_rewards(lengths: Tensor, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Rewards for the lengths ``[B]`` alone: from 0 down to ``-penalty`` at the maximum length, ``[B]`` float64."""
    if not buffer:
        return lengths.double() * 0
    excess = (lengths.double() - (max_new_tokens - buffer)).clamp(min=0)
    return -excess.clamp(max=buffer) / buffer * penalty


class DecoupledClip(GroupRelativePolicyOptimisation):
    """GRPO on rewards that include the overlong punishment."""

    def shaped(self, batch: SampledBatch, max_new_tokens: int, spec: DapoSpec) -> Tensor:
        """See :func:`overlong_rewards`."""
        added = overlong_rewards(batch.lengths, max_new_tokens, spec.overlong_buffer, spec.overlong_penalty)
        return batch.rewards + added.view_as(batch.rewards)


OBJECTIVE = DecoupledClip()
