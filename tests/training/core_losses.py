"""Losses of objectives on explicit tensors, for tests."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhf_core.schemas.algorithms import specs
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MicroBatch, PolicyOutput, StepSums


def settings_of(name: str, settings: Mapping[str, Any]) -> Any:
    """Settings of an algorithm, with some of them overridden."""
    return specs()[name].model_validate({"name": name, **settings})


def sft_loss(logprobs: Tensor, mask: Tensor, num_tokens: float) -> tuple[Tensor, Stats]:
    """Loss of supervised fine-tuning of one micro-batch, of a step with ``num_tokens`` target tokens."""
    output, batch = PolicyOutput(logprobs), MicroBatch(mask)
    found: tuple[Tensor, Stats] = ALGORITHMS["sft"].loss(output, batch, StepSums(num_tokens, 1), settings_of("sft", {}))
    return found


def policy_loss_of(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    sums: StepSums | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Stats]:
    """Loss of one micro-batch.

    Args:
        advantages: ``[B, T]`` or ``[B, 1]``.
        sums: statistics of the whole update; by default those of a single sequence with a single token.
    """
    batch = MicroBatch(
        mask,
        advantages=advantages.expand(mask.shape),
        old_logprobs=old_logprobs,
        sampler_logprobs=sampler_logprobs,
    )
    output = PolicyOutput(logprobs, ref_logprobs)
    found: tuple[Tensor, Stats] = ALGORITHMS[name].loss(
        output, batch, sums or StepSums(1, 1, max_new_tokens=1), settings_of(name, settings)
    )
    return found
