"""Algorithms that sample completions and learn from their rewards."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.base import NonNegative, NonNegativeFloat, Positive, PositiveFloat, UnitInterval

GroupSize = Annotated[int, Field(ge=2, le=2**31 - 1)]
"""Completions per prompt, for algorithms that compare them with each other."""


class PolicyGradientSpec(AlgorithmSpec):
    """Settings of every algorithm that samples."""

    samples: ClassVar[bool] = True
    rows_setting: ClassVar[str] = "prompts_per_step"

    prompts_per_step: Positive = 32
    """Prompts per step, across all ranks."""
    samples_per_prompt: Positive = 1
    """Completions per prompt."""
    num_epochs: Positive = 1
    """Passes over the completions of each step."""
    num_minibatches: Positive = 1
    """Updates per pass; the completions of the step are split into this many parts. With one pass in one part, the
    algorithm is strictly on-policy and saves a forward pass."""
    clip_low: UnitInterval = 0.2
    """Largest distance below 1 at which the probability ratio is not clipped."""
    clip_high: NonNegativeFloat = 0.2
    """Largest distance above 1 at which the probability ratio is not clipped."""
    dual_clip: NonNegativeFloat = 0.0
    """Largest probability ratio that counts at a negative advantage, where the clip has no upper bound, for instance 3
    (`clip_ratio_c` of verl, `delta` of TRL); more than `1 + clip_high`. 0: no bound."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty against the model at the start of the loop; at 0, no reference model is needed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (http://joschu.net/blog/kl-approx.html)."""
    measure_kl: bool = False
    """Measure that KL even if its weight is 0; this costs one forward pass of a reference model."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the mean entropy of the policy's next-token distributions, in nats per token, which is subtracted from
    the loss; 0 leaves it out. `entropy_coef` of TRL; `entropy_coeff` of verl, which aggregates the entropy like the
    loss, is the same only for its `loss_agg_mode = "token-mean"`."""
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Importance-sampling correction for the different probabilities that the sampling engine and the trainer give to
    tokens. The ratio of the two, of each token or of the whole completion, is truncated at `correction_cap`, or
    anything above it is masked."""
    correction_cap: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    """Largest such ratio that is not truncated or masked; more than 1, the ratio of tokens on which both agree."""
    mask_truncated: bool = False
    """Leave completions that were truncated at the maximum length out of the loss; their rewards still count in their
    groups."""

    @model_validator(mode="after")
    def _dual_clip_has_an_effect(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"found dual_clip = {self.dual_clip} with clip_high = {self.clip_high}; expected more than "
                f"{1 + self.clip_high:g}, the bound at positive advantages, or 0 for no bound"
            )
        return self

    @property
    def reference(self) -> bool:
        """True for the penalty or the measurement of the divergence."""
        return self.kl_coefficient > 0 or self.measure_kl

    @property
    def entropy_in_loss(self) -> bool:
        """True if the entropy bonus has a weight."""
        return self.entropy_coefficient > 0

    @property
    def group(self) -> int:
        """All completions of a prompt are one group."""
        return self.samples_per_prompt

    @property
    def passes(self) -> tuple[int, int]:
        """Values of the settings."""
        return self.num_epochs, self.num_minibatches

    @property
    def scores_first(self) -> bool:
        """True for a critic or a penalty on the rewards."""
        return self.critic or (self.penalises_rewards and self.kl_coefficient > 0)

    @property
    def masks_truncated(self) -> bool:
        """Value of the setting."""
        return self.mask_truncated


class GroupSpec(PolicyGradientSpec):
    """Settings of algorithms whose advantages compare the completions of a prompt."""

    samples_per_prompt: GroupSize = 8
    """Completions per prompt; they form the group whose rewards are compared."""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """Divisor of rewards after subtracting their group's mean: the standard deviation of the group or of the batch, or
    none (Dr. GRPO)."""
    advantage_epsilon: NonNegativeFloat = 1e-4
    """Added to that standard deviation."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Mean over all completion tokens of the step (DAPO), over each sequence and then sequences (GRPO), or sum over a
    fixed length (Dr. GRPO)."""
    kl_weighted: bool = False
    """Weight the KL penalty by the probability ratio, so that its gradient is that of the KL itself (DeepSeek-V3.2,
    arXiv 2512.02556). The plain gradient of k1 and k3 is not, even on-policy. The default of TRL 1.16.0."""


class GrpoSpec(GroupSpec):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300)."""

    name: Literal["grpo"]
    """Group relative policy optimisation: reinforcement learning from the reward functions."""


class DrGrpoSpec(GroupSpec):
    """GRPO done right (Liu et al. 2025, arXiv 2503.20783)."""

    name: Literal["dr_grpo"]
    """GRPO without its biases: no standard deviation in the advantage, no sequence length in the loss."""
    advantage_scale: Literal["group", "batch", "none"] = "none"
    """Divisor of rewards after subtracting their group's mean."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "fixed_length"
    """Sum over the tokens, divided by completions x longest length."""


class DapoSpec(GroupSpec):
    """Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv 2503.14476)."""

    name: Literal["dapo"]
    """GRPO with a higher upper clip, dynamic sampling, and a penalty on long completions."""
    clip_high: NonNegativeFloat = 0.28
    """Largest distance above 1 at which the probability ratio is not clipped."""
    mask_truncated: bool = True
    """Exclude completions truncated at the maximum length from the loss (overlong filtering)."""
    max_sampling_rounds: Positive = 4
    """Largest number of sampling rounds for one step, each with new prompts, to find as many groups with differing
    rewards as the step needs; after that, other groups fill it up. 1 turns dynamic sampling off."""
    overlong_buffer: NonNegative = 0
    """Number of tokens before the maximum length over which a penalty rises linearly; 0 turns it off."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Penalty on the reward of a completion of the maximum length."""

    @property
    def sampling_rounds(self) -> int:
        """Value of the setting."""
        return self.max_sampling_rounds


