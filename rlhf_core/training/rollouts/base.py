"""The protocol of rollout engines, and the sampling of one token from logits."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import StaleWeights
from rlhf_core.schemas.trainers import CDF_CHUNK_ELEMENTS
from rlhf_core.training.data.tokenizers import text_of
from rlhf_core.training.rollouts.seeds import uniforms
from rlhf_core.training.types import Completion

CDF_UNITS = 2.0**52
"""Units that a probability of 1 has when tokens are drawn: as fine as the random numbers, and sums stay exact."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one call."""

    max_new_tokens: int
    """Maximum length of a completion; one that reaches it without an end token is not ``finished``."""
    temperature: float
    """Divisor of the logits; 0 always takes the most likely token and ignores the seeds."""
    batch_size: int
    """Sequences generated at once by this rank."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides those that tokenizer and model name."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that together have this probability; 1 for all, as in training."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 for all."""
    min_p: float = 0.0
    """Draw from the tokens with at least this share of the likeliest token's probability."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, with the token that completes one (``completion_end.py``)."""

    @property
    def is_cut(self) -> bool:
        """True if some tokens are never drawn, however likely."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class WeightTransfer:
    """Transfer of one version of the weights into engines, as one rank of the trainer saw it."""

    transport: str
    """Transport of the weights, for instance ``in_process``."""
    bytes: int
    """Bytes that this rank moved."""
    wire_s: float
    """Seconds on the wire; 0 if the weights stay in the process."""
    apply_s: float
    """Seconds that engines took to load the weights."""
    acknowledged: int = 1
    """Number of engines that have confirmed the version to this rank."""


@dataclass(frozen=True)
class PromptTask:
    """One prompt with the seeds of its completions."""

    index: int
    """Number of the task, which identifies its answer."""
    prompt: Sequence[int]
    seeds: Sequence[int]


class PromptSource(Protocol):
    """The prompts of one rank, and their completions. Used by one thread at a time."""

    @property
    def sampling(self) -> Sampling:
        """Settings of each task."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts that get completions; each takes one task or several."""

    @property
    def made(self) -> Mapping[int, list[Completion]]:
        """Completions of the prompts that have all of theirs, by index of the prompt."""

    @property
    def is_waiting(self) -> bool:
        """True while something other than an engine is at work for it, within a time limit of its own."""

    @property
    def descriptor(self) -> int | None:
        """Descriptor that is readable once :meth:`take` may return more without an answer; None if it never does."""

    def take(self, beat: Callable[[], None]) -> Sequence[PromptTask]:
        """Return the tasks that have become known since the last call, without waiting for others.

        Args:
            beat: called if that takes longer nevertheless.

        Raises:
            ToolFailed: a rollout cannot go on, and the run shall end.
        """

    def answer(self, index: int, completions: Sequence[Completion]) -> None:
        """Accept the completions of a task, once.

        Raises:
            ToolFailed: as in :meth:`take`.
        """

    def end(self, beat: Callable[[], None]) -> None:
        """Free what the rollout held, at its end. What has been begun for prompts without their completions is
        forgotten: :meth:`take` begins them anew."""

    def results(self) -> list[list[Completion]]:
        """Completions of all prompts, in order. Called once."""


