"""Reward models that score completions: one entry of ``reward.models`` each."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.schemas.base import Finite, Int64, Label, NonNegative, Positive, Schema

ModelName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
"""Name of a reward model in a run."""

PROMOTED = "promoted:"
"""Prefix of a path that names a promoted model instead of a folder."""


class ScoringModelSpec(Schema):
    """A reward model that scores completions, as `[reward.models.<name>]`; its metric is `reward/<name>`."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of a Hugging Face sequence classifier with one output, such as the algorithm `reward_model` writes; or
    `promoted:<name>` for the newest promoted model of the runs with that name, looked up when the run is created."""
    weight: Finite = 1.0
    """Weight of its scores in the sum; with 0, they are only measured."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of its weights."""
    device: Literal["rank", "cpu"] = "rank"
    """Place of its weights, with a copy in the process of every rank: the device of the `rank`, or main memory and CPU
    (`cpu`)."""
    batch_size: Positive = 32
    """Sequences scored at once on one rank."""
    max_tokens: NonNegative = 0
    """Maximum length of a sequence, in its own tokens; longer ones lose their start. 0 for its number of positions."""
    template: Literal["data", "chat", "text"] = "data"
    """Format of the scored text: `data` applies its own chat template to rows that are conversations and treats others
    as text; `chat` applies it to all (a text prompt becomes a user turn); `text` takes the prompt and completion as the
    policy read and wrote them."""
    normalise: Literal["none", "centre", "standardise"] = "none"
    """Scale of the scores in the sum: unchanged, minus their mean over the run so far, or also divided by their
    standard deviation. The metric is the raw score."""


class ScoringModelState(Schema):
    """State of a reward model that scores completions, as stored in a checkpoint."""

    fingerprint: Label
    """Fingerprint of the files in its folder."""
    count: Int64 = 0
    """Number of scores so far, over all ranks."""
    total: Finite = 0.0
    """Their sum."""
    squares: Finite = 0.0
    """Sum of their squares."""
