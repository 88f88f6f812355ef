"""Objectives: the part of a training loop that differs from algorithm to algorithm."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

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
    """Figures of a whole optimizer step, over all ranks."""

    num_tokens: float
    """Tokens that the loss is taken over."""
    num_sequences: float
    """Sequences that the loss is taken over."""
    reward_total: float = 0.0
    """Sum of the rewards."""
    reward_squares: float = 0.0
    """Sum of the squares of the rewards."""
    max_new_tokens: int = 0
    """Longest completion that may be sampled."""


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of one micro-batch."""

    mask: Tensor
    """``[B, T]`` bool, true for the tokens that the loss is taken over."""
    advantages: Tensor | None = None
    """``[B]`` float64, of an algorithm that samples."""


@dataclass(frozen=True)
class PolicyOutput:
    """Result of the forward passes for one micro-batch."""

    logprobs: Tensor
    """``[B, T]`` log-probabilities under the policy, with gradient."""
    ref_logprobs: Tensor | None = None
    """``[B, T]`` under the reference model, of an algorithm that has one."""


class Objective(Protocol):
    """An algorithm: what its loop minimises, and the metrics that come with it. The settings are ``AlgorithmSpec``."""

    metrics: ClassVar[tuple[MetricDef, ...]]

    def advantages(self, rewards: Tensor, sums: StepSums, spec: Any) -> Tensor:
        """Advantages of the completions of one rank; the rewards themselves unless an algorithm says otherwise.

        Args:
            rewards: ``[P, G]`` float64, prompts by samples.

        Returns:
            ``[P, G]`` float64.
        """
        return rewards

    def loss(self, output: PolicyOutput, batch: MicroBatch, sums: StepSums, spec: Any) -> tuple[Tensor, Stats]:
        """The share of one micro-batch in the loss of the step, and its statistics.

        Returns:
            A scalar, to be summed over micro-batches and ranks, and (sum, count) by name.
        """
        ...