class PromptList:
    """Prompts that are all known, each of them one task; see :class:`PromptSource`."""

    is_waiting = False
    descriptor = None

    def __init__(self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Args:
        prompts: token lists, none of them empty.
        seeds: one list per prompt, with one seed per completion.

        Raises:
            ValueError: a prompt is empty, or the number of lists of seeds is not the number of prompts.
        """
        require_prompts(prompts, seeds)
        self.sampling = sampling
        self.made: dict[int, list[Completion]] = {}
        self._tasks = [PromptTask(index, *one) for index, one in enumerate(zip(prompts, seeds, strict=True))]
        self._is_taken = False

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self._tasks)

    def take(self, beat: Callable[[], None]) -> Sequence[PromptTask]:
        """Return all unanswered prompts at the first call, and none after that."""
        tasks = [] if self._is_taken else [task for task in self._tasks if task.index not in self.made]
        self._is_taken = True
        return tasks

    def answer(self, index: int, completions: Sequence[Completion]) -> None:
        """Accept the completions of a prompt."""
        self.made[index] = list(completions)

    def end(self, beat: Callable[[], None]) -> None:
        """Return the unanswered prompts again at the next :meth:`take`."""
        self._is_taken = False

    def results(self) -> list[list[Completion]]:
        """Completions of all prompts, in order."""
        return [self.made[task.index] for task in self._tasks]


class ContinuousSampling(Protocol):
    """Sampling of prompts some of which become known only while others are sampled.

    It may also go on in parallel to training, with the weights that are current at its start. Loading the next version
    meanwhile is allowed: it waits for the rollout first. With ``max_staleness`` above 1, several rollouts may be in
    progress, and they continue with the next version.
    """

    def sample(self, source: PromptSource, version: int, beat: Callable[[], None]) -> None:
        """Sample until every prompt has its completions. Collective over the ranks, even without prompts.

        Args:
            version: version of the weights to sample with.
            beat: called whenever an engine makes progress, and while something else is at work for the source.

        Raises:
            EnginesLost: no engine serves requests, and none recovered in time.
            StaleWeights: the current version is a different one.
            ToolFailed: raised by the source.
        """

    def begin(self, source: PromptSource, version: int) -> None:
        """Begin to sample in parallel to the caller, which leaves the source alone from here on. Not collective.

        Raises:
            StaleWeights: as in :meth:`sample`.
        """

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until all begun rollouts have ended: every prompt that can be answered has been.

        Args:
            beat: as for :meth:`sample`.

        Raises:
            EnginesLost, ToolFailed: as in :meth:`sample`, at every call.
        """

    def stop(self) -> None:
        """Stop all begun rollouts soon, and wait for their end."""

    def collect(self, beat: Callable[[], None]) -> None:
        """Wait for the rollout begun first, then sample the prompts that restarted engines have left over with the
        version now current. Collective.

        Raises:
            EnginesLost, ToolFailed: as in :meth:`sample`.
        """


class RolloutEngine(Protocol):
    """Samples completions of prompts with one version of the weights.

    Apart from floating-point rounding, the completion of a prompt depends only on the weights, the prompt and the seed:
    not on the other sequences, their order or their batching. The same seeds give different completions on a different
    kind of engine.
    """

    @property
    def version(self) -> int | None:
        """Version of the current weights; None before the first."""

    @property
    def continuous(self) -> ContinuousSampling | None:
        """Sampling of prompts that become known meanwhile, also in parallel to training; None for an engine in the
        trainer's process, which cannot do both."""

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> WeightTransfer | None:
        """Load the weights of ``model``. Collective over the trainer's ranks.

        Loading is all or nothing: an engine that fails during it has no version afterwards.

        Args:
            model: causal language model; its weights, mode and gradients stay unchanged.
            version: number of optimizer steps of the run behind the weights.
            beat: called after every bucket of weights.

        Returns:
            The transfer; None if there was none, because the version is already current or the engine has no weights of
            its own.
        """

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample ``len(seeds[i])`` completions of ``prompts[i]``. Collective over the ranks, even without prompts.

        Args:
            prompts: ``P`` token lists, none of them empty.
            seeds: ``P`` lists, one seed per completion (``seeds.sample_seed``).
            version: version of the weights to sample with.
            beat: called after every generated token position.

        Returns:
            One list per prompt with one completion per seed, in the order given.

        Raises:
            StaleWeights: the engine's current version is a different one.
            ValueError: a prompt is empty, or the number of lists of seeds is not the number of prompts.
        """

    def take_counts(self) -> Mapping[str, float]:
        """Return the metrics of this rank's calls since the last call, by name; they are summed over the ranks."""

    def sleep(self) -> None:
        """Release the memory that only sampling needs. The next call may load a version."""

    def close(self) -> None:
        """Release the engine's resources."""


def require_version(found: int | None, expected: int) -> None:
    """Refuse to sample with weights other than those requested.

    Raises:
        StaleWeights: the versions differ.
    """
    if found != expected:
        raise StaleWeights(
            f"the rollout engine has weights of {'no step' if found is None else f'step {found}'} active, but step "
            f"{expected} was requested; nothing was sampled"
        )


def require_prompts(prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]]) -> None:
    """Refuse prompts that cannot be sampled.

    Raises:
        ValueError: a prompt is empty, or the number of lists of seeds is not the number of prompts.
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
        tokens: sampled tokens, with the end token if it was sampled.
        finished: True if the end token was sampled.
        logprobs: one per token.
    """
    # Special tokens stay visible: a reward function must see every token that the model generated.
    return Completion(tokens, text_of(tokenizer, tokens[:-1] if finished else tokens), finished, logprobs)


