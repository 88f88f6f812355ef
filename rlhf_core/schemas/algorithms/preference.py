"""Algorithms that learn from preferences: a chosen and a rejected completion of each prompt."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.base import NonNegativeFloat, Positive, PositiveFloat

LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]
"""Probability that a pair is flipped; at one half, nothing could be learned."""


class PreferenceSpec(AlgorithmSpec):
    """Settings of every algorithm that learns from pairs."""

    pairs: ClassVar[bool] = True

    batch_size: Positive = 32
    """Pairs per optimizer step, over all ranks."""


class DpoSpec(PreferenceSpec):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and variants of its loss."""

    name: Literal["dpo"]
    """Direct preference optimisation against a reference model."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """`sigmoid` (DPO), `ipo` (arXiv 2310.12036), `hinge` (SLiC, arXiv 2305.10425), or `robust` against flipped pairs
    (arXiv 2403.00409)."""
    label_smoothing: LabelSmoothing = 0.0
    """Share of pairs assumed to be flipped; for `robust` only."""
    sft_coefficient: NonNegativeFloat = 0.0
    """Weight of the cross-entropy of the chosen completions, which keeps their probability from falling with that of
    the rejected ones (arXiv 2404.19733; `rpo_alpha` of earlier TRL, whose loss `sft` it is now); 0 leaves it out."""

    @model_validator(mode="after")
    def _smoothing_has_its_loss(self) -> Self:
        _require_loss_of_smoothing(self.label_smoothing, self.loss, "robust")
        return self

    @property
    def reference(self) -> bool:
        """True for every variant."""
        return True


class CpoSpec(PreferenceSpec):
    """Contrastive preference optimisation (Xu et al. 2024, arXiv 2401.08417)."""

    name: Literal["cpo"]
    """Contrastive preference optimisation, without a reference model."""
    beta: PositiveFloat = 0.1
    """Factor of the difference of the log-probabilities."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of a pair; `ipo` takes log-probabilities per token."""
    nll_coefficient: NonNegativeFloat = 1.0
    """Weight of the cross-entropy of the chosen completions."""
    label_smoothing: LabelSmoothing = 0.0
    """Share of pairs assumed to be flipped; for `sigmoid` only."""

    @model_validator(mode="after")
    def _smoothing_has_its_loss(self) -> Self:
        _require_loss_of_smoothing(self.label_smoothing, self.loss, "sigmoid")
        return self


class SimpoSpec(PreferenceSpec):
    """Simple preference optimisation (Meng et al. 2024, arXiv 2405.14734)."""

    name: Literal["simpo"]
    """Simple preference optimisation: log-probabilities per token, without a reference model."""
    beta: PositiveFloat = 2.0
    """Factor of the difference of the log-probabilities per token."""
    gamma: NonNegativeFloat = 0.5
    """Margin by which the chosen completion should be better, in units of the reward (not divided by `beta`)."""
    label_smoothing: LabelSmoothing = 0.0
    """Share of pairs assumed to be flipped."""


class OrpoSpec(PreferenceSpec):
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv 2403.07691)."""

    scores_prompt: ClassVar[bool] = True

    name: Literal["orpo"]
    """Odds ratio preference optimisation: supervised training with a penalty on rejected completions."""
    beta: PositiveFloat = 0.1
    """Weight of the odds ratio (lambda in the paper)."""


class KtoSpec(AlgorithmSpec):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306)."""

    labelled: ClassVar[bool] = True
    mismatches: ClassVar[bool] = True

    name: Literal["kto"]
    """Kahneman-Tversky optimisation: single completions that are desirable or not, against a reference model."""
    batch_size: Annotated[int, Field(ge=2, le=2**31 - 1)] = 32
    """Rows per optimizer step, over all ranks; at least 2, since each is compared with another."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable rows; the paper keeps the ratio of both weighted counts between 1:1 and 4:3."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable rows."""

    @property
    def reference(self) -> bool:
        """True: the policy is compared with its reference."""
        return True


class RewardModelSpec(PreferenceSpec):
    """Reward model after Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv 2203.02155, eq. 1)."""

    ranks_completions: ClassVar[bool] = True

    name: Literal["reward_model"]
    """Reward model: the model gets a head with one output, which ranks completions."""
    centring_coefficient: NonNegativeFloat = 0.0
    """Weight of the term that keeps rewards around zero (Eisenstein et al. 2023, arXiv 2312.09244): the mean square of
    the sum of the rewards of a pair."""


PreferenceAlgorithm = DpoSpec | KtoSpec | CpoSpec | SimpoSpec | OrpoSpec | RewardModelSpec
"""Every algorithm that learns from preferences."""


def _require_loss_of_smoothing(label_smoothing: float, loss: str, smoothed: str) -> None:
    if label_smoothing and loss != smoothed:
        raise ValueError(
            f'found label_smoothing = {label_smoothing} with loss = "{loss}", which has none; expected '
            f'loss = "{smoothed}", or no label_smoothing'
        )
