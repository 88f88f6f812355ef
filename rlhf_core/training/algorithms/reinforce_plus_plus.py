"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262, sec. 3).

    A_t = sum over later tokens k >= t of discount^(k - t) (r at the last token - kl_coefficient * kl_k)

whitened to mean 0 and variance 1 over all tokens of the step, on all ranks, with the clipped surrogate and the mean
over all tokens. As in OpenRLHF with ``advantage_estimator reinforce``.
"""

from rlhf_core.schemas.algorithms.policy_gradient import ReinforcePlusPlusSpec
from rlhf_core.training.algorithms.advantages import discounted_returns, token_rewards
from rlhf_core.training.algorithms.objective import Advantages, SampledBatch, StepSums, Whitening
from rlhf_core.training.algorithms.policy_gradient import PolicyGradient


class ReinforcePlusPlus(PolicyGradient):
    """Whitened returns with the clipped surrogate."""

    def advantages(self, batch: SampledBatch, sums: StepSums, spec: ReinforcePlusPlusSpec) -> Advantages:
        """See :func:`advantages.discounted_returns`."""
        return Advantages(discounted_returns(token_rewards(batch.rewards.flatten(), batch, spec), spec.discount))

    def whitens(self, spec: ReinforcePlusPlusSpec) -> Whitening:
        """Whiten over tokens."""
        return "tokens"


OBJECTIVE = ReinforcePlusPlus()
