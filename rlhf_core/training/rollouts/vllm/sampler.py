"""vLLM in an engine's process, where requests join and leave the batch at every decoding step."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch import Tensor

from rlhf_core.training.rollouts.samplers import OpenPrompts, Sampler, SamplerRequest
from rlhf_core.training.rollouts.vllm.engine import VllmEngine
from rlhf_core.training.types import Completion


class VllmSampler(Sampler):
    """One vLLM engine, with GPUs of its own or on CPU; see ``samplers.Sampler``."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._open = OpenPrompts()

    @property
    def num_waiting(self) -> int:
        """Number of unfinished completions."""
        return self._open.num_waiting

    @property
    def exit_code(self) -> int | None:
        """Exit code of a worker process of a split engine that has ended."""
        return self._engine.exit_code

    @property
    def pids(self) -> Sequence[int]:
        """Worker processes of a split engine."""
        return self._engine.pids

    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Load a version; see ``samplers.Sampler``."""
        self._engine.load_tensors(_beating(tensors, beat))

    def count_differing(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Compare the given adapter with the one in the model; see ``samplers.Sampler``."""
        return self._engine.count_differing(tensors)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first."""
        return self._engine.score(tokens)

    def submit(self, request: SamplerRequest) -> None:
        """Accept a request."""
        self._open.add(request)
        for place, seed in enumerate(request.seeds):
            self._engine.submit(f"{request.key}.{place}", request.prompt, seed, request.sampling)

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Run one decoding step."""
        done = []
        for name, completion in self._engine.step():
            key, place = map(int, name.split("."))
            if (whole := self._open.put(key, place, completion)) is not None:
                done.append((key, whole))
        beat()
        return done

    def cancel(self, keys: Collection[int]) -> None:
        """Drop unfinished requests."""
        for key in keys:
            self._engine.cancel([f"{key}.{place}" for place in self._open.cancel(key)])

    def pause(self) -> None:
        """Take unfinished completions out of vLLM; they keep their tokens."""
        self._engine.pause()

    def resume(self) -> None:
        """Continue paused completions after their tokens."""
        self._engine.resume()


def _beating(tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        beat()
        yield name, tensor
