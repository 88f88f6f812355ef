"""Trainers: the programs that run the loops of a run."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import NonNegative, Positive, Schema
from rlhf_core.schemas.command_trainer import CommandTrainer

REDUCE_BUCKET_ELEMENTS = 100_000_000
"""Gradients that the trainer reduces over the ranks at once. The memory model counts with this and the next three."""
LIVE_ELEMENTS = 500_000_000
"""Weights that a rank has whole at once in a forward or backward pass under ZeRO 3, about: 1 GB in bfloat16."""
LOGIT_CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at once in training: 256 MiB in float32, 441 tokens of a vocabulary of 152 thousand."""
CDF_CHUNK_ELEMENTS = 1 << 25
"""Probabilities that are summed up at once in float64 when tokens are drawn: 256 MiB."""


class NativeTrainer(Schema):
    """The trainer of rlhf-flows, and how it cuts a step to fit the machine."""

    kind: Literal["native"] = "native"
    """`native`: the loops of rlhf_core.training."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage, what is split over the ranks: 1 the optimizer state, 2 the gradients too, 3 the weights
    too, and 0 nothing (float32 only). Less memory from stage to stage, the same training; 3 is slower, since weights
    are gathered layer by layer. While a rank samples or evaluates, it has the whole weights in every stage."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Parts in main memory instead of the GPU's: nothing, the optimizer state and its update (`optimizer`), or the
    split weights too (`parameters`, with `zero_stage = 3`). A step takes longer; on machines without GPU there is
    nothing to gain."""
    micro_batch_size: Positive = 8
    """Sequences per forward and backward pass on one rank, two of them for a pair of completions; gradients are
    accumulated up to the whole batch."""
    micro_batch_tokens: NonNegative = 0
    """Most tokens per forward and backward pass on one rank, padding included where a model needs any: with ragged
    lengths, short sequences then go together in large numbers, and long ones in small (set `micro_batch_size` high); 0
    for no such bound."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    log_samples_every: NonNegative = 10
    """Every so many steps of a loop that samples, one group of completions is kept in `samples.jsonl` for reading; 0
    for never."""

    @model_validator(mode="after")
    def _can_offload(self) -> Self:
        least = {"none": 0, "optimizer": 1, "parameters": 3}[self.offload]
        if self.zero_stage < least:
            raise ValueError(
                f'found trainer.offload = "{self.offload}" with trainer.zero_stage = {self.zero_stage}; expected '
                f"zero_stage = {least} or more, which splits what is to lie in main memory"
            )
        return self


Trainer = Annotated[NativeTrainer | CommandTrainer, Field(discriminator="kind")]
"""Every kind of trainer there is."""


def trainer_kinds() -> Mapping[str, type[NativeTrainer] | type[CommandTrainer]]:
    """The settings of every kind of trainer, by its name."""
    return {"native": NativeTrainer, "command": CommandTrainer}
