"""Supervised fine-tuning: the mean negative log-likelihood of the target tokens.

L = - sum over target tokens of log policy(token | what precedes it) / target tokens of the optimizer step
"""

from torch import Tensor

from rlhf_core.schemas.algorithms.supervised import SftSpec
from rlhf_core.training.algorithms.aggregation import Stats, masked_stat, summed
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums


class SupervisedFineTuning(Objective):
    """Cross-entropy of the target tokens."""

    metrics = (MetricDef("train/loss", ("loss/sft",)),)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: SftSpec) -> tuple[Tensor, Stats]:
        """Mean over the target tokens of the step."""
        loss = summed(-output.logprobs, batch.mask, "token_mean") / sums.num_tokens
        return loss, {"loss/sft": masked_stat(-output.logprobs, batch.mask)}


OBJECTIVE = SupervisedFineTuning()
