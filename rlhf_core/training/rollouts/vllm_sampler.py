"""vLLM in the process of an engine: requests join and leave its batch at every decoding step."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.schemas.rollouts import VllmSettings
from rlhf_core.training.rollouts.samplers import SamplerRequest
from rlhf_core.training.rollouts.vllm_engine import VllmEngine
from rlhf_core.training.types import Completion


@dataclass
class _Open:
    """A prompt of which some completions are not made."""

    num: int
    made: dict[int, Completion] = field(default_factory=dict)


class VllmSampler:
    """One vLLM engine, with one GPU of its own or on CPU; see ``samplers.Sampler``."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        settings: VllmSettings,
        *,
        dtype: str,
        max_tokens: int,
        on_gpu: bool,
    ) -> None:
        """Start vLLM with random weights. The process group of this process alone is there already.

        Args: as of :class:`VllmEngine`.
        """
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        self._engine = VllmEngine(
            folder, tokenizer, settings, dtype=dtype, max_tokens=max_tokens, on_gpu=on_gpu, variables=variables
        )
        self._open: dict[int, _Open] = {}

    @property
    def num_waiting(self) -> int:
        """Completions that were asked for and are not made."""
        return sum(one.num - len(one.made) for one in list(self._open.values()))

    @property
    def is_alive(self) -> bool:
        """True: it samples in this process."""
        return True

    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Take all weights over; see ``samplers.Sampler``."""
        self._engine.load_tensors(_beating(tensors, beat))

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first."""
        return self._engine.score(tokens)

    def submit(self, request: SamplerRequest) -> None:
        """Take a request."""
        self._open[request.key] = _Open(len(request.seeds))
        for place, seed in enumerate(request.seeds):
            self._engine.submit(f"{request.key}.{place}", request.prompt, seed, request.sampling)

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Make one decoding step."""
        done = []
        for name, completion in self._engine.step():
            key, place = map(int, name.split("."))
            one = self._open.get(key)
            if one is None:
                continue  # cancelled meanwhile
            one.made[place] = completion
            if len(one.made) == one.num:
                del self._open[key]
                done.append((key, [one.made[index] for index in range(one.num)]))
        beat()
        return done

    def cancel(self, keys: Collection[int]) -> None:
        """Drop requests that are not done."""
        for key in keys:
            one = self._open.pop(key, None)
            if one is not None:
                self._engine.cancel([f"{key}.{place}" for place in range(one.num) if place not in one.made])


def _beating(tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        beat()
        yield name, tensor
