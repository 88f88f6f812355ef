"""REINFORCE++ with a baseline (Hu et al. 2025, arXiv 2501.03262, sec. 3).

    A_i = r_i - mean of the group's r

at each token, whitened to mean 0 and variance 1 over all tokens of the step, on all ranks, with the clipped surrogate,
the mean over all tokens, and the penalty in the loss (k2). As in OpenRLHF with ``advantage_estimator
reinforce_baseline``.
"""

from rlhf_core.schemas.algorithms.policy_gradient import ReinforcePlusPlusBaselineSpec
from rlhf_core.training.algorithms.grpo import group_advantages
from rlhf_core.training.algorithms.objective import Advantages, SampledBatch, StepSums, Whitening, per_token
from rlhf_core.training.algorithms.policy_gradient import PolicyGradient


class ReinforcePlusPlusBaseline(PolicyGradient):
    """Whitened differences from the group's mean with the clipped surrogate."""

    def advantages(self, batch: SampledBatch, sums: StepSums, spec: ReinforcePlusPlusBaselineSpec) -> Advantages:
        """See :func:`grpo.group_advantages`."""
        return Advantages(per_token(group_advantages(batch.rewards, "none").flatten(), batch.mask))

    def whitens(self, spec: ReinforcePlusPlusBaselineSpec) -> Whitening:
        """Whiten over tokens."""
        return "tokens"


OBJECTIVE = ReinforcePlusPlusBaseline()
