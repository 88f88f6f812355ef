"""Simple preference optimisation (Meng et al. 2024, arXiv 2405.14734, eq. 6).

With ``m`` the mean log-probability of a completion's tokens under the policy, the loss of a pair is

L = - (1-e) log sigmoid(x) - e log sigmoid(-x),    x = beta (m_chosen - m_rejected) - gamma

with ``e`` the share of flipped pairs, 0 in the paper. The loss of a step is the mean over its pairs. Values and
gradients are those of TRL 1.16.0 (``trl/experimental/cpo/cpo_trainer.py``) with ``loss_type="simpo"``, ``cpo_alpha=0``.
"""

from torch import Tensor

from rlhf_core.schemas.algorithms.preference import SimpoSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums
from rlhf_core.training.algorithms.pairs import PAIR_METRICS, pair_stats, sequence_means, smoothed_losses, value_stat


class SimplePreferenceOptimisation(Objective):
    """:func:`pairs.smoothed_losses` of the difference in mean log-probability, less a margin."""

    metrics = (MetricDef("train/loss", ("loss/simpo",)), *PAIR_METRICS)

    def rewards(self, output: PolicyOutput, batch: MicroBatch, spec: SimpoSpec) -> Tensor:
        """Implicit rewards: beta times the mean log-probability."""
        return spec.beta * sequence_means(output.logprobs, batch.mask)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: SimpoSpec) -> tuple[Tensor, Stats]:
        """See :func:`pairs.smoothed_losses`."""
        chosen, rejected = sequence_means(output.logprobs, batch.mask).chunk(2)
        losses = smoothed_losses(spec.beta * (chosen - rejected) - spec.gamma, spec.label_smoothing)
        stats = {"loss/simpo": value_stat(losses), **pair_stats(self.rewards(output, batch, spec))}
        return losses.sum() / sums.num_pairs, stats


OBJECTIVE = SimplePreferenceOptimisation()
