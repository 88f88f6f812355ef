"""Prompts that are all known before any of them is sampled."""

from collections.abc import Callable, Sequence

from rlhf_core.training.rollouts.base import PromptTask, Sampling, require_prompts
from rlhf_core.training.types import Completion


class PromptList:
    """Prompts that are all known, each of them one task; see :class:`rlhf_core.training.rollouts.base.PromptSource`."""

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
