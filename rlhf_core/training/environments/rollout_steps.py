"""The course of a rollout of several turns: requests to its tools or environment, and their answers as its tokens.

Rollouts that are in progress at the same time in several threads, ahead of training, need steps of their own each.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import ToolFailed
from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.environments.functions import message_of
from rlhf_core.training.environments.observations import ObservationTokens
from rlhf_core.training.environments.open_rollout import OpenRollout, Steps
from rlhf_core.training.environments.pool import EnvironmentPool, Reply
from rlhf_core.training.environments.server import TurnRequest
from rlhf_core.training.rewards.functions import shown
from rlhf_core.training.rollouts.seeds import derived_seed
from rlhf_core.training.types import Row


class RolloutSteps:
    """Steps of rollouts with the tools and environments of one pool, for one thread at a time."""

    def __init__(
        self,
        spec: TurnsSpec,
        pool: EnvironmentPool,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        end_ids: Sequence[int],
    ) -> None:
        """Args:
        pool: tools and environments, described.
        tokenizer: is copied, as two threads cannot use the same one, and once more for :meth:`another`.
        arguments: arguments of the chat template (``data/chat.py``).
        end_ids: tokens that end a turn besides the end token.
        """
        self.pool = pool
        self._spec, self._arguments, self._end_ids = spec, arguments, end_ids
        self._tokenizer, self._unused_tokenizer = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
        self._observations = ObservationTokens(self._tokenizer, arguments, end_ids, spec.max_observation_tokens)
        self._numbers = itertools.count()

    def another(self) -> "RolloutSteps":
        """Steps of the same rollouts for another thread, with a pool that is closed with this one's."""
        return RolloutSteps(self._spec, self.pool.another(), self._unused_tokenizer, self._arguments, self._end_ids)

    def begun(
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
        if self.pool.has_reward and not one.is_lost:
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


class FreeSteps:
    """Steps that no rollout uses; further ones are made when all are in use. For any thread."""

    def __init__(self, first: RolloutSteps) -> None:
        self._first = first
        self._free = [first]
        self._lock = Lock()

    def take(self) -> RolloutSteps:
        """Take steps, until :meth:`put`."""
        with self._lock:
            return self._free.pop() if self._free else self._first.another()

    def put(self, steps: RolloutSteps) -> None:
        """Return steps whose rollouts are over."""
        with self._lock:
            self._free.append(steps)


def _request(one: OpenRollout, kind: Literal["reset", "answer", "reward"], arguments: dict[str, Any]) -> TurnRequest:
    seed = derived_seed(one.seed, f"{kind} {len(one.turns)}")
    return TurnRequest(kind, seed, {**arguments, "seed": seed} if kind == "reset" else arguments)


def _failed(what: str, one: OpenRollout, failure: str) -> ToolFailed:
    turn = f" after {shown(one.turns[-1].text)}" if one.turns else ""
    return ToolFailed(f"rollout.turns: {what} {failure}, in a rollout of prompt {one.row.uid}{turn}")
