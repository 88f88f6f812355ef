"""Sampling in the process of an engine: requests come and go while it works.

A sampler is the engine's side of what ``base.RolloutEngine`` is for a trainer. It is used by one thread.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import StaleWeights
from rlhf_core.training.models import random_causal_lm
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.transformers_engine import generate
from rlhf_core.training.rollouts.weight_probe import probe_logprobs
from rlhf_core.training.types import Completion


@dataclass(frozen=True)
class SamplerRequest:
    """One prompt, its completions to be made, and the number by which they are known."""

    key: int
    prompt: Sequence[int]
    seeds: Sequence[int]
    sampling: Sampling


class Sampler(Protocol):
    """Samples with one version of the weights."""

    @property
    def num_waiting(self) -> int:
        """Completions that were asked for and are not made."""

    @property
    def is_alive(self) -> bool:
        """False once a process has ended that it samples with."""

    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Take all weights over. Called while there are no requests.

        Args:
            tensors: names and tensors, tied ones once.
            beat: called after every tensor.

        Raises:
            StaleWeights: these are not the weights of this model. It may hold a part of them then.
        """

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first."""

    def submit(self, request: SamplerRequest) -> None:
        """Take a request."""

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Work on the requests for a while.

        Args:
            beat: called after every decoding step.

        Returns:
            Completions of the requests that are done, by key.
        """

    def cancel(self, keys: Collection[int]) -> None:
        """Drop requests that are not done."""


class TransformersSampler:
    """transformers' model with our own decode loop; a batch is made to its end before the next one begins."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, dtype: str, device: torch.device) -> None:
        """Build the model with random weights.

        Args:
            folder: Hugging Face folder with the configuration of the model.
        """
        self._tokenizer = tokenizer
        self._model = random_causal_lm(folder, dtype)
        self._model.to(device)
        self._waiting: dict[int, SamplerRequest] = {}

    @property
    def num_waiting(self) -> int:
        """Completions that were asked for and are not made."""
        return sum(len(request.seeds) for request in list(self._waiting.values()))

    @property
    def is_alive(self) -> bool:
        """True: it samples in this process."""
        return True

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Copy weights into the model; see :class:`Sampler`."""
        places = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        missing = set(places) & set(self._model.state_dict())
        for name, tensor in tensors:
            place = places.get(name)
            if place is None or place.shape != tensor.shape:
                found = "no weight of that name" if place is None else f"one of shape {tuple(place.shape)}"
                raise StaleWeights(f"weight {name} of shape {tuple(tensor.shape)} came, and the engine has {found}")
            place.copy_(tensor)
            missing.discard(name)
            beat()
        if missing:
            raise StaleWeights(f"{len(missing)} weights did not come, among them {min(missing)}")

    @torch.no_grad()
    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first."""
        return probe_logprobs(self._model(torch.tensor([list(tokens)], device=self._model.device)).logits[0], tokens)

    def submit(self, request: SamplerRequest) -> None:
        """Take a request."""
        self._waiting[request.key] = request

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Make the completions of one batch."""
        batch = self._next_batch()
        if not batch:
            return []
        sampling = batch[0].sampling
        made = generate(
            self._model,
            self._tokenizer,
            [request.prompt for request in batch],
            [request.seeds for request in batch],
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            batch_size=sampling.batch_size,
            beat=beat,
        )
        self.cancel([request.key for request in batch])
        return [(request.key, completions) for request, completions in zip(batch, made, strict=True)]

    def cancel(self, keys: Collection[int]) -> None:
        """Drop requests that are not done."""
        for key in keys:
            self._waiting.pop(key, None)

    def _next_batch(self) -> list[SamplerRequest]:
        """The oldest requests that can be sampled together, as many as fit, at least one."""
        batch: list[SamplerRequest] = []
        size = 0
        for request in self._waiting.values():
            size += len(request.seeds)
            if batch and (request.sampling != batch[0].sampling or size > request.sampling.batch_size):
                break
            batch.append(request)
        return batch
