"""Settings that every algorithm has, and the traits that checks, reports and loops ask for."""

from typing import ClassVar

from rlhf_core.schemas.base import Schema


class AlgorithmSpec(Schema):
    """Settings of an algorithm, and the traits that follow from them."""

    samples: ClassVar[bool] = False
    """Completions are sampled from the policy and rewarded; otherwise the loop trains on the rows of the data."""
    pairs: ClassVar[bool] = False
    """Each row gives two sequences: a chosen and a rejected completion."""
    labelled: ClassVar[bool] = False
    """Each row says whether its completion is desirable."""
    mismatches: ClassVar[bool] = False
    """Each prompt is also scored with the completion of another row, before the first backward pass of a step."""
    scores_prompt: ClassVar[bool] = False
    """The loss is taken over the tokens of the prompt too."""
    ranks_completions: ClassVar[bool] = False
    """The model is given a head with one output, and trained to rank completions: a reward model."""
    critic: ClassVar[bool] = False
    """A value model of the policy's size is trained beside it."""
    penalises_rewards: ClassVar[bool] = False
    """The KL penalty is taken off the rewards before advantages are made of them; otherwise it is part of the loss."""
    rows_setting: ClassVar[str] = "batch_size"
    """Name of the setting that says how many rows one step takes."""

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
    def passes(self) -> tuple[int, int]:
        """Passes over the completions of a step, and updates of the weights in each pass."""
        return 1, 1

    @property
    def updates_per_step(self) -> int:
        """Updates of the weights in one step: more than 1 only of an algorithm that samples."""
        return self.passes[0] * self.passes[1]

    @property
    def scores_first(self) -> bool:
        """True if advantages are made of log-probabilities or values, which a forward pass has to give before."""
        return False

    @property
    def sampling_rounds(self) -> int:
        """Times that completions may be sampled for one step, until it is full of groups with something to compare."""
        return 1

    @property
    def masks_truncated(self) -> bool:
        """True if completions that were cut off at the longest length are left out of the loss."""
        return False

    @property
    def rows_per_step(self) -> int:
        """Rows of the data that one step takes, over all ranks."""
        rows: int = getattr(self, self.rows_setting)
        return rows

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one step trains on, over all ranks."""
        return self.rows_per_step * self.group * (2 if self.pairs else 1)
