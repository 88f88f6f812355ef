"""Rollouts of several turns: the model samples a turn, tools or the environment answer it, until nothing is called.

Every round samples one turn of all rollouts that are not over, on all ranks together: sampling is collective, and ranks
whose rollouts end earlier go on without prompts. Seeds of later turns and of environments are derived from the seed of
the completion, so a rollout depends neither on its batch nor on ranks or restarts.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import ToolFailed
from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.environments.functions import message_of
from rlhf_core.training.environments.observations import ObservationTokens
from rlhf_core.training.environments.pool import EnvironmentPool, Reply
from rlhf_core.training.environments.server import TurnRequest
from rlhf_core.training.rewards.functions import shown
from rlhf_core.training.rollouts.base import RolloutEngine, Sampling
from rlhf_core.training.types import Completion, Episode, ModelTurn, Row


def derived_seed(seed: int, name: str) -> int:
    """Seed of a part of a rollout, 63 bits.

    Args:
        seed: seed of the completion (``rollouts/seeds.py``).
        name: the part, for instance ``turn 2``.
    """
    return int.from_bytes(blake2b(f"{seed}|{name}".encode(), digest_size=8).digest(), "big") >> 1


@dataclass
class _Rollout:
    """A rollout in progress."""

    number: int
    """Number among those of this rank."""
    row: Row
    seed: int
    index: int
    """Index of the prompt."""
    prompt: list[int]
    budget: int
    """Number of tokens that may follow the prompt."""
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[ModelTurn] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    last: Completion | None = None
    """The last turn as the engine returned it."""
    end: Literal["answer", "turns", "tokens", "failure"] | None = None
    """Reason for its end; None while it goes on."""
    num_calls: int = 0
    num_failed: int = 0
    is_unanswered: bool = False
    """True for a last turn that is not part of ``messages`` yet."""
    is_lost: bool = False
    """True if the process of its environment is gone."""

    @property
    def context(self) -> list[int]:
        """Tokens that the next turn follows."""
        return self.prompt + self.tokens

    @property
    def turn_seed(self) -> int:
        """Seed of the next turn; of the first one that of the completion."""
        return derived_seed(self.seed, f"turn {len(self.turns)}") if self.turns else self.seed

    def add_turn(self, made: Completion) -> None:
        """Append a sampled turn."""
        self.last = made
        self.tokens += made.token_ids
        self.sampled += [True] * len(made.token_ids)
        self.logprobs += made.logprobs
        self.turns.append(ModelTurn(made.text))
        self.is_unanswered = True
        if not made.finished:
            self.end = "tokens"

    def add_observation(self, tokens: Sequence[int], text: str) -> None:
        """Append an observation, which another turn follows."""
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.turns[-1] = ModelTurn(self.turns[-1].text, text)

    def completion(self, tokenizer: PreTrainedTokenizerBase, reward: float | None) -> Completion:
        """The whole rollout as one completion."""
        assert self.last is not None
        assert self.end is not None
        before = len(self.tokens) - len(self.last.token_ids)
        text = tokenizer.decode(self.tokens[:before], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # A turn that was cut off, or whose environment was lost, has no answer that it was found in.
        last = [{"role": "assistant", "content": self.last.text}] if self.is_unanswered else []
        episode = Episode(
            tuple(self.turns),
            tuple(self.sampled),
            tuple(self.prompt),
            (*self.messages, *last),
            self.end,
            self.num_calls,
            self.num_failed,
            reward,
        )
        return Completion(
            self.tokens,
            f"{text}{self.last.text}",
            self.end == "answer",
            self.logprobs,
            self.last.weight_version,
            episode,
        )


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
        self._spec, self._ranks, self._pool, self._tokenizer = spec, ranks, pool, tokenizer
        self._observations = ObservationTokens(tokenizer, arguments, end_ids, spec.max_observation_tokens)
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
            StaleWeights, ValueError: as by the engine.
        """
        budget = sampling.max_new_tokens
        numbers = itertools.count()
        rollouts = [
            _Rollout(next(numbers), row, seed, index, list(prompt), budget)
            for index, (row, prompt, own) in enumerate(zip(rows, prompts, seeds, strict=True))
            for seed in own
        ]
        turn = _of_a_turn(sampling, self._spec.max_turn_tokens)
        self._reset(rollouts, beat)
        going = rollouts
        while any(self._ranks.sum([len(going)])):
            self._take_turn(engine, going, turn, version, beat)
            self._answer([one for one in going if one.end is None], beat)
            going = [one for one in going if one.end is None]
        rewards = self._rewards(rollouts, beat)
        self._pool.release(beat)
        found = iter([one.completion(self._tokenizer, rewards.get(one.number)) for one in rollouts])
        return [[next(found) for _ in own] for own in seeds]

    def take_seconds(self) -> float:
        """Seconds that this rank waited for tools and environments since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_warnings(self) -> list[str]:
        """Calls that were lost since the last call, as sentences: the first of each kind."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _take_turn(
        self,
        engine: RolloutEngine,
        going: Sequence[_Rollout],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> None:
        """Sample the next turn of each; those of a prompt with the same context are sampled together."""
        groups = [list(group) for _, group in itertools.groupby(going, key=lambda one: (one.index, one.context))]
        contexts, seeds = [group[0].context for group in groups], [[one.turn_seed for one in group] for group in groups]
        made = engine.sample(contexts, seeds, sampling, version, beat)
        for group, completions in zip(groups, made, strict=True):
            for one, completion in zip(group, completions, strict=True):
                one.add_turn(completion)

    def _reset(self, rollouts: Sequence[_Rollout], beat: Callable[[], None]) -> None:
        if not self._spec.environment:
            return
        for one, reply in self._asked(rollouts, "reset", beat, lambda one: {"columns": dict(one.row.columns)}):
            if reply.get("lost"):
                self._lose("reset", one, reply["failure"])
                one.is_lost = True
            elif failure := reply.get("failure"):
                raise _failed("reset of the environment", one, failure)
            elif reply["text"]:
                self._complete_prompt(one, reply["text"])

    def _complete_prompt(self, one: _Rollout, added: str) -> None:
        """Put the text of ``reset`` at the end of the prompt; its tokens count as if the model had written them."""
        prompt = self._observations.prompt(one.row, added)
        one.budget -= len(prompt) - len(one.prompt)  # the model has no positions for more
        one.prompt = prompt
        if one.budget < self._spec.max_turn_tokens:
            problem = f"returned {len(added)} characters for the prompt, which leave no room for a turn"
            raise _failed("reset of the environment", one, problem)

    def _answer(self, going: Sequence[_Rollout], beat: Callable[[], None]) -> None:
        """Have tools or environments answer the last turns, and append what they return."""
        for one in going:
            if one.is_lost:
                one.end = "failure"
        asked = [one for one in going if not one.is_lost]
        for one, reply in self._asked(asked, "answer", beat, self._last_turn):
            answer = self._failure(one, reply["failure"]) if "failure" in reply else reply
            if answer is not None:
                self._add(one, answer)

    def _last_turn(self, one: _Rollout) -> dict[str, Any]:
        return {"text": one.turns[-1].text, "is_last": self._last_reason(one) is not None}

    def _failure(self, one: _Rollout, failure: str) -> Reply | None:
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

    def _add(self, one: _Rollout, answer: Reply) -> None:
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

    def _last_reason(self, one: _Rollout) -> Literal["turns", "tokens"] | None:
        """Reason why no turn can follow; None if one can."""
        if len(one.turns) >= self._spec.max_turns:
            return "turns"
        return "tokens" if len(one.tokens) + self._spec.max_turn_tokens > one.budget else None

    def _rewards(self, rollouts: Sequence[_Rollout], beat: Callable[[], None]) -> dict[int, float]:
        """Rewards by the environment, by number of the rollout."""
        found: dict[int, float] = {}
        living = [one for one in rollouts if self._pool.has_reward and not one.is_lost]
        for one, reply in self._asked(living, "reward", beat, lambda one: {}):
            if reply.get("lost"):
                self._lose("get_reward", one, reply["failure"])
            elif failure := reply.get("failure"):
                raise _failed("get_reward of the environment", one, failure)
            elif reply["reward"] is not None:
                found[one.number] = reply["reward"]
        return found

    def _asked(
        self,
        rollouts: Sequence[_Rollout],
        kind: Literal["reset", "answer", "reward"],
        beat: Callable[[], None],
        arguments: Callable[[_Rollout], dict[str, Any]],
    ) -> Iterator[tuple[_Rollout, Reply]]:
        """Ask the processes of rollouts, and yield the answers in the order of the rollouts."""
        started = time.monotonic()
        requests = {}
        for one in rollouts:
            seed, given = derived_seed(one.seed, f"{kind} {len(one.turns)}"), arguments(one)
            requests[one.number] = TurnRequest(kind, seed, {**given, "seed": seed} if kind == "reset" else given)
        replies = self._pool.ask(requests, beat)
        self._seconds += time.monotonic() - started
        for one in rollouts:
            yield one, replies[one.number]

    def _lose(self, what: str, one: _Rollout, failure: str) -> None:
        """Note a process that is gone, or end the run.

        Raises:
            ToolFailed: ``on_failure`` is ``stop``.
        """
        error = _failed(what, one, failure)
        if self._spec.on_failure == "stop":
            raise error
        if what not in self._noted:
            self._warnings.append(f"{error}. Such rollouts end, or observe an error; this is reported once")
            self._noted.add(what)


def _failed(what: str, one: _Rollout, failure: str) -> ToolFailed:
    turn = f" after {shown(one.turns[-1].text)}" if one.turns else ""
    return ToolFailed(f"rollout.turns: {what} {failure}, in a rollout of prompt {one.row.uid}{turn}")


def _of_a_turn(sampling: Sampling, max_turn_tokens: int) -> Sampling:
    return dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, max_turn_tokens))
