"""A rollout of several turns in progress: its tokens so far, and what it waits for."""

import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_core.training.data.tokenizers import text_of
from rlhf_core.training.environments.pool import Reply
from rlhf_core.training.environments.server import TurnRequest
from rlhf_core.training.rollouts.seeds import derived_seed
from rlhf_core.training.types import Completion, Episode, ModelTurn, Row

Steps = Generator[TurnRequest | None, Any, Completion]
"""Steps of a rollout: it yields requests to its tools or environment and is sent their replies, and yields None for the
next turn and is sent that. It returns the whole rollout."""


@dataclass
class OpenRollout:
    """A rollout in progress.

    It waits for the reply to its :attr:`request`, or for its next turn, or is over and has a :attr:`completion`.
    """

    number: int
    """Number of its requests, different for every rollout of this rank."""
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
    weight_version: int = 0
    """Version of the weights of its first turn, the oldest."""
    end: Literal["answer", "turns", "tokens", "failure"] | None = None
    """Reason for its end; None while it goes on."""
    num_calls: int = 0
    num_failed: int = 0
    is_unanswered: bool = False
    """True for a last turn that is not part of ``messages`` yet."""
    is_lost: bool = False
    """True if the process of its environment is gone."""
    loss: tuple[str, str] | None = None
    """The first process that it lost: what was asked, and a sentence about it."""
    request: TurnRequest | None = None
    completion: Completion | None = None
    _steps: Steps | None = None

    def begin(self, steps: Steps) -> None:
        """Begin with the first of its steps."""
        self._steps = steps
        self.go_on(None)

    def go_on(self, received: Reply | Completion | None) -> None:
        """Continue with what it waited for: the reply, or its next turn.

        Raises:
            ToolFailed: it cannot go on, and the run shall end.
        """
        assert self._steps is not None
        try:
            self.request = self._steps.send(received)
        except StopIteration as end:
            self.request, self.completion = None, end.value

    @property
    def wants_turn(self) -> bool:
        """True if it waits for its next turn."""
        return self.request is None and self.completion is None

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
        self.weight_version = self.weight_version if self.turns else made.weight_version
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

    def whole(self, tokenizer: PreTrainedTokenizerBase, reward: float | None) -> Completion:
        """Everything so far as one completion, at the end."""
        assert self.last is not None
        assert self.end is not None
        before = len(self.tokens) - len(self.last.token_ids)
        text = text_of(tokenizer, self.tokens[:before])
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
            self.weight_version,
            episode,
        )


def by_context(rollouts: Sequence[OpenRollout]) -> list[list[OpenRollout]]:
    """Group rollouts whose next turns follow the same tokens of a prompt, which an engine processes once for them."""
    return [list(group) for _, group in itertools.groupby(rollouts, key=lambda one: (one.index, one.context))]
