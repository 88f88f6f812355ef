"""Dispatch of prompts to engines: the longest first, to the least loaded engine; each is answered exactly once."""

from collections.abc import Callable, Collection, Mapping, Sequence

from rlhf_core.training.rollouts.base import PromptSource, PromptTask
from rlhf_core.training.types import Completion


class Dispatcher:
    """The open tasks of one rollout of a rank. Pure bookkeeping, without any communication."""

    def __init__(self, source: PromptSource, rank: int = 0) -> None:
        """Args:
        source: prompts to sample; an engine is asked for at most ``source.sampling.batch_size`` completions at once.
        rank: rank whose prompts they are. Among equal engines, it begins where those of the ranks before it end, as all
            ranks have the same number of prompts: otherwise few prompts per rank would leave many engines idle.
        """
        self.source = source
        self.num_moved = 0
        """Number of tasks sent again to another engine."""
        self.num_refused = 0
        """Number of completions that were not used."""
        self._max_new_tokens = source.sampling.max_new_tokens
        self._window = source.sampling.batch_size
        self._next = rank * source.num_prompts
        self._tasks: dict[int, PromptTask] = {}
        self._pending: list[int] = []
        self._outstanding: dict[int, set[int]] = {}

    @property
    def is_done(self) -> bool:
        """True once every prompt has its completions."""
        return not self.num_missing

    @property
    def num_missing(self) -> int:
        """Number of prompts without their completions."""
        return self.source.num_prompts - len(self.source.made)

    def refill(self, beat: Callable[[], None]) -> None:
        """Take the tasks that have become known.

        Raises:
            ToolFailed: raised by the source.
        """
        tasks = {task.index: task for task in self.source.take(beat)}
        if tasks:
            self._tasks |= tasks
            self._enqueue(tasks)

    def outstanding(self, engine: int) -> frozenset[int]:
        """Tasks sent to an engine and not yet answered."""
        return frozenset(self._outstanding.get(engine, ()))

    def assign(self, engines: Collection[int]) -> dict[int, list[PromptTask]]:
        """Assign the waiting tasks to ready engines, as far as their windows have room.

        An engine without work takes a task whatever its size.
        """
        dealt: dict[int, list[PromptTask]] = {}
        if not self._pending:  # as after most answers
            return dealt
        load = {engine: sum(map(self._cost, self.outstanding(engine))) for engine in engines}
        count = {engine: sum(map(self._size, self.outstanding(engine))) for engine in engines}
        while self._pending:
            index = self._pending[0]
            size = self._size(index)
            room = [engine for engine in engines if not count[engine] or count[engine] + size <= self._window]
            if not room:
                break
            engine = min(room, key=lambda one: (load[one], (one - self._next) % (max(load) + 1)))
            self._next = engine + 1  # turns that come one at a time go around all engines
            self._pending.pop(0)
            self._outstanding.setdefault(engine, set()).add(index)
            load[engine] += self._cost(index)
            count[engine] += size
            dealt.setdefault(engine, []).append(self._tasks[index])
        return dealt

    def answer(self, engine: int, index: int, completions: Sequence[Completion]) -> bool:
        """Record the answer of an engine to one task.

        Returns:
            False if it is refused: the task was not assigned to this engine, or is already answered.

        Raises:
            ToolFailed: raised by the source.
        """
        if index not in self._outstanding.get(engine, ()):
            self.num_refused += len(completions)
            return False
        self._outstanding[engine].discard(index)
        del self._tasks[index]
        self.source.answer(index, completions)
        return True

    def requeue(self, engine: int, indices: Collection[int]) -> None:
        """Take tasks back from an engine that has not answered them."""
        own = self._outstanding.get(engine, set())
        back = own & set(indices)
        own -= back
        self.num_moved += len(back)
        self._enqueue(back)

    def recall(self) -> None:
        """Take back all assigned tasks, which then wait for engines with the same weights."""
        back = set[int]().union(*self._outstanding.values())
        self._outstanding.clear()
        self._enqueue(back)

    def end(self, beat: Callable[[], None]) -> None:
        """End the rollout. Open tasks are forgotten: in another rollout, their prompts are begun anew."""
        self._outstanding.clear()
        self._pending.clear()
        self._tasks.clear()
        self.source.end(beat)

    def counts(self) -> Mapping[str, int]:
        """Metrics of the rollout."""
        return {"rollout/moved_prompts": self.num_moved, "rollout/refused_completions": self.num_refused}

    def _enqueue(self, indices: Collection[int]) -> None:
        self._pending = sorted([*self._pending, *indices], key=lambda index: (-self._cost(index), index))

    def _cost(self, index: int) -> int:
        """Maximum number of tokens of the prompt of a task and its completions."""
        task = self._tasks[index]
        return len(task.prompt) + len(task.seeds) * self._max_new_tokens

    def _size(self, index: int) -> int:
        return len(self._tasks[index].seeds)