class GspoSpec(GroupSpec):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071)."""

    name: Literal["gspo"]
    """GRPO with one probability ratio for each completion."""
    clip_low: UnitInterval = 3e-4
    """Largest distance below 1 at which the mean probability ratio of a completion is not clipped."""
    clip_high: NonNegativeFloat = 4e-4
    """Largest distance above 1 at which the mean probability ratio of a completion is not clipped."""
    loss_aggregation: Literal["sequence_mean"] = "sequence_mean"
    """Mean over completions, each with one ratio."""


class CispoSpec(GroupSpec):
    """Clipped importance-sampling policy optimisation (MiniMax 2025, arXiv 2506.13585)."""

    name: Literal["cispo"]
    """Policy gradient weighted by the clipped probability ratio: every token keeps its gradient."""
    clip_high: NonNegativeFloat = 4.0
    """Largest distance above 1 at which the probability ratio is not clipped; there is no lower bound."""

    @model_validator(mode="after")
    def _dual_clip_has_an_effect(self) -> Self:
        if self.dual_clip:
            raise ValueError(
                f"found dual_clip = {self.dual_clip}, which cispo does not have: 1 + clip_high bounds its ratio at "
                "every advantage; expected no dual_clip"
            )
        return self


class RlooSpec(PolicyGradientSpec):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740)."""

    penalises_rewards: ClassVar[bool] = True

    name: Literal["rloo"]
    """REINFORCE with the other completions of a prompt as the baseline of each."""
    samples_per_prompt: GroupSize = 8
    """Completions per prompt; the baseline of each is the mean reward of the others."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL that is summed over a completion and subtracted from its reward."""
    correction: Literal["none", "sequence_truncate", "sequence_mask"] = "none"
    """Importance-sampling correction if the sampling engine and the trainer give completions different
    probabilities: the ratio of the two is truncated at `correction_cap`, or anything above it is masked."""
    normalise_advantages: bool = False
    """Normalise the advantages of the step to mean 0 and standard deviation 1."""


class ReinforcePlusPlusSpec(PolicyGradientSpec):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262)."""

    penalises_rewards: ClassVar[bool] = True

    name: Literal["reinforce_plus_plus"]
    """REINFORCE with advantages normalised over the whole batch."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL that is subtracted from the reward of every token."""
    discount: UnitInterval = 1.0
    """Discount of later rewards (gamma)."""


class ReinforcePlusPlusBaselineSpec(PolicyGradientSpec):
    """REINFORCE++ with a baseline (Hu et al. 2025, arXiv 2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"]
    """REINFORCE++ with the mean reward of a group as the baseline."""
    samples_per_prompt: GroupSize = 8
    """Completions per prompt, whose mean reward is the baseline."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of the KL in the loss."""


class PpoSpec(PolicyGradientSpec):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) with a value model and GAE."""

    critic: ClassVar[bool] = True
    penalises_rewards: ClassVar[bool] = True

    name: Literal["ppo"]
    """Proximal policy optimisation with a value model."""
    num_epochs: Positive = 4
    """Passes over the completions of each step."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL that is subtracted from the reward of every token."""
    discount: UnitInterval = 1.0
    """Discount of later rewards (gamma)."""
    gae_lambda: UnitInterval = 0.95
    """Weight of longer returns in the advantage (arXiv 1506.02438)."""
    value_clip: PositiveFloat = 0.2
    """Largest distance of the new value from the one before the update."""
    critic_learning_rate: NonNegativeFloat = 0.0
    """Peak learning rate of the value model; 0 uses that of the policy."""
    critic_warmup_steps: NonNegative = 0
    """First steps in which only the value model learns; the learning rate of the policy, with its warm-up, starts after
    them."""

    @property
    def steps_before_policy(self) -> int:
        """Steps in which the value model learns alone."""
        return self.critic_warmup_steps


class DistillationSpec(PolicyGradientSpec):
    """On-policy distillation (Agarwal et al. 2024, arXiv 2306.13649), with the sampled tokens alone."""

    distils: ClassVar[bool] = True
    penalises_rewards: ClassVar[bool] = True

    name: Literal["distillation"]
    """On-policy distillation: a teacher (`reference` of the loop) judges every token that the policy samples."""
    kl_coefficient: PositiveFloat = 1.0
    """Weight of the divergence from the teacher, from which alone the policy learns; rewards are only measured."""
    kl_estimator: Literal["k1"] = "k1"
    """Estimator of that divergence: its expected gradient is that of the KL itself."""
    discount: UnitInterval = 0.0
    """Discount of the divergence at later tokens (gamma); with 0, each token answers for itself."""
