"""The protocol of rollout engines, and how one token is drawn from logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import StaleWeights
from rlhf_core.schemas.trainers import CDF_CHUNK_ELEMENTS
from rlhf_core.training.rollouts.seeds import uniforms
from rlhf_core.training.types import Completion


@dataclass(frozen=True)
class Sampling:
    """Settings of the completions of one call."""

    max_new_tokens: int
    """Longest completion; one that reaches it without an end token is not ``finished``."""
    temperature: float
    """Divisor of the logits; 0 always takes the likeliest token and ignores the seeds."""
    batch_size: int
    """Sequences generated at once by this rank."""


@dataclass(frozen=True)
class WeightTransfer:
    """Transfer of one version of the weights into engines, as one rank of the trainer saw it."""

    transport: str
    """Way that the weights went, for instance ``in_process``."""
    bytes: int
    """Bytes that this rank has moved."""
    wire_s: float
    """Seconds on the wire; 0 where the weights stay in the process."""
    apply_s: float
    """Seconds in which engines took the weights over."""
    acknowledged: int = 1
    """Engines that have told this rank that the version is in force."""
    limit_gb_per_s: float | None = None
    """Limit of the link of this rank; None where it is not known."""


class Ahead(Protocol):
    """Sampling that goes on while the trainer trains: one rollout at a time, with the weights in force at its start.

    The engine may be given the next version meanwhile: it waits for the rollout first.
    """

    def begin(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling, version: int
    ) -> None:
        """Begin to sample, as ``RolloutEngine.sample`` does. Not collective.

        Raises:
            StaleWeights, ValueError: as there.
        """

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until what can be answered is; returns at once where nothing was begun.

        Args:
            beat: called whenever an engine is seen to make progress.

        Raises:
            EnginesLost: no engine serves, and none came back in time.
        """

    def stop(self) -> None:
        """Have it end soon, and wait for that."""

    def peek(self) -> Mapping[int, list[Completion]]:
        """Completions that are there once it has ended, by the index of the prompt."""

    def collect(self, beat: Callable[[], None]) -> list[list[Completion]]:
        """Wait, and sample with the version in force by now what was left: its engines had to be started again.
        Collective.

        Returns:
            One list per prompt with one completion per seed, in the order given.

        Raises:
            EnginesLost: as :meth:`wait`.
        """


class RolloutEngine(Protocol):
    """Samples completions of prompts with one version of the weights.

    The completion of one prompt under one seed depends on the weights, the prompt and that seed, and on nothing else
    but the rounding of floating-point numbers: not on the other sequences, their order, or how they are batched. The
    same seeds give other completions on another kind of engine.
    """

    @property
    def version(self) -> int | None:
        """Version of the weights in force; None before the first."""

    @property
    def ahead(self) -> Ahead | None:
        """Sampling beside training; None for an engine in the trainer's process, which has no time for both."""

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> WeightTransfer | None:
        """Take over the weights of ``model``. Collective over the ranks of the trainer.

        A version comes into force as a whole or not at all: an engine that fails meanwhile has none afterwards.

        Args:
            model: causal language model; its weights, mode and gradients are left as they are.
            version: number of optimizer steps of the run that the weights have behind them.
            beat: called after every bucket of weights.

        Returns:
            What was moved; None where nothing was, because the version is in force or the engine has no weights of its
            own.
        """

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample ``len(seeds[i])`` completions of ``prompts[i]``. Collective over the ranks, if only with no prompts.

        Args:
            prompts: ``P`` token lists, none of them empty.
            seeds: ``P`` lists, one seed per completion (``seeds.sample_seed``).
            version: version that the completions are to be made with.
            beat: called after every generated token position.

        Returns:
            One list per prompt with one completion per seed, in the order given.

        Raises:
            StaleWeights: the engine has another version in force.
            ValueError: a prompt is empty, or there are not as many lists of seeds as prompts.
        """

    def take_counts(self) -> Mapping[str, float]:
        """Metrics of this rank's calls since the last time: by name, added up over the ranks."""

    def sleep(self) -> None:
        """Give memory back that only sampling needs. The next thing asked of the engine may be to load a version."""

    def close(self) -> None:
        """Give back what the engine holds."""


def require_version(found: int | None, expected: int) -> None:
    """Refuse to sample with other weights than those that are asked for.

    Raises:
        StaleWeights: they are.
    """
    if found != expected:
        raise StaleWeights(
            f"the rollout engine has weights of {'no step' if found is None else f'step {found}'} in force, and "
            f"completions of those of step {expected} are asked for; they were not made"
        )


def require_prompts(prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]]) -> None:
    """Refuse what cannot be sampled.

    Raises:
        ValueError: a prompt is empty, or there are not as many lists of seeds as prompts.
    """
    if len(seeds) != len(prompts):
        raise ValueError(f"found {len(seeds)} lists of seeds for {len(prompts)} prompts; expected one each")
    if any(not prompt for prompt in prompts):
        raise ValueError("found an empty prompt; a completion needs at least one token to follow")


def completion_of(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], finished: bool, logprobs: list[float]
) -> Completion:
    """Turn sampled tokens into a completion.

    Args:
        tokens: with the end token where it was sampled.
        finished: True if it was.
        logprobs: one per token.
    """
    # Special tokens stay visible: a reward function must see every token that the model chose to write.
    text = tokenizer.decode(
        tokens[:-1] if finished else tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return Completion(tokens, str(text), finished, logprobs)


def draw_tokens(logits: Tensor, seeds: Tensor, position: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per sequence by inverting the cumulative distribution at a seeded uniform number.

    Each sequence has its own noise, so what it gets does not depend on its neighbours.

    Args:
        logits: ``[B, V]``.
        seeds: ``[B]`` int64.
        position: index of the token in the completion, from 0.
        temperature: 0 takes the likeliest token.

    Returns:
        Tokens ``[B]`` int64 and their log-probabilities ``[B]`` float32 at ``temperature`` (at 1 for temperature 0).
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    tokens = logprobs.argmax(-1) if temperature == 0 else _invert_cdf(logprobs, uniforms(seeds, position))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _invert_cdf(logprobs: Tensor, noise: Tensor) -> Tensor:
    """``logprobs [B, V]``, ``noise [B]`` in [0, 1) -> tokens ``[B]``; a token of probability 0 is never drawn."""
    rows = max(1, CDF_CHUNK_ELEMENTS // logprobs.shape[1])
    drawn = []
    for part, part_noise in zip(logprobs.split(rows), noise.split(rows), strict=True):
        cdf = part.double().exp().cumsum(-1)
        drawn.append(torch.searchsorted(cdf, part_noise[:, None] * cdf[:, -1:], right=True).squeeze(-1))
    return torch.cat(drawn)
