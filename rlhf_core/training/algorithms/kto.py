"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7 and 8).

With ``h = log policy(y|x) - log reference(y|x)``, a sum over the completion's tokens, and ``y'`` the completion of
another row of the step,

    z = max(0, mean of log policy(y'|x) - log reference(y'|x) over the rows of the step),   without a gradient
    L = desirable_weight   (1 - sigmoid(beta (h - z)))   of a desirable completion
    L = undesirable_weight (1 - sigmoid(beta (z - h)))   of an undesirable one

and the loss of a step is the mean over its rows. Formula and weights are those of TRL 1.16.0
(``trl/trainer/kto_trainer.py``, ``_compute_loss``), but TRL recomputes ``z`` for every micro-batch, averaged over the
ranks, so its gradient depends on how the batch of a step is split. Here ``z`` belongs to the whole step, and ``y'`` is
the completion of the previous row (of the last row for the first one). With one micro-batch on one rank the two agree.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_core.schemas.algorithms.preference import KtoSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums
from rlhf_core.training.algorithms.pairs import log_ratios, sequence_sums, value_stat


class KahnemanTverskyOptimisation(Objective):
    """Utility of each completion against the divergence of the step."""

    metrics = (
        MetricDef("train/loss", ("loss/kto",)),
        MetricDef("preference/kl", ("kl",)),
        MetricDef("preference/accuracy", ("accuracy",)),
        MetricDef("preference/chosen_reward", ("chosen_reward",)),
        MetricDef("preference/rejected_reward", ("rejected_reward",)),
    )

    def measure(self, output: PolicyOutput, batch: MicroBatch, spec: KtoSpec) -> Mapping[str, Tensor]:
        """Sum the log-ratios of mismatched completions."""
        return {"mismatched": sequence_sums(log_ratios(output), batch.mask).double().sum()}

    def rewards(self, output: PolicyOutput, batch: MicroBatch, spec: KtoSpec) -> Tensor:
        """Implicit rewards: beta times the log-ratio of policy and reference."""
        return spec.beta * sequence_sums(log_ratios(output), batch.mask)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: KtoSpec) -> tuple[Tensor, Stats]:
        """Mean over the rows of the step, with ``z`` from the sums of :meth:`measure`."""
        assert batch.desirable is not None  # of every algorithm with labelled rows
        divergence = max(0.0, sums.measured["mismatched"] / sums.num_sequences)
        ratios = sequence_sums(log_ratios(output), batch.mask)
        gain = spec.beta * (ratios - divergence)
        losses = 1 - torch.sigmoid(torch.where(batch.desirable, gain, -gain))
        losses = torch.where(batch.desirable, spec.desirable_weight * losses, spec.undesirable_weight * losses)
        rewards = spec.beta * ratios.detach()
        stats: Stats = {
            "loss/kto": value_stat(losses),
            "kl": value_stat(torch.full_like(rewards, divergence)),
            "accuracy": value_stat((ratios.detach() > divergence) == batch.desirable),
            "chosen_reward": value_stat(rewards[batch.desirable]),
            "rejected_reward": value_stat(rewards[~batch.desirable]),
        }
        return losses.sum() / sums.num_sequences, stats


OBJECTIVE = KahnemanTverskyOptimisation()
