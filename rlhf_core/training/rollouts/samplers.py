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
    def exit_code(self) -> int | None:
        """Exit code of a process that it needs and that has ended, negative for a signal; None while all live."""

    @property
    def pids(self) -> Sequence[int]:
        """Other processes that compute for this one at every step."""

    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Take a version over. Called while there are no requests.

        Args:
            tensors: names and tensors of all weights, tied ones once; of an adapter those that it consists of.
            beat: called after every tensor.

        Raises:
            StaleWeights: these are not the weights of this model. It may hold a part of them then.
        """

    def count_differing(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Number of tensors of an adapter that the model does not hold bit for bit; 0 where whole weights are taken
        over, which may be in another layout."""

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

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str,
        device: torch.device,
        lora: LoraSpec | None = None,
    ) -> None:
        """Build the model with random weights, or read it where versions are those of an adapter.

        Args:
            folder: Hugging Face folder of the model; without ``lora`` only its configuration is read.
        """
        self._tokenizer = tokenizer
        self._model = random_causal_lm(folder, dtype) if lora is None else adapted_causal_lm(folder, dtype, lora)
        self._model.to(device)
        self._waiting: dict[int, SamplerRequest] = {}

    @property
    def num_waiting(self) -> int:
        """Completions that were asked for and are not made."""
        return sum(len(request.seeds) for request in list(self._waiting.values()))

    @property
    def exit_code(self) -> int | None:
        """None: it samples in this process."""
        return None

    @property
    def pids(self) -> Sequence[int]:
        """None."""
        return ()

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Copy weights into the model; see :class:`Sampler`."""
        places = taken_weights(self._model)
        missing = set(places)
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

    def count_differing(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Compare an adapter with that of the model; see :class:`Sampler`."""
        return count_differing(tensors, taken_weights(self._model)) if has_adapter(self._model) else 0

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


class OpenPrompts:
    """Prompts of which some completions are not made: the bookkeeping of samplers that make each by itself."""

    def __init__(self) -> None:
        """Begin with none."""
        self._made: dict[int, list[Completion | None]] = {}

    @property
    def num_waiting(self) -> int:
        """Completions that are not made. May be asked for in any thread."""
        return sum(completion is None for group in list(self._made.values()) for completion in group)

    def add(self, request: SamplerRequest) -> None:
        """Take a request."""
        self._made[request.key] = [None] * len(request.seeds)

    def put(self, key: int, place: int, completion: Completion) -> list[Completion] | None:
        """Take a completion; that of a request that was cancelled is dropped.

        Args:
            key: of the request.
            place: index of its seed.

        Returns:
            All completions of the request once they are made, in the order of its seeds.
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
            Places of its completions that are not made; none where it is not open.
        """
        return [place for place, one in enumerate(self._made.pop(key, [])) if one is None]
