"""Clipped importance-sampling policy optimisation (CISPO, MiniMax 2025, arXiv 2506.13585, eq. 4 and 5).

    L_t = - stop_gradient(min(rho_t, 1 + clip_high)) A_t log policy(t)

with GRPO's advantage, and the mean over all tokens of the update. The clip bounds the weight of a token, but never
removes its gradient. As in TRL 1.16.0, whose ``epsilon_high`` is ``1 + clip_high`` here.
"""

from typing import Any

from torch import Tensor

from rlhf_core.training.algorithms.aggregation import Stats, masked_stat
from rlhf_core.training.algorithms.grpo import GroupRelativePolicyOptimisation


class ClippedImportanceSampling(GroupRelativePolicyOptimisation):
    """GRPO's advantages with weighted log-probabilities."""

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, spec: Any
    ) -> tuple[Tensor, Stats]:
        """Weighted log-probabilities; a token counts as clipped if its weight is bounded."""
        ratio = self.ratio(logprobs, old_logprobs, mask).detach()
        gain = advantages.to(logprobs.dtype)
        clipped = ((ratio > 1 + spec.clip_high) & (gain > 0)).double()
        stats: Stats = {
            "policy/clip_low_share": masked_stat(clipped * 0, mask),
            "policy/clip_high_share": masked_stat(clipped, mask),
        }
        return -ratio.clamp(max=1 + spec.clip_high) * gain * logprobs, stats


OBJECTIVE = ClippedImportanceSampling()
