"""Group sequence policy optimisation (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7).

    s_i = (policy(completion i) / old policy(completion i)) ^ (1 / length of i)
    L   = - mean over completions of min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

with GRPO's advantage ``A_i``. As in TRL 1.16.0 with ``importance_sampling_level="sequence"`` and ``loss_type="grpo"``.
"""

from torch import Tensor

from rlhf_core.training.algorithms.grpo import GroupRelativePolicyOptimisation
from rlhf_core.training.algorithms.surrogate import mean_ratio


class GroupSequencePolicyOptimisation(GroupRelativePolicyOptimisation):
    """GRPO with one ratio for each completion."""

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        """See :func:`surrogate.mean_ratio`."""
        return mean_ratio(logprobs, old_logprobs, mask)


OBJECTIVE = GroupSequencePolicyOptimisation()
