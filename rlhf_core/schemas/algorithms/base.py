"""Common settings of all algorithms, and the traits used by checks, reports and loops."""

from typing import ClassVar

from rlhf_core.schemas.base import Schema


class AlgorithmSpec(Schema):
    """Settings of an algorithm, and traits derived from them."""

    samples: ClassVar[bool] = False
    """True if completions are sampled from the policy and rewarded; otherwise the loop trains on the rows of the
    data."""
    pairs: ClassVar[bool] = False
    """True if each row has two sequences: a chosen and a rejected completion."""
    labelled: ClassVar[bool] = False
    """True if each row has a label for whether its completion is desirable."""
    mismatches: ClassVar[bool] = False
    """True if each prompt is also scored with the completion of another row, before the first backward pass of a
    step."""
    scores_prompt: ClassVar[bool] = False
    """True if the loss includes the tokens of the prompt."""
    ranks_completions: ClassVar[bool] = False
    """True if the model gets a head with one output and is trained to rank completions (a reward model)."""
    critic: ClassVar[bool] = False
    """True if a value model of the policy's size is trained beside it."""
    distils: ClassVar[bool] = False
    """True if the loop learns from its reference, a teacher, and rewards are only measured."""
    penalises_rewards: ClassVar[bool] = False
    """True if the KL penalty is subtracted from the rewards before the advantages; otherwise it is part of the loss."""
    rows_setting: ClassVar[str] = "batch_size"
    """Name of the setting with the number of rows per step."""

    name: str
    """Name of the algorithm."""

    @property
    def reference(self) -> bool:
        """True if the loop needs a reference model: a frozen copy of its initial policy, or ``LoopSpec.reference``."""
        return False

    @property
    def entropy_in_loss(self) -> bool:
        """True if the entropy of the policy is part of the loss."""
        return False

    @property
    def group(self) -> int:
        """Number of completions of each prompt that are compared with each other; 1 if none are."""
        return 1

    @property
    def passes(self) -> tuple[int, int]:
        """Passes over the completions of a step, and updates of the weights in each pass."""
        return 1, 1

    @property
    def updates_per_step(self) -> int:
        """Updates of the weights in one step; more than 1 only for algorithms that sample."""
        return self.passes[0] * self.passes[1]

    @property
    def steps_before_policy(self) -> int:
        """First steps of the loop that leave the policy unchanged."""
        return 0

    @property
    def scores_first(self) -> bool:
        """True if advantages depend on log-probabilities or values from a forward pass."""
        return False

    @property
    def sampling_rounds(self) -> int:
        """Maximum rounds of sampling for one step, to fill it with groups that have something to compare."""
        return 1

    @property
    def masks_truncated(self) -> bool:
        """True if completions truncated at the maximum length are excluded from the loss."""
        return False

    @property
    def rows_per_step(self) -> int:
        """Rows of the data per step, over all ranks."""
        rows: int = getattr(self, self.rows_setting)
        return rows

    @property
    def sequences_per_step(self) -> int:
        """Sequences trained on per step, over all ranks."""
        return self.rows_per_step * self.group * (2 if self.pairs else 1)
