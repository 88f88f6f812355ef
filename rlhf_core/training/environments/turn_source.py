"""Rollouts of several turns as prompts of an engine that takes some while it samples others.

A rollout takes its next turn as soon as its own tools have answered, whatever the others wait for. Only the first turns
of a prompt are sampled together, as the completions of a single turn are: the engine processes the prompt once for
them. What is sampled follows from tokens and seeds alone, so it is the same as in rounds.
"""

import time
from collections.abc import Callable, Sequence

from rlhf_core.training.environments.open_rollout import OpenRollout, by_context
from rlhf_core.training.environments.pool import Reply
from rlhf_core.training.environments.rollout_steps import FreeSteps, RolloutSteps
from rlhf_core.training.rollouts.base import PromptTask, Sampling
from rlhf_core.training.types import Completion


class TurnSource:
    """Turns of some rollouts; see :class:`rlhf_core.training.rollouts.base.PromptSource`."""

    def __init__(
        self,
        num_prompts: int,
        begin: Callable[[RolloutSteps, int], list[OpenRollout]],
        free: FreeSteps,
        sampling: Sampling,
        finish: Callable[[Sequence[OpenRollout], float], None],
    ) -> None:
        """Args:
        begin: begins the rollouts of the prompt with this index; called again for those that are begun anew.
        free: steps of the rollouts; some are taken from the first task on until the end.
        sampling: settings of a turn.
        finish: called for the results with all rollouts that were begun, and the seconds in which all that were not
            over waited for tools or environments.
        """
        self.num_prompts = num_prompts
        self.sampling = sampling
        self.made: dict[int, list[Completion]] = {}
        self._begin, self._free, self._finish = begin, free, finish
        self._steps: RolloutSteps | None = None
        self._rollouts: list[OpenRollout] = []
        self._of_prompt: dict[int, list[OpenRollout]] = {}
        self._asked: dict[int, OpenRollout] = {}
        self._sampled: dict[int, list[OpenRollout]] = {}
        self._ready: list[PromptTask] = []
        self._num_tasks = 0
        self._tools_s = 0.0
        self._measured_s = 0.0
        self._is_idle = False

    @property
    def is_waiting(self) -> bool:
        """True while tools or environments are at work."""
        return bool(self._asked)

    @property
    def descriptor(self) -> int | None:
        """Descriptor that is readable once some of them have answered."""
        return None if self._steps is None else self._steps.pool.descriptor

    def take(self, beat: Callable[[], None]) -> Sequence[PromptTask]:
        """Return the turns that can be sampled since the last call."""
        if self._steps is None:
            self._steps = self._free.take()
            for index in range(self.num_prompts):
                if index not in self.made:
                    self._begin_prompt(self._steps, index)
        while replies := self._steps.pool.collect(0.0, beat):
            for number, reply in replies.items():
                self._go_on(self._asked.pop(number), reply)
        self._measure()
        ready, self._ready = self._ready, []
        return ready

    def answer(self, index: int, completions: Sequence[Completion]) -> None:
        """Continue the rollouts whose turns these are."""
        for one, turn in zip(self._sampled.pop(index), completions, strict=True):
            self._go_on(one, turn)
        self._measure()

    def end(self, beat: Callable[[], None]) -> None:
        """Free the processes of all rollouts, and end those that are still at work."""
        if self._steps is not None:
            self._steps.pool.release(beat)
            self._free.put(self._steps)
            self._steps = None
        for waiting in (self._of_prompt, self._asked, self._sampled, self._ready):
            waiting.clear()
        self._measure()

    def results(self) -> list[list[Completion]]:
        """Completions of all prompts, in order."""
        self._finish(self._rollouts, self._tools_s)
        return [self.made[index] for index in range(self.num_prompts)]

    def _begin_prompt(self, steps: RolloutSteps, index: int) -> None:
        self._of_prompt[index] = begun = self._begin(steps, index)
        self._rollouts += begun
        for one in begun:
            self._ask(one)
        self._begin_turns(index)

    def _go_on(self, one: OpenRollout, received: Reply | Completion) -> None:
        one.go_on(received)
        if one.request is not None:
            self._ask(one)
        elif one.completion is not None:
            self._end_prompt(one.index)
        elif one.turns:
            self._sample([one])
        else:
            self._begin_turns(one.index)

    def _ask(self, one: OpenRollout) -> None:
        if one.request is not None and self._steps is not None:
            self._asked[one.number] = one
            self._steps.pool.submit(one.number, one.request)

    def _begin_turns(self, index: int) -> None:
        """Have the first turns of a prompt sampled once all its environments are ready."""
        rollouts = self._of_prompt[index]
        if all(one.wants_turn for one in rollouts):
            for group in by_context(rollouts):
                self._sample(group)

    def _sample(self, group: list[OpenRollout]) -> None:
        self._ready.append(PromptTask(self._num_tasks, group[0].context, [one.turn_seed for one in group]))
        self._sampled[self._num_tasks] = group
        self._num_tasks += 1

    def _end_prompt(self, index: int) -> None:
        made = [one.completion for one in self._of_prompt[index] if one.completion is not None]
        if len(made) == len(self._of_prompt[index]):
            self.made[index] = made

    def _measure(self) -> None:
        """Count the time since the last call if nothing was to be sampled in it."""
        now_s = time.monotonic()
        if self._is_idle:
            self._tools_s += now_s - self._measured_s
        self._measured_s, self._is_idle = now_s, bool(self._asked) and not self._sampled
