"""Supervised fine-tuning: the mean negative log-likelihood of the target tokens.

L = - sum over target tokens of log policy(token | what precedes it) / target tokens of the optimizer step
"""

from torch import Tensor

from rlhf_core.schemas.algorithms.supervised import SftSpec
from rlhf_core.training.algorithms.aggregation import Stats, masked_stat, summed
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums


def sft_loss(logprobs: Tensor, mask: Tensor, normaliser: float) -> tuple[Tensor, Stats]:
    """Loss of one micro-batch.

    Args:
        logprobs: ``[B, T]`` log-probabilities of the tokens, with gradient.
        mask: ``[B, T]`` bool, true for target tokens.
        normaliser: target tokens of the whole optimizer step, over all ranks.

    Returns:
        The scalar loss, to be summed over micro-batches and ranks, and ``loss/sft`` as (sum, count).
    """
    return summed(-logprobs, mask, "token_mean") / normaliser, {"loss/sft": masked_stat(-logprobs, mask)}


class SupervisedFineTuning(Objective):
    """:func:`sft_loss` as an objective."""

    metrics = (MetricDef("train/loss", ("loss/sft",)),)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: SftSpec) -> tuple[Tensor, Stats]:
        """See :func:`sft_loss`."""
        return sft_loss(output.logprobs, batch.mask, sums.num_tokens)


OBJECTIVE = SupervisedFineTuning()
