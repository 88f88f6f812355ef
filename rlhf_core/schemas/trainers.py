"""Trainers: the programs that run the loops of a run."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.schemas.base import NonNegative, Positive, Schema
from rlhf_core.schemas.command_trainer import CommandTrainer

REDUCE_BUCKET_ELEMENTS = 100_000_000
"""Gradients that the trainer reduces over the ranks at once. The memory model counts with this and the next two."""
LOGIT_CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at once in training: 256 MiB in float32, 441 tokens of a vocabulary of 152 thousand."""
CDF_CHUNK_ELEMENTS = 1 << 25
"""Probabilities that are summed up at once in float64 when tokens are drawn: 256 MiB."""


class NativeTrainer(Schema):
    """The trainer of rlhf-flows, and how it cuts a step to fit the machine."""

    kind: Literal["native"] = "native"
    """`native`: the loops of rlhf_core.training."""
    zero_stage: Literal[1] = 1
    """DeepSpeed ZeRO stage: 1 splits the optimizer state over the ranks."""
    micro_batch_size: Positive = 8
    """Sequences per forward and backward pass on one rank; gradients are accumulated up to the whole batch."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    log_samples_every: NonNegative = 10
    """Every so many steps of a loop that samples, one group of completions is kept in `samples.jsonl` for reading; 0
    for never."""


Trainer = Annotated[NativeTrainer | CommandTrainer, Field(discriminator="kind")]
"""Every kind of trainer there is."""


def trainer_kinds() -> Mapping[str, type[NativeTrainer] | type[CommandTrainer]]:
    """The settings of every kind of trainer, by its name."""
    return {"native": NativeTrainer, "command": CommandTrainer}
