"""Rollouts of several turns: the model samples a turn, tools or the environment answer it, until nothing is called.

An engine that takes requests while it samples others asks for the turns (``turn_source.py``): each rollout goes on by
itself. With any other engine, every round samples one turn of all rollouts that are not over, on all ranks together:
sampling is collective, and ranks whose rollouts end earlier go on without prompts. Seeds of later turns and of
environments are derived from the seed of the completion, so a rollout depends neither on its batch nor on ranks,
restarts or the order in which tools answer.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.environments.open_rollout import OpenRollout, by_context
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.environments.rollout_steps import FreeSteps, RolloutSteps
from rlhf_core.training.environments.turn_source import TurnSource
from rlhf_core.training.rollouts.base import RolloutEngine, Sampling, require_prompts
from rlhf_core.training.types import Completion, Row


class Conversations:
    """Sampling of rollouts with the tools or the environment of a run."""

    def __init__(self, spec: TurnsSpec, ranks: Ranks, steps: RolloutSteps) -> None:
        self._spec, self._ranks = spec, ranks
        self._free = FreeSteps(steps)
        self._seconds = 0.0
        self._warnings: list[str] = []
        self._noted: set[str] = set()

    def sample(
        self,
        engine: RolloutEngine,
        rows: Sequence[Row],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample ``len(seeds[i])`` rollouts of ``rows[i]``. Collective over the ranks, even without prompts.

        Args: as for ``RolloutEngine.sample``.
            rows: row of each prompt.
            sampling: settings of a turn; ``max_new_tokens`` bounds the whole rollout.

        Raises:
            ToolFailed: ``reset`` or ``get_reward`` raised, or a call was lost and ``on_failure`` is ``stop``.
            EnginesLost, StaleWeights, ValueError: as by the engine.
        """
        if engine.continuous is not None:
            source = self.source(rows, prompts, seeds, sampling)
            engine.continuous.sample(source, version, beat)
            return source.results()
        steps = self._free.take()
        rollouts = [
            one
            for index, own in enumerate(seeds)
            for one in steps.begun(index, rows[index], prompts[index], own, sampling.max_new_tokens)
        ]
        seconds = self._in_rounds(engine, steps.pool, rollouts, self._of_a_turn(sampling), version, beat)
        steps.pool.release(beat)
        self._free.put(steps)
        self._finish(rollouts, seconds)
        found = iter([one.completion for one in rollouts if one.completion is not None])
        return [[next(found) for _ in own] for own in seeds]

    def source(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
    ) -> TurnSource:
        """The same rollouts for an engine that takes turns of some while others wait for tools.

        Args: as for :meth:`sample`.

        Raises:
            ValueError: a prompt is empty, or the number of lists of seeds is not the number of prompts.
        """
        require_prompts(prompts, seeds)

        def begin(steps: RolloutSteps, index: int) -> list[OpenRollout]:
            return steps.begun(index, rows[index], prompts[index], seeds[index], sampling.max_new_tokens)

        return TurnSource(len(prompts), begin, self._free, self._of_a_turn(sampling), self._finish)

    def take_seconds(self) -> float:
        """Seconds since the last call in which this rank waited for tools and environments with nothing to sample."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_warnings(self) -> list[str]:
        """Calls that were lost since the last call, as sentences: the first of each kind."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _of_a_turn(self, sampling: Sampling) -> Sampling:
        return dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self._spec.max_turn_tokens))

    def _finish(self, rollouts: Sequence[OpenRollout], seconds: float) -> None:
        """Note how long tools were waited for, and which of their processes were lost."""
        self._seconds += seconds
        for one in rollouts:
            if one.loss is not None and one.loss[0] not in self._noted:
                self._warnings.append(f"{one.loss[1]}. Such rollouts end, or observe an error; this is reported once")
                self._noted.add(one.loss[0])

    # -----------------------------------------------------------------------------------------------------------------
    # Rounds

    def _in_rounds(
        self,
        engine: RolloutEngine,
        pool: EnvironmentPool,
        rollouts: Sequence[OpenRollout],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> float:
        """Sample one turn of all rollouts that are not over, have them answered, and so on. Collective.

        Returns:
            Seconds that this rank waited for tools and environments.
        """
        seconds = _ask(pool, rollouts, beat)
        going = rollouts
        while any(self._ranks.sum([len(going)])):
            groups = by_context(going)
            contexts = [group[0].context for group in groups]
            seeds = [[one.turn_seed for one in group] for group in groups]
            made = engine.sample(contexts, seeds, sampling, version, beat)
            for one, turn in zip(going, itertools.chain.from_iterable(made), strict=True):
                one.go_on(turn)
            seconds += _ask(pool, [one for one in going if one.end is None], beat)
            going = [one for one in going if one.end is None]
        return seconds + _ask(pool, rollouts, beat)


def _ask(pool: EnvironmentPool, rollouts: Sequence[OpenRollout], beat: Callable[[], None]) -> float:
    """Have the requests of all rollouts answered, and return the seconds that it took."""
    started = time.monotonic()
    requests = {one.number: one.request for one in rollouts if one.request is not None}
    replies = pool.ask(requests, beat)
    seconds = time.monotonic() - started
    for one in rollouts:
        if one.number in replies:
            one.go_on(replies[one.number])
    return seconds
