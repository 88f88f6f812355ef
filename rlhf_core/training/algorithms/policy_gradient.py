"""The common loss of algorithms that sample: a clipped surrogate, a correction, a penalty and an entropy bonus.

Each algorithm's file adds the difference: the advantages, and sometimes the ratio or the surrogate.
"""

from typing import Any, ClassVar

from torch import Tensor

from rlhf_core.schemas.algorithms.policy_gradient import PolicyGradientSpec
from rlhf_core.training.algorithms.aggregation import Aggregation, Stats, masked_stat, step_normaliser, summed
from rlhf_core.training.algorithms.kl import divergence
from rlhf_core.training.algorithms.objective import MetricDef, MicroBatch, Objective, PolicyOutput, StepSums
from rlhf_core.training.algorithms.surrogate import clipped_surrogate, mismatch_weights, token_ratio

POLICY_METRICS: tuple[MetricDef, ...] = (
    MetricDef("train/loss", ("loss/policy",)),
    MetricDef("policy/clip_share", ("policy/clip_low_share", "policy/clip_high_share")),
    MetricDef("policy/dual_clip_share", ("policy/dual_clip_share",)),
    MetricDef("policy/kl", ("policy/kl",)),
    MetricDef("policy/mismatch_weight", ("policy/mismatch_weight",)),
)


class PolicyGradient(Objective):
    """Clipped surrogate over tokens, with the configured correction and penalty."""

    metrics: ClassVar[tuple[MetricDef, ...]] = POLICY_METRICS

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Ratio in the surrogate, ``[B, T]``. By default, that of each token."""
        return token_ratio(logprobs, old_logprobs)

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, spec: Any
    ) -> tuple[Tensor, Stats]:
        """Loss of each token before correction and penalty, ``[B, T]``, and its statistics."""
        ratio = self.ratio(logprobs, old_logprobs, mask)
        return clipped_surrogate(ratio, advantages, mask, spec.clip_low, spec.clip_high, spec.dual_clip)

    def aggregation(self, spec: Any) -> Aggregation:
        """Aggregation of token losses into one number. By default, their mean."""
        return "token_mean"

    def weighs_penalty(self, spec: Any) -> bool:
        """True if the penalty is weighted with the ratio. False by default."""
        return False

    def loss(
        self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: PolicyGradientSpec
    ) -> tuple[Tensor, Stats]:
        """Surrogate, weighted by the correction, and the penalty and the entropy bonus, which are not.

        The bonus is a mean over tokens whatever the aggregation, as in TRL 1.16.0. So is ``loss/policy``, which
        includes penalty and bonus.
        """
        assert batch.advantages is not None  # of every loop that samples
        assert output.ref_logprobs is not None or not spec.reference  # of every loop with a reference
        old_logprobs = output.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        divergences = None
        if output.ref_logprobs is not None:
            divergences = divergence(output.logprobs, output.ref_logprobs, spec.kl_estimator)
            if self.weighs_penalty(spec):
                divergences = divergences * self.ratio(output.logprobs, old_logprobs, batch.mask)
        token_losses, stats = self.surrogate(output.logprobs, old_logprobs, batch.advantages, batch.mask, spec)
        if spec.correction != "none" and batch.sampler_logprobs is not None:
            weights = mismatch_weights(
                old_logprobs, batch.sampler_logprobs, batch.mask, spec.correction, spec.correction_cap
            )
            token_losses = token_losses * weights
            stats["policy/mismatch_weight"] = masked_stat(weights.expand_as(token_losses), batch.mask)
        if divergences is not None:
            stats["policy/kl"] = masked_stat(divergences, batch.mask)
            if spec.kl_coefficient and not spec.penalises_rewards:
                token_losses = token_losses + spec.kl_coefficient * divergences
        aggregation = self.aggregation(spec)
        normaliser = step_normaliser(aggregation, sums.num_tokens, sums.num_sequences, sums.max_new_tokens)
        loss = summed(token_losses, batch.mask, aggregation) / normaliser
        if spec.entropy_coefficient:
            assert output.entropy is not None  # of every algorithm whose loss includes it
            bonus = spec.entropy_coefficient * output.entropy
            loss = loss - summed(bonus, batch.mask, "token_mean") / max(1.0, sums.num_tokens)
            token_losses = token_losses - bonus
        stats["loss/policy"] = masked_stat(token_losses, batch.mask)
        return loss, stats
