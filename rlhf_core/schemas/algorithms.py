"""Algorithms and the loops that run them.

Checks, reports and the memory model ask for traits of an algorithm (:class:`AlgorithmSpec`), never for its name. A new
algorithm is one file, ``rlhf_core/training/algorithms/<name>.py``, and one entry here: its settings, as a member of
:data:`Algorithm`.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, field_validator

from rlhf_core.schemas.base import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Schema, Share

MAX_STEPS = 1_000_000_000
"""Most steps of a loop: those of both together fit a column of the history."""


class AlgorithmSpec(Schema):
    """Settings of an algorithm, and the traits that follow from them."""

    samples: ClassVar[bool] = False
    """Completions are sampled from the policy and rewarded; otherwise the loop trains on the rows of the data."""
    pairs: ClassVar[bool] = False
    """Each row gives two sequences: a chosen and a rejected completion."""
    critic: ClassVar[bool] = False
    """A value model of the policy's size is trained beside it."""
    rows_setting: ClassVar[str] = "batch_size"
    """Name of the setting that says how many rows one optimizer step takes."""

    name: str
    """Name of the algorithm."""

    @property
    def reference(self) -> bool:
        """True if the loop needs a frozen copy of the policy as it was at its beginning."""
        return False

    @property
    def group(self) -> int:
        """Completions of each prompt that are compared with each other; 1 where none are."""
        return 1

    @property
    def rows_per_step(self) -> int:
        """Rows of the data that one optimizer step takes, over all ranks."""
        rows: int = getattr(self, self.rows_setting)
        return rows

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one optimizer step trains on, over all ranks."""
        return self.rows_per_step * self.group * (2 if self.pairs else 1)


class SftSpec(AlgorithmSpec):
    """Supervised fine-tuning on the reference answers."""

    name: Literal["sft"]
    """Supervised fine-tuning on the reference answers."""
    batch_size: Positive = 64
    """Rows per optimizer step, over all ranks."""


class GrpoSpec(AlgorithmSpec):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300), strictly on-policy."""

    samples = True
    rows_setting = "prompts_per_step"

    name: Literal["grpo"]
    """Reinforcement learning from the reward functions."""
    prompts_per_step: Positive = 32
    """Prompts per optimizer step, over all ranks."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=2**31 - 1)] = 8
    """Completions per prompt: the group whose rewards are compared."""
    clip_low: Share = 0.2
    """Greatest distance below 1 at which the probability ratio counts."""
    clip_high: NonNegativeFloat = 0.2
    """Greatest distance above 1 at which the probability ratio counts (0.28 in DAPO, arXiv 2503.14476)."""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """Divisor of rewards after their group's mean is taken off: standard deviation of the group, of the batch, or none
    (Dr. GRPO)."""
    advantage_epsilon: NonNegativeFloat = 1e-4
    """Added to that standard deviation."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Mean over all completion tokens of the step (DAPO), over each sequence and then sequences (GRPO), or sum over a
    fixed length (Dr. GRPO)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty against the model at the beginning of the loop; at 0 no reference model is needed."""
    measure_kl: bool = False
    """Measure that KL even when its weight is 0: costs one forward pass of a reference model."""

    @property
    def reference(self) -> bool:
        """A reference model serves the penalty, and the measurement of the divergence."""
        return self.kl_coefficient > 0 or self.measure_kl

    @property
    def group(self) -> int:
        """All completions of a prompt are one group."""
        return self.samples_per_prompt


Algorithm = Annotated[SftSpec | GrpoSpec, Field(discriminator="name")]
"""Every algorithm there is."""


def specs() -> Mapping[str, type[AlgorithmSpec]]:
    """The settings of every algorithm, by its name."""
    members = get_args(get_args(Algorithm)[0])
    return {get_args(member.model_fields["name"].annotation)[0]: member for member in members}


class OptimizerSpec(Schema):
    """AdamW and its schedule; the learning rate is a pure function of the step."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; `linear` and `cosine` end at zero on the last step."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    adam_beta1: Share = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Share = 0.95
    """Decay of AdamW's second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm is clipped to this."""


class LoopSpec(Schema):
    """One training loop: an algorithm, its number of steps, and an optimizer of its own."""

    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    """Optimizer steps of the loop."""
    algorithm: Algorithm
    optimizer: OptimizerSpec


class WarmStartSpec(LoopSpec):
    """The loop before the main one, usually supervised."""

    num_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    """Optimizer steps of the warm start; 0 turns it off."""


class LoopsSpec(Schema):
    """The training loops of the native trainer, in their order. Other trainers have none here."""

    warm_start: WarmStartSpec | None = None
    main: LoopSpec | None = None

    @field_validator("warm_start", mode="after")
    @classmethod
    def _no_empty_warm_start(cls, given: WarmStartSpec | None) -> WarmStartSpec | None:
        return given if given is not None and given.num_steps else None

    @property
    def named(self) -> Mapping[str, LoopSpec]:
        """The loops by their section (``warm_start``, ``main``), in the order in which they run."""
        loops: dict[str, LoopSpec] = {} if self.warm_start is None else {"warm_start": self.warm_start}
        return loops if self.main is None else {**loops, "main": self.main}
