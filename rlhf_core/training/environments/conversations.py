"""Rollouts of several turns: the model samples a turn, tools or the environment answer it, until nothing is called.

An engine that takes requests while it samples others asks for the turns (``turn_source.py``): each rollout goes on by
itself. With any other engine, every round samples one turn of all rollouts that are not over, on all ranks together:
sampling is collective, and ranks whose rollouts end earlier go on without prompts. Seeds of later turns and of
environments are derived from the seed of the completion, so a rollout depends neither on its batch nor on ranks,
restarts or the order in which tools answer.
"""

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import ToolFailed
from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.environments.functions import message_of
from rlhf_core.training.environments.observations import ObservationTokens
from rlhf_core.training.environments.open_rollout import OpenRollout, Steps, by_context, derived_seed
from rlhf_core.training.environments.pool import EnvironmentPool, Reply
from rlhf_core.training.environments.server import TurnRequest
from rlhf_core.training.environments.turn_source import TurnSource
from rlhf_core.training.rewards.functions import shown
from rlhf_core.training.rollouts.base import RolloutEngine, Sampling, require_prompts
from rlhf_core.training.types import Completion, Row


class Conversations:
    """Sampling of rollouts with the tools or the environment of a run."""

    def __init__(
        self,
        spec: TurnsSpec,
        ranks: Ranks,
        pool: EnvironmentPool,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        end_ids: Sequence[int],
    ) -> None:
        """Args:
        pool: tools and environments, described.
        arguments: arguments of the chat template (``data/chat.py``).
        end_ids: tokens that end a turn besides the end token.
        """
        # A copy, as rollouts ahead of training have a thread of their own, and two cannot use the same tokenizer.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._spec, self._ranks, self._pool = spec, ranks, pool
        self._observations = ObservationTokens(self._tokenizer, arguments, end_ids, spec.max_observation_tokens)
        self._numbers = itertools.count()
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
        rollouts = [
            one
            for index, own in enumerate(seeds)
            for one in self._begun(index, rows[index], prompts[index], own, sampling.max_new_tokens)
        ]
        seconds = self._in_rounds(engine, rollouts, self._of_a_turn(sampling), version, beat)
        self._pool.release(beat)
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

        def begin(index: int) -> list[OpenRollout]:
            return self._begun(index, rows[index], prompts[index], seeds[index], sampling.max_new_tokens)

        return TurnSource(len(prompts), begin, self._pool, self._of_a_turn(sampling), self._finish)

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
        rollouts: Sequence[OpenRollout],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> float:
        """Sample one turn of all rollouts that are not over, have them answered, and so on. Collective.

        Returns:
            Seconds that this rank waited for tools and environments.
        """
        seconds = self._ask(rollouts, beat)
        going = rollouts
        while any(self._ranks.sum([len(going)])):
            groups = by_context(going)
            contexts = [group[0].context for group in groups]
            seeds = [[one.turn_seed for one in group] for group in groups]
            made = engine.sample(contexts, seeds, sampling, version, beat)
            for one, turn in zip(going, itertools.chain.from_iterable(made), strict=True):
                one.go_on(turn)
            seconds += self._ask([one for one in going if one.end is None], beat)
            going = [one for one in going if one.end is None]
        return seconds + self._ask(rollouts, beat)

    def _ask(self, rollouts: Sequence[OpenRollout], beat: Callable[[], None]) -> float:
        """Have the requests of all rollouts answered, and return the seconds that it took."""
        started = time.monotonic()
        requests = {one.number: one.request for one in rollouts if one.request is not None}
        replies = self._pool.ask(requests, beat)
        seconds = time.monotonic() - started
        for one in rollouts:
            if one.number in replies:
                one.go_on(replies[one.number])
        return seconds

    # -----------------------------------------------------------------------------------------------------------------
    # One rollout

    def _begun(
        self, index: int, row: Row, prompt: Sequence[int], seeds: Sequence[int], budget: int
    ) -> list[OpenRollout]:
        """Begin the rollouts of a prompt."""
        begun = [OpenRollout(next(self._numbers), row, seed, index, list(prompt), budget) for seed in seeds]
        for one in begun:
            one.begin(self._steps(one))
        return begun

    def _steps(self, one: OpenRollout) -> Steps:
        """The course of a rollout, from ``reset`` to ``get_reward``."""
        if self._spec.environment:
            self._begin(one, (yield _request(one, "reset", {"columns": dict(one.row.columns)})))
        while one.end is None:
            one.add_turn((yield None))
            if one.end is None and one.is_lost:
                one.end = "failure"
            if one.end is None:
                turn = {"text": one.turns[-1].text, "is_last": self._last_reason(one) is not None}
                self._answer(one, (yield _request(one, "answer", turn)))
        reward = None
        if self._pool.has_reward and not one.is_lost:
            reward = self._reward(one, (yield _request(one, "reward", {})))
        return one.whole(self._tokenizer, reward)

    def _begin(self, one: OpenRollout, reply: Reply) -> None:
        if reply.get("lost"):
            self._lose("reset", one, reply["failure"])
            one.is_lost = True
        elif failure := reply.get("failure"):
            raise _failed("reset of the environment", one, failure)
        elif reply["text"]:
            self._complete_prompt(one, reply["text"])

    def _complete_prompt(self, one: OpenRollout, added: str) -> None:
        """Put the text of ``reset`` at the end of the prompt; its tokens count as if the model had written them."""
        prompt = self._observations.prompt(one.row, added)
        one.budget -= len(prompt) - len(one.prompt)  # the model has no positions for more
        one.prompt = prompt
        if one.budget < self._spec.max_turn_tokens:
            problem = f"returned {len(added)} characters for the prompt, which leave no room for a turn"
            raise _failed("reset of the environment", one, problem)

    def _answer(self, one: OpenRollout, reply: Reply) -> None:
        """Append what tools or the environment returned for the last turn."""
        answer = self._failure(one, reply["failure"]) if "failure" in reply else reply
        if answer is not None:
            self._add(one, answer)

    def _failure(self, one: OpenRollout, failure: str) -> Reply | None:
        """Answer to a turn whose calls were lost, or raised in the parser; None if the rollout ends."""
        self._lose("call", one, failure)
        if self._spec.environment:
            one.num_calls, one.num_failed = one.num_calls + 1, one.num_failed + 1
            one.end, one.is_lost = "failure", True
            return None
        content = str({"error": f"the call {failure}"})
        return {
            "calls": [],
            "content": one.turns[-1].text,
            "observations": [{"role": "tool", "name": "tool", "content": content}],
            "is_open": True,
            "num_failed": 1,
        }

    def _add(self, one: OpenRollout, answer: Reply) -> None:
        one.messages.append(message_of(answer))
        one.is_unanswered = False
        one.num_calls += len(answer["calls"]) or len(answer["observations"])
        one.num_failed += answer["num_failed"]
        if not answer["is_open"]:
            one.end = "answer"
            return
        one.end = self._last_reason(one)
        if one.end is not None:
            return
        observations = [
            {**message, "content": self._observations.cut(message["content"])} for message in answer["observations"]
        ]
        tokens = self._observations.after(one.row, one.tokens, observations)
        if len(one.tokens) + len(tokens) + self._spec.max_turn_tokens > one.budget:
            one.end = "tokens"
            return
        one.messages += observations
        one.add_observation(tokens, "".join(message["content"] for message in observations))

    def _last_reason(self, one: OpenRollout) -> Literal["turns", "tokens"] | None:
        """Reason why no turn can follow; None if one can."""
        if len(one.turns) >= self._spec.max_turns:
            return "turns"
        return "tokens" if len(one.tokens) + self._spec.max_turn_tokens > one.budget else None

    def _reward(self, one: OpenRollout, reply: Reply) -> float | None:
        if reply.get("lost"):
            self._lose("get_reward", one, reply["failure"])
            return None
        if failure := reply.get("failure"):
            raise _failed("get_reward of the environment", one, failure)
        value: float | None = reply["reward"]
        return value

    def _lose(self, what: str, one: OpenRollout, failure: str) -> None:
        """Note a process that is gone, or end the run.

        Raises:
            ToolFailed: ``on_failure`` is ``stop``.
        """
        error = _failed(what, one, failure)
        if self._spec.on_failure == "stop":
            raise error
        one.loss = one.loss or (what, str(error))


def _request(one: OpenRollout, kind: Literal["reset", "answer", "reward"], arguments: dict[str, Any]) -> TurnRequest:
    seed = derived_seed(one.seed, f"{kind} {len(one.turns)}")
    return TurnRequest(kind, seed, {**arguments, "seed": seed} if kind == "reset" else arguments)


def _failed(what: str, one: OpenRollout, failure: str) -> ToolFailed:
    turn = f" after {shown(one.turns[-1].text)}" if one.turns else ""
    return ToolFailed(f"rollout.turns: {what} {failure}, in a rollout of prompt {one.row.uid}{turn}")
