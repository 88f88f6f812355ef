"""Trainers, which run the loops of a run."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import NonNegative, Positive, Schema
from rlhf_core.schemas.command_trainer import CommandTrainer

REDUCE_BUCKET_ELEMENTS = 100_000_000
"""Number of gradients that the trainer reduces over the ranks at once. The memory model uses this and the next three
values."""
LIVE_ELEMENTS = 500_000_000
"""Approximate number of whole weights that a rank holds in a forward or backward pass with ZeRO 3: 1 GB in bfloat16."""
LOGIT_CHUNK_ELEMENTS = 1 << 26
"""Number of logits that exist at once in training: 256 MiB in float32, 441 tokens of a vocabulary of 152 thousand."""
MOVING_ROPES = frozenset({"dynamic", "longrope"})
"""Types of rotary embeddings whose frequencies follow from the longest sequence of a pass: ranks that share one would
have different ones."""
CDF_CHUNK_ELEMENTS = 1 << 25
"""Number of probabilities summed at once in float64 when tokens are sampled: 256 MiB."""


class NativeTrainer(Schema):
    """Settings of the native trainer, including the split of a step to fit the machine."""

    kind: Literal["native"] = "native"
    """`native`: the loops of rlhf_core.training."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage, which splits over the ranks: 1 the optimizer state, 2 also the gradients, 3 also the
    weights, and 0 nothing (only float32). Each stage needs less memory for the same training; 3 is slower, because
    weights are gathered layer by layer. During sampling and evaluation, a rank has the whole weights in every stage."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Parts in main memory instead of GPU memory: nothing, the optimizer state and its update (`optimizer`), or also
    the split weights (`parameters`, with `zero_stage = 3`). A step takes longer; without GPUs, there is no benefit."""
    sequence_parallel: Positive = 1
    """Number of ranks that share each forward and backward pass, each with a part of the tokens of every sequence, if a
    long one does not fit on one GPU (Ulysses). Its activations shrink as much; the result is the same. It divides the
    number of ranks and of attention heads, and should not exceed `resources.ranks_per_node`; 1 for none."""
    micro_batch_size: Positive = 8
    """Sequences per forward and backward pass of one rank, or of all ranks that share it (`sequence_parallel`), two of
    them for a pair of completions; gradients are accumulated up to the whole batch."""
    micro_batch_tokens: NonNegative = 0
    """Maximum tokens per forward and backward pass, likewise, including padding if the model needs it: with varying
    lengths, many short or few long sequences then share a pass (set `micro_batch_size` high); 0 for no limit."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    deterministic: bool = False
    """Give the same bits in every run on GPUs too, also across a resume. Attention then takes about twice as long, and
    models with an operation that has no such version cannot be trained. On CPU, bits are always the same."""
    log_samples_every: NonNegative = 10
    """Interval, in steps of a loop that samples, at which one group of completions is kept in `samples.jsonl` for
    inspection; 0 for never."""

    @model_validator(mode="after")
    def _can_offload(self) -> Self:
        least = {"none": 0, "optimizer": 1, "parameters": 3}[self.offload]
        if self.zero_stage < least:
            raise ValueError(
                f'found trainer.offload = "{self.offload}" with trainer.zero_stage = {self.zero_stage}; expected '
                f"zero_stage = {least} or more, which splits the parts for main memory"
            )
        return self


Trainer = Annotated[NativeTrainer | CommandTrainer, Field(discriminator="kind")]
"""Settings of all kinds of trainers."""


def trainer_kinds() -> Mapping[str, type[NativeTrainer] | type[CommandTrainer]]:
    """Settings of every kind of trainer, by name."""
    return {"native": NativeTrainer, "command": CommandTrainer}
