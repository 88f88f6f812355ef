"""Ends of completions: the end tokens of a model, and stop strings, of which the token that completes one ends it.

All engines ask this module for every token, so a completion ends at the same token in each. vLLM and SGLang could
search for stop strings themselves, but only in the text of their own detokenizers, which are off.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from rlhf_core.training.data.tokenizers import text_of
from rlhf_core.training.types import Completion

_MARGIN = 4
"""Tokens in front of the longest possible stop string: decoded without those before them, the first ones may lose a
space or be a part of a character."""


class StopStrings:
    """Stop strings, and the tokenizer whose tokens are searched."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        """Args:
        strings: at least one, none of them empty.
        """
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._may_complete: dict[int, bool] = {}
        # No token has less than a byte of text.
        self.window = max(len(string.encode()) for string in strings) + _MARGIN
        """Number of the last tokens that tell whether the last one completes a stop string."""

    def are_completed(self, windows: Sequence[Sequence[int]]) -> list[bool]:
        """True for each window, none of them empty, whose last token completes a stop string: no earlier one does."""
        return [self._can_complete(window[-1]) and self._is_in(text_of(self._tokenizer, window)) for window in windows]

    def completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        """Make a completion whose text ends with a stop string, also if its last token has more text.

        Args:
            tokens: up to the one that completes the stop string.
            logprobs: one per token.
        """
        text = text_of(self._tokenizer, tokens)
        ends = [text.index(string) + len(string) for string in self._strings if string in text]
        return Completion(tokens, text[: min(ends, default=len(text))], True, logprobs)

    def _can_complete(self, token: int) -> bool:
        """False if no stop string can end in the text of a token, so that only few windows have to be decoded."""
        if (known := self._may_complete.get(token)) is None:
            text = text_of(self._tokenizer, [token])
            # Alone, a part of a character is a replacement character, and a token may lose its spaces.
            known = "\ufffd" in text or any(string[-1].isspace() or string[-1] in text for string in self._strings)
            self._may_complete[token] = known
        return known

    def _is_in(self, text: str) -> bool:
        return any(string in text for string in self._strings)


@functools.lru_cache(maxsize=4)
def stop_strings(tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]) -> StopStrings:
    """The same object for all completions: it remembers the tokens that it has seen."""
    return StopStrings(tokenizer, strings)


class StopSearch:
    """Search for stop strings in one completion, whose tokens arrive over time."""

    def __init__(self, strings: StopStrings) -> None:
        self.strings = strings
        self._num_checked = 0

    def length(self, tokens: Sequence[int]) -> int | None:
        """Number of tokens up to the first one that completes a stop string; None if there is none.

        Args:
            tokens: all tokens so far, without an end token: it ends a completion whatever its text.
        """
        ends = range(self._num_checked + 1, len(tokens) + 1)
        windows = [tokens[max(0, end - self.strings.window) : end] for end in ends]
        found = self.strings.are_completed(windows) if windows else []
        self._num_checked = len(tokens)
        return next((end for end, is_completed in zip(ends, found, strict=True) if is_completed), None)


def end_ids_of(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion: the tokenizer's, and those in the generation settings of the model.

    A model without such settings has those of its configuration, as in transformers.
    """
    if (folder / GENERATION_CONFIG_NAME).is_file():
        settings = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    else:
        settings = GenerationConfig.from_model_config(AutoConfig.from_pretrained(str(folder), local_files_only=True))
    named: object = settings.eos_token_id
    listed = named if isinstance(named, list) else [named]
    return sorted({token for token in (tokenizer.eos_token_id, *listed) if token is not None})
