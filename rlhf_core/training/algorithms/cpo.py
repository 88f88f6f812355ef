"""Contrastive preference optimisation (Xu et al. 2024, arXiv 2401.08417, eq. 3 and 5).

With ``d = log policy(chosen) - log policy(rejected)``, sums over tokens (means for ``ipo``), the loss of a pair is

``sigmoid``  - (1-e) log sigmoid(beta d) - e log sigmoid(-beta d)
``hinge``    max(0, 1 - beta d)
``ipo``      (d - 1 / (2 beta))^2

with ``e`` the share of flipped pairs. The loss of a step is the mean over its pairs plus ``nll_coefficient`` times the
mean cross-entropy of the tokens of its chosen completions. Values and gradients are those of TRL 1.16.0
(``trl/experimental/cpo/cpo_trainer.py``), whose ``cpo_alpha`` is ``nll_coefficient``.
"""

from torch import Tensor

from rlhf_core.schemas.algorithms.preference import CpoSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums
from rlhf_core.training.algorithms.pairs import (
    PAIR_METRICS,
    chosen_nll,
    pair_losses,
    pair_stats,
    sequence_means,
    sequence_sums,
    value_stat,
)


class ContrastivePreferenceOptimisation(Objective):
    """:func:`pairs.pair_losses` of the log-probabilities, and the cross-entropy."""

    metrics = (
        MetricDef("train/loss", ("loss/cpo", "loss/nll")),
        MetricDef("preference/nll", ("nll",)),
        *PAIR_METRICS,
    )

    def rewards(self, output: PolicyOutput, batch: MicroBatch, spec: CpoSpec) -> Tensor:
        """Implicit rewards: beta times the log-probability, per token for ``ipo``."""
        reduce = sequence_means if spec.loss == "ipo" else sequence_sums
        return spec.beta * reduce(output.logprobs, batch.mask)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: CpoSpec) -> tuple[Tensor, Stats]:
        """See :func:`pairs.pair_losses`."""
        rewards = self.rewards(output, batch, spec)
        chosen, rejected = (rewards / spec.beta).chunk(2)
        losses = pair_losses(chosen, rejected, beta=spec.beta, loss=spec.loss, label_smoothing=spec.label_smoothing)
        share, stats = chosen_nll(output.logprobs, batch.mask, sums, spec.nll_coefficient)
        stats |= {"loss/cpo": value_stat(losses), **pair_stats(rewards)}
        return losses.sum() / sums.num_pairs + share, stats


OBJECTIVE = ContrastivePreferenceOptimisation()
