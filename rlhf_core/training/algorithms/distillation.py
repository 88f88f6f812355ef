"""On-policy distillation (Agarwal et al. 2024, arXiv 2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation).

    A_t = - sum over later tokens k >= t of discount^(k - t) kl_coefficient (log policy(k) - log teacher(k))

with the clipped surrogate and the mean over all tokens. With ``discount`` 0, the expected gradient at a state that the
policy has reached is that of the reverse KL divergence, KL(policy || teacher), over the whole vocabulary:

    E_policy[(log policy - log teacher) grad log policy] = grad KL(policy || teacher)

so the loss needs the teacher's log-probabilities of the sampled tokens alone. Rewards have no part in it.
"""

from rlhf_core.schemas.algorithms.policy_gradient import DistillationSpec
from rlhf_core.training.algorithms.advantages import discounted_returns, kl_penalties
from rlhf_core.training.algorithms.objective import Advantages, SampledBatch, StepSums
from rlhf_core.training.algorithms.policy_gradient import PolicyGradient


class Distillation(PolicyGradient):
    """Divergence from the teacher, token by token, with the clipped surrogate."""

    def advantages(self, batch: SampledBatch, sums: StepSums, spec: DistillationSpec) -> Advantages:
        """See :func:`advantages.kl_penalties` and :func:`advantages.discounted_returns`."""
        return Advantages(discounted_returns(-kl_penalties(batch, spec), spec.discount))


OBJECTIVE = Distillation()
