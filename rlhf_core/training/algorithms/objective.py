"""Objectives: the part of a training loop that differs from algorithm to algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from rlhf_core.training.algorithms.aggregation import Stats


@dataclass(frozen=True)
class MetricDef:
    """A metric that a loss contributes to ``metrics.jsonl``."""

    name: str
    """Name, as ``group/name``. ``train/loss`` is required of every objective."""
    stats: tuple[str, ...]
    """Statistics of the loss whose sums are added; the weight is that of the first. Without them in a step, the metric
    is left out of it."""
    meaning: str
    """Unit and meaning, in a sentence."""


@dataclass(frozen=True)
class StepSums:
    """Figures of one update of the weights, over all ranks and micro-batches."""

    num_tokens: float
    """Tokens that the loss is taken over."""
    num_sequences: float
    """Sequences that the loss is taken over; twice the pairs of an algorithm that has pairs."""
    reward_total: float = 0.0
    """Sum of the rewards of the step (:meth:`Objective.shaped`), whatever number of updates it has."""
    reward_squares: float = 0.0
    """Sum of the squares of these rewards."""
    max_new_tokens: int = 0
    """Longest completion that may be sampled."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Sums over the whole batch of what :meth:`Objective.measure` gave."""

    num_chosen_tokens: float = 0.0
    """Tokens of the chosen completions of all pairs, those of their prompts included where the prompt is scored."""

    @property
    def num_pairs(self) -> float:
        """Pairs of an algorithm that has pairs."""
        return self.num_sequences / 2


@dataclass(frozen=True)
class MicroBatch:
    """The ``B`` sequences of one micro-batch.

    With pairs, the first half are the chosen completions, and the second half the rejected ones in the same order.
    """

    mask: Tensor
    """``[B, T]`` bool, true for completion tokens."""
    prompt_mask: Tensor | None = None
    """``[B, T]`` bool, true for the predicted tokens of the prompt, of an algorithm that scores it."""
    advantages: Tensor | None = None
    """``[B, T]`` float64, of an algorithm that samples; 0 where ``mask`` is false."""
    returns: Tensor | None = None
    """``[B, T]`` targets of the value model, likewise."""
    old_logprobs: Tensor | None = None
    """``[B, T]`` under the policy at the beginning of the step; None where that is the policy that is trained."""
    old_values: Tensor | None = None
    """``[B, T]`` values at the beginning of the step, of an algorithm with a critic."""
    sampler_logprobs: Tensor | None = None
    """``[B, T]`` as the engine that sampled them gave them, for the correction of what differs from the trainer."""
    desirable: Tensor | None = None
    """``[B]`` bool, of an algorithm with labelled rows."""
    margins: Tensor | None = None
    """``[B/2]`` by how much the chosen completion is the better one, where the rows of a pair say so."""


@dataclass(frozen=True)
class PolicyOutput:
    """Result of the forward passes for one micro-batch."""

    logprobs: Tensor
    """``[B, T]`` log-probabilities under the policy, with gradient."""
    ref_logprobs: Tensor | None = None
    """``[B, T]`` under the reference model, of an algorithm that has one."""
    scores: Tensor | None = None
    """``[B]`` outputs of a reward model with gradient, in place of the log-probabilities, which are then empty."""


@dataclass(frozen=True)
class SampledBatch:
    """This rank's completions of one step, before the first update: ``B`` = P*G of them, padded to ``[B, T]``."""

    rewards: Tensor
    """``[P, G]`` float64, prompts by samples."""
    mask: Tensor
    """``[B, T]`` bool, true for sampled tokens."""
    finished: Tensor
    """``[B]`` bool: ended by itself, and was not cut off at the longest length."""
    trained: Tensor
    """``[B, T]`` bool, true for sampled tokens that the loss is taken over."""
    logprobs: Tensor | None = None
    """``[B, T]`` under the policy; None where nothing asks for them before the update."""
    ref_logprobs: Tensor | None = None
    """``[B, T]`` under the reference model, likewise."""
    values: Tensor | None = None
    """``[B, T]`` of the value model at the state before each token, of an algorithm with a critic."""


@dataclass(frozen=True)
class Advantages:
    """Signal that an algorithm draws from the rewards of one rank."""

    tokens: Tensor
    """``[B, T]`` float64; 0 where no token was sampled."""
    returns: Tensor | None = None
    """``[B, T]`` float64, targets of the value model."""


class Objective(Protocol):
    """An algorithm: what its loop minimises, and the metrics that come with it. The settings are ``AlgorithmSpec``."""

    metrics: ClassVar[tuple[MetricDef, ...]]

    def shaped(self, batch: SampledBatch, max_new_tokens: int, spec: Any) -> Tensor:
        """Rewards ``[P, G]`` that advantages are drawn from: those of the reward functions unless an algorithm says
        otherwise.

        Args:
            max_new_tokens: longest completion that may be sampled.
        """
        return batch.rewards

    def advantages(self, batch: SampledBatch, sums: StepSums, spec: Any) -> Advantages:
        """Advantages of the completions of one rank; the rewards themselves unless an algorithm says otherwise.

        Args:
            sums: figures of the whole step; ``measured`` is empty.
        """
        return Advantages(per_token(batch.rewards.flatten(), batch.mask))

    def whitens(self, spec: Any) -> Literal["no", "tokens", "sequences"]:
        """Unit over which the advantages of all ranks together are brought to mean 0 and standard deviation 1."""
        return "no"

    def measure(self, output: PolicyOutput, batch: MicroBatch, spec: Any) -> Mapping[str, Tensor]:
        """Figures that the loss needs of the whole batch before its first backward pass, as sums over a micro-batch.

        An algorithm that gives any costs one more forward pass without gradient. Empty unless it says otherwise.
        """
        return {}

    def rewards(self, output: PolicyOutput, batch: MicroBatch, spec: Any) -> Tensor:
        """Implicit rewards ``[B]`` by which completions are ranked: their log-probabilities unless an algorithm says
        otherwise."""
        return torch.where(batch.mask, output.logprobs, 0.0).sum(-1)

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: Any) -> tuple[Tensor, Stats]:
        """The share of one micro-batch in the loss of the update, and its statistics.

        Returns:
            A scalar, to be summed over micro-batches and ranks, and (sum, count) by name.
        """
        ...


def per_token(values: Tensor, mask: Tensor) -> Tensor:
    """One value for each sequence ``[B]``, at each of its tokens: ``[B, T]`` float64, 0 where ``mask`` is false."""
    return torch.where(mask, values.double()[:, None], 0.0)
