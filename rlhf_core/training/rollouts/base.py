"""What every way of sampling completions does, and how one token is drawn from logits."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.schemas.trainers import CDF_CHUNK_ELEMENTS
from rlhf_core.training.seeds import uniforms
from rlhf_core.training.types import Completion


class Generate(Protocol):
    """Samples completions of prompts.

    The completion of one prompt under one seed depends on the weights, the prompt and that seed, and on nothing else
    but the rounding of floating-point numbers: not on the other sequences, their order, or how they are batched.
    """

    def __call__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        batch_size: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample ``len(seeds[i])`` completions of ``prompts[i]``.

        Args:
            model: causal language model; its weights, mode and gradients are left as they are.
            tokenizer: turns completions into text and knows the end token.
            prompts: ``P`` token lists, none of them empty.
            seeds: ``P`` lists, one seed per completion (``seeds.sample_seed``).
            max_new_tokens: longest completion; one that reaches it without an end token is not ``finished``.
            temperature: logits are divided by it; 0 always takes the likeliest token and ignores the seeds.
            batch_size: sequences generated at once.
            beat: called after every generated token position.

        Returns:
            One list per prompt with one completion per seed, in the order given.
        """


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