def draw_tokens(logits: Tensor, seeds: Tensor, position: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per sequence by inverting the cumulative distribution at a seeded uniform number.

    Each sequence has its own noise, so its tokens do not depend on its neighbours.

    Args:
        logits: ``[B, V]``.
        seeds: ``[B]`` int64.
        position: index of the token in the completion, from 0.
        sampling: temperature 0 takes the most likely token.

    Returns:
        Tokens ``[B]`` int64 and their log-probabilities ``[B]`` float32 in the distribution that they are drawn from
        (at temperature 1 for temperature 0). A row of logits with NaN gives some token, with a log-probability of NaN.
    """
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if sampling.is_cut:
        _cut(logprobs, sampling)
    tokens = logprobs.argmax(-1) if sampling.temperature == 0 else _invert_cdf(logprobs, uniforms(seeds, position))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _cut(logprobs: Tensor, sampling: Sampling) -> None:
    """Remove tokens from ``logprobs [B, V]`` and renormalise the others in place: by ``min_p``, then ``top_k``, then
    ``top_p`` of what is left, as in vLLM. Tokens as likely as the last of ``top_k`` also stay."""
    for part in logprobs.split(max(1, CDF_CHUNK_ELEMENTS // (3 * logprobs.shape[1]))):
        if sampling.min_p > 0:
            part.masked_fill_(part < part.amax(-1, keepdim=True) + math.log(sampling.min_p), -math.inf)
        if 0 < sampling.top_k < part.shape[1]:
            part.masked_fill_(part < part.topk(sampling.top_k).values[:, -1:], -math.inf)
        if sampling.top_p < 1:
            ordered, order = part.sort(dim=-1, stable=True)
            # In integers: see _invert_cdf.
            below = (ordered.softmax(-1).double() * CDF_UNITS).long().cumsum(-1)
            is_left_out = below <= ((1 - sampling.top_p) * below[:, -1:]).long()
            is_left_out[:, -1] = False
            part.masked_fill_(torch.zeros_like(is_left_out).scatter_(-1, order, is_left_out), -math.inf)
        part.copy_(part.log_softmax(-1))


def _invert_cdf(logprobs: Tensor, noise: Tensor) -> Tensor:
    """``logprobs [B, V]``, ``noise [B]`` in [0, 1) -> tokens ``[B]``; a token of probability 0 is never drawn."""
    rows = max(1, CDF_CHUNK_ELEMENTS // logprobs.shape[1])
    drawn = []
    for part, part_noise in zip(logprobs.split(rows), noise.split(rows), strict=True):
        # In integers, because sums of floating-point numbers have no deterministic version on a GPU.
        cdf = (part.double().exp() * CDF_UNITS).long().cumsum(-1)
        place = (part_noise * cdf[:, -1]).long()
        drawn.append(torch.searchsorted(cdf, place[:, None], right=True).squeeze(-1))
    # Past the end where the distribution is NaN, and an index there would end a process on a GPU without a reason.
    return torch.cat(drawn).clamp(max=logprobs.shape[1] - 1)
