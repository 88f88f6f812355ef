"""Odds ratio preference optimisation (Hong et al. 2024, arXiv 2403.07691, eq. 4, 6 and 7).

With ``m`` the mean log-probability of a completion's tokens and ``log odds = m - log(1 - exp m)``, a pair has the loss

L = NLL(chosen) - beta log sigmoid(log odds of chosen - log odds of rejected)

The loss of a step is the mean over its pairs, except that the cross-entropy is averaged over all tokens of its chosen
sequences, prompts included. Values and gradients are those of TRL 1.16.0 (``trl/experimental/orpo/orpo_trainer.py``),
which computes the odds in float32 regardless of the format of the log-probabilities.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.schemas.algorithms.preference import OrpoSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums
from rlhf_core.training.algorithms.pairs import PAIR_METRICS, chosen_nll, pair_stats, sequence_means, value_stat


def log1mexp(values: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for ``x <= 0`` without cancellation (Maechler 2012, doi 10.18637/jss.v000.i00, eq. 7).

    A probability that rounds to 1, whose odds are infinite, is replaced with the next smaller number, without a
    gradient. The inputs of both branches are clamped, because ``where`` would turn an infinite gradient of the unused
    one into NaN.
    """
    below = values.clamp(max=-torch.finfo(values.dtype).eps)
    near_zero = below > -math.log(2)
    close = torch.log(-torch.expm1(torch.where(near_zero, below, -math.log(2))))
    far = torch.log1p(-torch.exp(torch.where(near_zero, -math.log(2), below)))
    return torch.where(near_zero, close, far)


def log_odds_ratios(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``[P]`` mean log-probabilities of the chosen and of the rejected completions -> ``[P]``."""
    return (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))


class OddsRatioPreferenceOptimisation(Objective):
    """Cross-entropy and odds ratio as an objective."""

    metrics = (
        MetricDef("train/loss", ("loss/odds", "loss/nll")),
        MetricDef("preference/nll", ("nll",)),
        MetricDef("preference/log_odds_chosen", ("log_odds",)),
        *PAIR_METRICS,
    )

    def rewards(self, output: PolicyOutput, batch: MicroBatch, spec: OrpoSpec) -> Tensor:
        """Implicit rewards: beta times the mean log-probability."""
        return spec.beta * sequence_means(output.logprobs, batch.mask)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: OrpoSpec) -> tuple[Tensor, Stats]:
        """See :func:`log_odds_ratios`."""
        assert batch.prompt_mask is not None  # of an algorithm that scores the prompt
        ratios = log_odds_ratios(*sequence_means(output.logprobs, batch.mask).chunk(2))
        losses = -spec.beta * logsigmoid(ratios)
        share, stats = chosen_nll(output.logprobs, batch.mask | batch.prompt_mask, sums)
        stats |= {"loss/odds": value_stat(losses), "log_odds": value_stat(ratios.detach())}
        return losses.sum() / sums.num_pairs + share, stats | pair_stats(self.rewards(output, batch, spec))


OBJECTIVE = OddsRatioPreferenceOptimisation()
