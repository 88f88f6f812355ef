"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7) and variants of its loss.

With ``h_c = log policy(chosen) - log reference(chosen)``, ``h_r`` likewise, both sums over the completion's tokens, and
``d = h_c - h_r``, the loss of a pair is

``sigmoid``  - log sigmoid(beta d)
``hinge``    max(0, 1 - beta d)                                                    (SLiC, arXiv 2305.10425)
``robust``   (- (1-e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2e)     (arXiv 2403.00409, eq. 9)
``ipo``      (h_c / T_c - h_r / T_r - 1 / (2 beta))^2                               (arXiv 2310.12036, eq. 17)

with ``e`` the share of flipped pairs and ``T`` the tokens of each completion: IPO averages over tokens, as TRL does
after consulting its authors. The loss of a step is the mean over its pairs, plus ``sft_coefficient`` times the mean
cross-entropy of the tokens of its chosen completions (Pang et al. 2024, arXiv 2404.19733, who divide by the tokens of
each completion instead). Values and gradients are those of TRL 1.16.0 (``trl/trainer/dpo_trainer.py``,
``_compute_loss``), whose loss ``sft`` the second term is; earlier versions called its weight ``rpo_alpha``.
"""

from torch import Tensor

from rlhf_core.schemas.algorithms.preference import DpoSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums
from rlhf_core.training.algorithms.pairs import (
    PAIR_METRICS,
    chosen_nll,
    log_ratios,
    pair_losses,
    pair_stats,
    sequence_means,
    sequence_sums,
    value_stat,
)


class DirectPreferenceOptimisation(Objective):
    """:func:`pairs.pair_losses` of the log-ratios of policy and reference, and optionally the cross-entropy."""

    metrics = (
        MetricDef("train/loss", ("loss/dpo",)),
        MetricDef("preference/nll", ("nll",)),
        *PAIR_METRICS,
    )

    def rewards(self, output: PolicyOutput, batch: MicroBatch, spec: DpoSpec) -> Tensor:
        """Implicit rewards: beta times the log-ratio of policy and reference, whatever the loss."""
        return spec.beta * sequence_sums(log_ratios(output), batch.mask)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: DpoSpec) -> tuple[Tensor, Stats]:
        """See :func:`pairs.pair_losses`; ``loss/dpo`` includes the cross-entropy."""
        reduce = sequence_means if spec.loss == "ipo" else sequence_sums
        chosen, rejected = reduce(log_ratios(output), batch.mask).chunk(2)
        losses = pair_losses(chosen, rejected, beta=spec.beta, loss=spec.loss, label_smoothing=spec.label_smoothing)
        loss = losses.sum() / sums.num_pairs
        total, num_pairs = value_stat(losses)
        stats = pair_stats(self.rewards(output, batch, spec))
        if spec.sft_coefficient:
            share, found = chosen_nll(output.logprobs, batch.mask, sums, spec.sft_coefficient)
            loss = loss + share
            total = total + found["loss/nll"][0]
            stats["nll"] = found["nll"]
        stats["loss/dpo"] = (total, num_pairs)
        return loss, stats


OBJECTIVE = DirectPreferenceOptimisation()
