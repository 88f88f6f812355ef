"""Objectives: the algorithm-specific part of a training loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from rlhf_core.training.algorithms.aggregation import Stats

Whitening = Literal["no", "tokens", "sequences"]
"""Unit of advantages over which they are whitened."""


@dataclass(frozen=True)
class MetricDef:
    """A metric that a loss contributes to ``metrics.jsonl``; docs/metrics.md has its meaning."""

    name: str
    """Name, as ``group/name``. ``train/loss`` is required of every objective."""
    stats: tuple[str, ...]
    """Statistics of the loss whose sums are added; the weight is that of the first. A step without them omits the
    metric."""


@dataclass(frozen=True)
class StepSums:
    """Figures of one update of the weights, over all ranks and micro-batches."""

    num_tokens: float
    """Number of tokens in the loss."""
    num_sequences: float
    """Number of sequences in the loss; for an algorithm with pairs, twice the number of pairs."""
    reward_total: float = 0.0
    """Sum of the rewards of the step (:meth:`Objective.shaped`), over all of its updates."""
    reward_squares: float = 0.0
    """Sum of the squares of these rewards."""
    max_new_tokens: int = 0
    """Longest completion that may be sampled."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Sums of the results of :meth:`Objective.measure` over the whole batch."""
    num_chosen_tokens: float = 0.0
    """Number of tokens of the chosen completions of all pairs, including their prompts if the prompt is scored."""

    @property
    def num_pairs(self) -> float:
        """Number of pairs, for an algorithm with pairs."""
        return self.num_sequences / 2


@dataclass(frozen=True)
class MicroBatch:
    """The ``B`` sequences of one micro-batch.

    With pairs, the first half are the chosen completions, and the second half the rejected ones in the same order.
    """

    mask: Tensor
    """``[B, T]`` bool, true for completion tokens."""
    prompt_mask: Tensor | None = None
    """``[B, T]`` bool, true for the predicted tokens of the prompt, for an algorithm that scores it."""
    advantages: Tensor | None = None
    """``[B, T]`` float64, for an algorithm that samples; 0 where ``mask`` is false."""
    returns: Tensor | None = None
    """``[B, T]`` targets of the value model, likewise."""
    old_logprobs: Tensor | None = None
    """``[B, T]`` under the policy at the beginning of the step; None if that is the trained policy itself."""
    old_values: Tensor | None = None
    """``[B, T]`` values at the beginning of the step, for an algorithm with a critic."""
    sampler_logprobs: Tensor | None = None
    """``[B, T]`` as reported by the sampling engine, to correct its mismatch with the trainer."""
    desirable: Tensor | None = None
    """``[B]`` bool, for an algorithm with labelled rows."""
    margins: Tensor | None = None
    """``[B/2]`` margin by which the chosen completion is better, if the data has one."""


@dataclass(frozen=True)
class PolicyOutput:
    """Result of the forward passes for one micro-batch."""

    logprobs: Tensor
    """``[B, T]`` log-probabilities under the policy, with gradient."""
    ref_logprobs: Tensor | None = None
    """``[B, T]`` under the reference model, for an algorithm that has one."""
    entropy: Tensor | None = None
    """``[B, T]`` entropy of the policy in nats, with gradient, for an algorithm whose loss includes it."""
    scores: Tensor | None = None
    """``[B]`` outputs of a reward model, with gradient; the log-probabilities are then empty."""


_Part = TypeVar("_Part", PolicyOutput, MicroBatch)


def select_rows(
    output: PolicyOutput, batch: MicroBatch, rows: Sequence[int], *, paired: bool = False
) -> tuple[PolicyOutput, MicroBatch]:
    """Some rows of a micro-batch of an algorithm that learns from rows, with their outputs.

    Args:
        rows: their indices among the rows, which are half as many as the sequences if these are ``paired``.
    """
    count = len(batch.mask) // (2 if paired else 1)

    def of_rows(part: _Part) -> _Part:
        # Log-probabilities of a reward model are empty, and margins are half as many as the sequences of pairs.
        tensors = {name: values for name, values in vars(part).items() if values is not None and len(values)}
        return replace(
            part,
            **{
                name: values[[start + row for start in range(0, len(values), count) for row in rows]]
                for name, values in tensors.items()
            },
        )

    return of_rows(output), of_rows(batch)


@dataclass(frozen=True)
class SampledBatch:
    """This rank's completions of one step, before the first update: ``B`` = P*G of them, padded to ``[B, T]``."""

    rewards: Tensor
    """``[P, G]`` float64, prompts by samples."""
    mask: Tensor
    """``[B, T]`` bool, true for sampled tokens, which come first in each row: observations between turns are left
    out, so that a token is followed by the next one that the model sampled."""
    trained: Tensor
    """``[B, T]`` bool, true for sampled tokens that count in the loss."""
    lengths: Tensor
    """``[B]`` int64, numbers of tokens with those of observations, which ``max_new_tokens`` bounds."""
    logprobs: Tensor | None = None
    """``[B, T]`` under the policy; None if they are not needed before the update."""
    ref_logprobs: Tensor | None = None
    """``[B, T]`` under the reference model, likewise."""
    values: Tensor | None = None
    """``[B, T]`` of the value model at the state before each token, for an algorithm with a critic."""


@dataclass(frozen=True)
class Advantages:
    """Learning signal that an algorithm derives from the rewards of one rank."""

    tokens: Tensor
    """``[B, T]`` float64; 0 where no token was sampled."""
    returns: Tensor | None = None
    """``[B, T]`` float64, targets of the value model."""


class Objective(Protocol):
    """An algorithm: the loss that its loop minimises and the loss's metrics. The settings are in ``AlgorithmSpec``."""

    metrics: ClassVar[tuple[MetricDef, ...]]

    def shaped(self, batch: SampledBatch, max_new_tokens: int, spec: Any) -> Tensor:
        """Rewards ``[P, G]`` that advantages are computed from. By default, those of the reward functions.

        Args:
            max_new_tokens: longest completion that may be sampled.
        """
        return batch.rewards

    def advantages(self, batch: SampledBatch, sums: StepSums, spec: Any) -> Advantages:
        """Advantages of the completions of one rank. By default, the rewards themselves.

        Args:
            sums: figures of the whole step; ``measured`` is empty.
        """
        return Advantages(per_token(batch.rewards.flatten(), batch.mask))

    def whitens(self, spec: Any) -> Whitening:
        """Unit over which the advantages of all ranks are whitened to mean 0 and standard deviation 1."""
        return "no"

    def measure(self, output: PolicyOutput, batch: MicroBatch, spec: Any) -> Mapping[str, Tensor]:
        """Sums over a micro-batch of the figures that the loss needs for the whole batch before its first backward
        pass.

        Returning any costs one more forward pass without gradient. Empty by default.
        """
        return {}

    def rewards(self, output: PolicyOutput, batch: MicroBatch, spec: Any) -> Tensor:
        """Implicit rewards ``[B]`` for ranking completions. By default, their log-probabilities."""
        return torch.where(batch.mask, output.logprobs, 0.0).sum(-1)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: Any) -> tuple[Tensor, Stats]:
        """One micro-batch's share of the loss of the update, and its statistics.

        Returns:
            A scalar, to be summed over micro-batches and ranks, and (sum, count) by name.
        """
        ...


def per_token(values: Tensor, mask: Tensor) -> Tensor:
    """Broadcast one value per sequence ``[B]`` to its tokens: ``[B, T]`` float64, 0 where ``mask`` is false."""
    return torch.where(mask, values.double()[:, None], 0.0)
