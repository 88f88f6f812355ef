"""Dispatch of prompts to engines: the longest first, to the least loaded engine; each is answered exactly once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.training.types import Completion


@dataclass(frozen=True)
class PromptTask:
    """One prompt with the seeds of its completions."""

    index: int
    """Index among the prompts."""
    prompt: Sequence[int]
    seeds: Sequence[int]


class Dispatcher:
    """The prompts of one rollout of a rank. Pure bookkeeping, without any communication."""

    def __init__(self, tasks: Sequence[PromptTask], max_new_tokens: int, window: int, rank: int = 0) -> None:
        """Args:
        window: maximum number of completions requested from an engine at once.
        rank: rank whose prompts they are. Among equal engines, it begins where those of the ranks before it end, as all
            ranks have the same number of prompts: otherwise few prompts per rank would leave many engines idle.
        """
        self.made: dict[int, list[Completion]] = {}
        """Completions by prompt."""
        self.num_moved = 0
        """Number of prompts sent again to another engine."""
        self.num_refused = 0
        """Number of completions that were not used."""
        self._max_new_tokens = max_new_tokens
        self._window = window
        self._first = rank * len(tasks)
        self._tasks = {task.index: task for task in tasks}
        self._pending: list[int] = []
        self._enqueue(self._tasks)
        self._outstanding: dict[int, set[int]] = {}

    @property
    def is_done(self) -> bool:
        """True once every prompt is answered."""
        return len(self.made) == len(self._tasks)

    def outstanding(self, engine: int) -> frozenset[int]:
        """Prompts sent to an engine and not yet answered."""
        return frozenset(self._outstanding.get(engine, ()))

    def assign(self, engines: Collection[int]) -> dict[int, list[PromptTask]]:
        """Assign the waiting prompts to ready engines, as far as their windows have room.

        An engine without work takes a prompt whatever its size.
        """
        dealt: dict[int, list[PromptTask]] = {}
        load = {engine: sum(map(self._cost, self.outstanding(engine))) for engine in engines}
        count = {engine: sum(map(self._size, self.outstanding(engine))) for engine in engines}
        while self._pending:
            index = self._pending[0]
            size = self._size(index)
            room = [engine for engine in engines if not count[engine] or count[engine] + size <= self._window]
            if not room:
                break
            engine = min(room, key=lambda one: (load[one], (one - self._first) % (max(load) + 1)))
            self._pending.pop(0)
            self._outstanding.setdefault(engine, set()).add(index)
            load[engine] += self._cost(index)
            count[engine] += size
            dealt.setdefault(engine, []).append(self._tasks[index])
        return dealt

    def answer(self, engine: int, index: int, completions: Sequence[Completion]) -> bool:
        """Record the answer of an engine to one prompt.

        Returns:
            False if it is refused: the prompt was not assigned to this engine, or is already answered.
        """
        if index not in self._outstanding.get(engine, ()):
            self.num_refused += len(completions)
            return False
        self._outstanding[engine].discard(index)
        self.made[index] = list(completions)
        return True

    def requeue(self, engine: int, indices: Collection[int]) -> None:
        """Take prompts back from an engine that has not answered them."""
        own = self._outstanding.get(engine, set())
        back = own & set(indices)
        own -= back
        self.num_moved += len(back)
        self._enqueue(back)

    def recall(self) -> None:
        """Take back all assigned prompts, which then wait for another rollout."""
        back = set[int]().union(*self._outstanding.values())
        self._outstanding.clear()
        self._enqueue(back)

    @property
    def num_missing(self) -> int:
        """Number of unanswered prompts."""
        return len(self._tasks) - len(self.made)

    def results(self) -> list[list[Completion]]:
        """Completions of all prompts, in order."""
        return [self.made[index] for index in sorted(self._tasks)]

    def counts(self) -> Mapping[str, int]:
        """Metrics of the rollout."""
        return {"rollout/moved_prompts": self.num_moved, "rollout/refused_completions": self.num_refused}

    def _enqueue(self, indices: Collection[int]) -> None:
        self._pending = sorted([*self._pending, *indices], key=lambda index: (-self._cost(index), index))

    def _cost(self, index: int) -> int:
        """Maximum number of tokens of a prompt and its completions."""
        task = self._tasks[index]
        return len(task.prompt) + len(task.seeds) * self._max_new_tokens

    def _size(self, index: int) -> int:
        return len(self._tasks[index].seeds)
