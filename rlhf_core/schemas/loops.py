"""Training loops of the native trainer: an algorithm, its length and its optimizer."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_core.schemas.algorithms import Algorithm
from rlhf_core.schemas.base import NonNegative, NonNegativeFloat, PositiveFloat, Schema

Decay = Annotated[float, Field(ge=0, lt=1)]
"""With a decay of exactly 1, which never forgets its initial zero, AdamW divides by zero in its first step."""
MAX_STEPS = 1_000_000_000
"""Maximum steps of a loop; the sum of both loops fits a column of the history."""


class OptimizerSpec(Schema):
    """AdamW and its schedule; the learning rate is a pure function of the step."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; `linear` and `cosine` fall to the lowest rate, which the step after
    the last one would have."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lowest learning rate of `linear` and `cosine`, as a share of the peak (`min_lr_rate` of transformers'
    `cosine_with_min_lr`)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    adam_beta1: Decay = 0.9
    """Decay of AdamW's first moment, less than 1."""
    adam_beta2: Decay = 0.95
    """Decay of AdamW's second moment, less than 1."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm is clipped to this."""

    @model_validator(mode="after")
    def _ratio_has_its_schedule(self) -> Self:
        if self.min_learning_rate_ratio and self.schedule == "constant":
            raise ValueError(
                f'found min_learning_rate_ratio = {self.min_learning_rate_ratio} with schedule = "constant", whose '
                'rate does not fall; expected schedule = "linear" or "cosine", or no min_learning_rate_ratio'
            )
        return self


class LoopSpec(Schema):
    """One training loop: algorithm, number of steps, and optimizer."""

    num_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Optimizer steps of the loop. Needed unless `epochs` is given; 0 turns a warm start off."""
    epochs: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)] = 0.0
    """Passes over the training rows, whole or in part, in place of `num_steps`. A new run counts the rows that are left
    after dropping, and stores the number of steps that take each row at least this many times; the last step may begin
    a further pass."""
    reference: str = ""
    """Folder of the reference model of the algorithm, which is the teacher of `distillation`, or `promoted:<name>` for
    the newest promoted model of the runs with that name, looked up when the run is created. Empty for the policy as it
    was at the start of the loop. It needs the tokenizer of the policy, and may be of another size."""
    algorithm: Algorithm
    optimizer: OptimizerSpec

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.num_steps and self.epochs:
            raise ValueError(
                f"found num_steps = {self.num_steps} and epochs = {self.epochs:g}, which both set the length of the "
                "loop; give one of them"
            )
        if not (self.num_steps or self.epochs or self._may_be_empty()):
            raise ValueError("found neither num_steps nor epochs, expected one of them, more than 0")
        return self

    @model_validator(mode="after")
    def _has_a_use_for_its_reference(self) -> Self:
        algorithm = self.algorithm
        if self.reference and not algorithm.reference:
            raise ValueError(
                f"found reference = {self.reference!r} with {algorithm.name}, which as set here compares the policy "
                "with no reference; expected an algorithm that does (for one that samples, a kl_coefficient above 0 or "
                "measure_kl = true), or no reference"
            )
        if algorithm.distils and not self.reference:
            raise ValueError(
                f"found {algorithm.name} without a teacher; expected reference, the folder of a model that knows what "
                "the policy is to learn"
            )
        return self

    def _may_be_empty(self) -> bool:
        return False

    def steps_of_epochs(self, num_rows: int) -> int:
        """Steps that take ``num_rows`` training rows :attr:`epochs` times: the last one is full as well."""
        return math.ceil(Fraction(str(self.epochs)) * num_rows / self.algorithm.rows_per_step)


class WarmStartSpec(LoopSpec):
    """The loop before the main one, usually supervised."""

    def _may_be_empty(self) -> bool:
        return "num_steps" in self.model_fields_set


class LoopsSpec(Schema):
    """The training loops of the native trainer, in order. External trainers have none here."""

    warm_start: WarmStartSpec | None = None
    main: LoopSpec | None = None

    @field_validator("warm_start", mode="after")
    @classmethod
    def _no_empty_warm_start(cls, given: WarmStartSpec | None) -> WarmStartSpec | None:
        return given if given is not None and (given.num_steps or given.epochs) else None

    @property
    def named(self) -> Mapping[str, LoopSpec]:
        """The loops by section (``warm_start``, ``main``), in the order of execution."""
        loops: dict[str, LoopSpec] = {} if self.warm_start is None else {"warm_start": self.warm_start}
        return loops if self.main is None else {**loops, "main": self.main}
