"""Reward model after Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv 2203.02155, eq. 1).

With ``r`` the model's reward for a sequence, ``m`` the margin of the pair (Touvron et al. 2023, arXiv 2307.09288, eq.
2; 0 where the data has none) and ``c`` the centring coefficient (arXiv 2312.09244),

L = - log sigmoid(r_chosen - r_rejected - m) + c (r_chosen + r_rejected)^2

The loss of a step is the mean over its pairs. Values and gradients are those of TRL 1.16.0
(``trl/trainer/reward_trainer.py``).
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.schemas.algorithms.preference import RewardModelSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums
from rlhf_core.training.algorithms.pairs import PAIR_METRICS, pair_stats, value_stat


class BradleyTerry(Objective):
    """Logistic loss of the difference in reward, with margins, and rewards kept around zero."""

    metrics = (MetricDef("train/loss", ("loss/reward_model",)), *PAIR_METRICS)

    def rewards(self, output: PolicyOutput, batch: MicroBatch, spec: RewardModelSpec) -> Tensor:
        """Outputs of the model."""
        assert output.scores is not None  # of every model that ranks completions
        return output.scores

    def loss(
        self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: RewardModelSpec
    ) -> tuple[Tensor, Stats]:
        """Mean over the pairs of the step."""
        rewards = self.rewards(output, batch, spec)
        chosen, rejected = rewards.chunk(2)
        difference = chosen - rejected if batch.margins is None else chosen - rejected - batch.margins
        losses = -logsigmoid(difference)
        if spec.centring_coefficient:
            losses = losses + spec.centring_coefficient * (chosen + rejected).square()
        return losses.sum() / sums.num_pairs, {"loss/reward_model": value_stat(losses), **pair_stats(rewards)}


OBJECTIVE = BradleyTerry()
