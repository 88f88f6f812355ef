"""Contrastive preference optimisation (Xu et al. 2024, arXiv 2401.08417, eq. 3 and 5).

With ``d = log policy(chosen) - log policy(rejected)``, sums over tokens (means for ``ipo``), the loss of a pair is

``sigmoid``  - (1-e) log sigmoid(beta d) - e log sigmoid(-beta d)
``hinge``    max(0, 1 - beta d)
``ipo``      (d - 1 / (2 beta))^2

with ``e`` the share of flipped pairs. The loss of a step is the mean over its pairs plus ``nll_coefficient`` times the
mean cross-entropy of the tokens of its chosen completions. Values and gradients are those of TRL 1.16.0
(``trl/experimental/cpo/cpo_trainer.py``), whose ``cpo_alpha`` is ``nll_coefficient``.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_core.schemas.algorithms.preference import CpoSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums
from rlhf_core.training.algorithms.pairs import (
    PAIR_METRICS,
    chosen_nll,
    pair_stats,
    sequence_means,
    sequence_sums,
    smoothed_losses,
    value_stat,
)


def cpo_losses(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of each pair, without the cross-entropy.

    Args:
        chosen: ``[P]`` log-probabilities: sums over tokens, for ``ipo`` means.
        rejected: ``[P]``, likewise.
        beta: factor of the difference.
        label_smoothing: share of flipped pairs, below one half; of ``sigmoid`` only.

    Returns:
        ``[P]``, with gradient.
    """
    difference = chosen - rejected
    if loss == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if loss == "hinge":
        return torch.relu(1 - beta * difference)
    return smoothed_losses(beta * difference, label_smoothing)


class ContrastivePreferenceOptimisation(Objective):
    """:func:`cpo_losses` and the cross-entropy as an objective."""

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
        """See :func:`cpo_losses`."""
        rewards = self.rewards(output, batch, spec)
        chosen, rejected = (rewards / spec.beta).chunk(2)
        losses = cpo_losses(chosen, rejected, beta=spec.beta, loss=spec.loss, label_smoothing=spec.label_smoothing)
        share, stats = chosen_nll(output.logprobs, batch.mask, sums, spec.nll_coefficient)
        stats |= {"loss/cpo": value_stat(losses), **pair_stats(rewards)}
        return losses.sum() / sums.num_pairs + share, stats


OBJECTIVE = ContrastivePreferenceOptimisation()
