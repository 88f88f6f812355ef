"""Sampling in an engine's process, where requests come and go during decoding.

A sampler is the engine-side counterpart of the trainer's ``base.RolloutEngine``. Only one thread uses it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import StaleWeights
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.training.models.adapters import has_adapter
from rlhf_core.training.models.causal_lm import random_causal_lm
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.engine_adapter import adapted_causal_lm, count_differing, taken_weights
from rlhf_core.training.rollouts.transformers_engine import generate
from rlhf_core.training.rollouts.weight_probe import probe_logprobs
from rlhf_core.training.types import Completion


@dataclass(frozen=True)
class SamplerRequest:
    """One prompt, the completions to generate, and their key."""

    key: int
    prompt: Sequence[int]
    seeds: Sequence[int]
    sampling: Sampling


class Sampler(Protocol):
    """Samples with one version of the weights. What has a default is that of full weights, sampled in this process."""

    @property
    def num_waiting(self) -> int:
        """Number of unfinished completions."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of a required process that has ended, negative for a signal; None while all are alive."""
        return None

    @property
    def pids(self) -> Sequence[int]:
        """Other processes that take part in every step."""
        return ()

    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Load a version. Called while no request is being processed: before any, or after :meth:`pause`.

        Args:
            tensors: names and tensors of all weights, tied ones once; for an adapter, only its own tensors.
            beat: called after every tensor.

        Raises:
            StaleWeights: these are not weights of this model, which may then hold a part of them.
        """

    def count_differing(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Number of adapter tensors that the model does not hold bit for bit; 0 for full weights, whose layout may
        differ."""
        return 0

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first."""

    def submit(self, request: SamplerRequest) -> None:
        """Accept a request."""

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Process the requests for a while.

        Args:
            beat: called after every decoding step.

        Returns:
            Completions of the finished requests, by key.
        """

    def cancel(self, keys: Collection[int]) -> None:
        """Drop unfinished requests."""

    def pause(self) -> None:
        """Take unfinished completions out of the model, before other weights are loaded; they keep their tokens."""

    def resume(self) -> None:
        """Continue paused completions after their tokens, with the weights loaded meanwhile."""


class TransformersSampler(Sampler):
    """transformers' model with our own decode loop; each batch is finished before the next one begins."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str,
        device: torch.device,
        lora: LoraSpec | None = None,
    ) -> None:
        """Build the model with random weights, or read it if versions are adapters.

        Args:
            folder: Hugging Face folder of the model; without ``lora`` only its configuration is read.
        """
        self._tokenizer = tokenizer
        self._model = random_causal_lm(folder, dtype) if lora is None else adapted_causal_lm(folder, dtype, lora)
        self._model.to(device)
        self._waiting: dict[int, SamplerRequest] = {}

    @property
    def num_waiting(self) -> int:
        """Number of unfinished completions."""
        return sum(len(request.seeds) for request in list(self._waiting.values()))

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Copy weights into the model; see :class:`Sampler`."""
        places = taken_weights(self._model)
        missing = set(places)
        for name, tensor in tensors:
            place = places.get(name)
            if place is None or place.shape != tensor.shape:
                found = "no weight of that name" if place is None else f"one of shape {tuple(place.shape)}"
                raise StaleWeights(f"weight {name} of shape {tuple(tensor.shape)} received, expected {found}")
            if place.dtype != tensor.dtype:
                # A loaded model keeps some weights in float32, such as biases of routers; one built at random does not.
                place.data = torch.empty_like(place, dtype=tensor.dtype)
            place.copy_(tensor)
            missing.discard(name)
            beat()
        if missing:
            raise StaleWeights(f"{len(missing)} weights were not received, among them {min(missing)}")

    def count_differing(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Compare the given adapter with the one in the model; see :class:`Sampler`."""
        return count_differing(tensors, taken_weights(self._model)) if has_adapter(self._model) else 0

    @torch.no_grad()
    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first."""
        return probe_logprobs(self._model(torch.tensor([list(tokens)], device=self._model.device)).logits[0], tokens)

    def submit(self, request: SamplerRequest) -> None:
        """Accept a request."""
        self._waiting[request.key] = request

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Generate the completions of one batch."""
        batch = self._next_batch()
        if not batch:
            return []
        prompts, seeds = [request.prompt for request in batch], [request.seeds for request in batch]
        made = generate(self._model, self._tokenizer, prompts, seeds, batch[0].sampling, beat)
        self.cancel([request.key for request in batch])
        return [(request.key, completions) for request, completions in zip(batch, made, strict=True)]

    def cancel(self, keys: Collection[int]) -> None:
        """Drop unfinished requests."""
        for key in keys:
            self._waiting.pop(key, None)

    def pause(self) -> None:
        """Do nothing: between two batches, no completion has any tokens."""

    def resume(self) -> None:
        """Do nothing; see :meth:`pause`."""

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


class OpenPrompts:
    """Prompts with unfinished completions: bookkeeping for samplers that generate each completion separately."""

    def __init__(self) -> None:
        """Start without requests."""
        self._made: dict[int, list[Completion | None]] = {}

    @property
    def num_waiting(self) -> int:
        """Number of unfinished completions. Callable from any thread."""
        return sum(completion is None for group in list(self._made.values()) for completion in group)

    def add(self, request: SamplerRequest) -> None:
        """Accept a request."""
        self._made[request.key] = [None] * len(request.seeds)

    def put(self, key: int, place: int, completion: Completion) -> list[Completion] | None:
        """Store a completion; one of a cancelled request is dropped.

        Args:
            key: key of the request.
            place: index of its seed.

        Returns:
            All completions of the request once they are finished, in the order of its seeds.
        """
        group = self._made.get(key)
        if group is None:
            return None
        group[place] = completion
        whole = [one for one in group if one is not None]
        if len(whole) < len(group):
            return None
        del self._made[key]
        return whole

    def cancel(self, key: int) -> list[int]:
        """Drop a request.

        Returns:
            Indices of its unfinished completions; none if it is not open.
        """
        return [place for place, one in enumerate(self._made.pop(key, [])) if one is None]
