"""Tokens of observations and of prompts that an environment completes.

What the model sampled is never decoded and tokenized again: other tokens often have the same text, and training would
compute probabilities of tokens that were not sampled. An observation is appended as the tokens of what the chat
template adds for it after any turn of the model; for a row that is a text, as those of its own text.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import BadConfig, UnrenderedChat
from rlhf_core.training.data.chat import apply_template, rendered, turn_end
from rlhf_core.training.data.loading import continued_tokens, prompt_tokens
from rlhf_core.training.data.tokenizers import text_of
from rlhf_core.training.types import Row

_QUESTION = {"role": "user", "content": "A question?"}
_CONTENT = "An answer."


class ObservationTokens:
    """Tokens of observations with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        end_ids: Sequence[int],
        max_tokens: int,
    ) -> None:
        """Args:
        arguments: those of the chat template (``data/chat.py``).
        end_ids: tokens that end a turn besides the end token.
        max_tokens: maximum length of an observation, before the chat template adds to it.
        """
        self._tokenizer, self._arguments, self._max_tokens = tokenizer, arguments, max_tokens
        self._end_ids = {tokenizer.eos_token_id, *end_ids}

    def prompt(self, row: Row, added: str) -> list[int]:
        """Tokens of the prompt of a row with text at its end: in a conversation, at the end of the last message."""
        if row.chat is None:
            return prompt_tokens([dataclasses.replace(row, prompt=row.prompt + added)], self._tokenizer)[0].tolist()
        *before, last = row.chat.prompt
        prompt = [*before, {**last, "content": f"{last.get('content') or ''}{added}"}]
        chat = dataclasses.replace(row.chat, prompt=prompt, target=(), chosen=(), rejected=(), is_whole=False)
        return prompt_tokens(
            [rendered(dataclasses.replace(row, chat=chat), self._tokenizer, self._arguments)], self._tokenizer
        )[0].tolist()

    def cut(self, text: str) -> str:
        """The beginning of the text of an observation, as long as it may be."""
        tokens = continued_tokens([text], self._tokenizer)[0]
        if len(tokens) <= self._max_tokens:
            return text
        return text_of(self._tokenizer, tokens[: self._max_tokens].tolist())

    def after(self, row: Row, turn: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens that follow a turn of the model, up to the beginning of the next one.

        Args:
            turn: sampled tokens of the turn.
            messages: observations.

        Raises:
            BadConfig: the chat template renders a turn otherwise once an observation follows.
        """
        if row.chat is None:
            text = "".join(str(message["content"]) for message in messages)
        else:
            text = self._delta(row, messages, is_ended=bool(turn) and turn[-1] in self._end_ids)
        return continued_tokens([text], self._tokenizer)[0].tolist()

    def _delta(self, row: Row, messages: Sequence[Mapping[str, Any]], *, is_ended: bool) -> str:
        """Text that the chat template adds for observations, from the end of the turn before them on."""
        assert row.chat is not None
        arguments = {
            **self._arguments,
            **({"tools": [dict(tool) for tool in row.chat.tools]} if row.chat.tools else {}),
        }
        before = [_QUESTION, _turn_before(messages)]
        try:
            asked = apply_template(self._tokenizer, before[:1], arguments)
            prefix = apply_template(self._tokenizer, before, arguments)
            whole = apply_template(self._tokenizer, [*before, *messages], arguments, add_generation_prompt=True)
        except UnrenderedChat as error:
            raise BadConfig(f"rollout.turns: {error}; expected a chat template for tools") from error
        if not (whole.startswith(prefix) and prefix.startswith(asked)):
            raise BadConfig(
                f"rollout.turns: the chat template renders a turn of the model as {prefix[-60:]!r}, but differently "
                "once an observation follows; expected one that keeps it, without which what was sampled would not be "
                "what the model is trained on"
            )
        # What follows the end token of the turn, such as a line break, was not sampled.
        end, own = self._end_text, prefix.removeprefix(asked)
        _, found, rest = own.rpartition(end) if end else ("", "", "")
        return (rest if is_ended else found + rest) + whole[len(prefix) :]

    @cached_property
    def _end_text(self) -> str:
        """Token that ends a turn in the chat template; empty without one."""
        found = turn_end(self._tokenizer, self._arguments)
        return "" if found is None else str(self._tokenizer.convert_ids_to_tokens(found))


def _turn_before(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A turn that such observations may follow: templates refuse results of tools that nothing called."""
    turn: dict[str, Any] = {"role": "assistant", "content": _CONTENT}
    if messages[0]["role"] == "tool":
        turn["content"] = ""
        turn["tool_calls"] = [{"type": "function", "function": {"name": str(messages[0]["name"]), "arguments": {}}}]
    return turn
