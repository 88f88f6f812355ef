"""Tokens that a model has no embedding for: a pass with one fails, on a GPU as an assertion of a kernel.

Tokens that never occur may be beyond the vocabulary, as one of Gemma 3 is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import BadConfig
from rlhf_core.training.data.chat import AT_ONCE
from rlhf_core.training.data.loading import EncodedPrompts, completions_of, continued_tokens, parts_of
from rlhf_core.training.models.causal_lm import dropout_free_config
from rlhf_core.training.models.gathering import whole_shape


def replace_padding(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Pad with the end token if the model in ``folder`` has no embedding for the padding token, as when ``[PAD]`` was
    added to the tokenizer alone. What padding consists of does not affect results."""
    try:
        config: Any = dropout_free_config(folder).get_text_config()
    except (OSError, ValueError):
        return  # loading the model says what is wrong
    if tokenizer.pad_token_id >= getattr(config, "vocab_size", tokenizer.pad_token_id + 1):
        tokenizer.pad_token = tokenizer.eos_token


def require_embeddings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: EncodedPrompts, *, completions: bool
) -> None:
    """Refuse a tokenizer that is not the model's, before a pass reaches the first of its other tokens.

    Args:
        completions: completions of the rows go through the model too.

    Raises:
        BadConfig: the end token or a token of a row has no embedding.
    """
    embeddings: Any = model.get_input_embeddings()
    size = whole_shape(embeddings.weight)[0]
    if max(tokenizer.get_vocab().values()) < size:
        return
    _require(model, tokenizer, [tokenizer.eos_token_id], size, "at the end of completions")
    for start in range(0, len(data.rows), AT_ONCE):
        rows = data.rows[start : start + AT_ONCE]
        prompts = data.token_ids[start : start + AT_ONCE]
        found = list(zip(rows, prompts, strict=True))
        if completions:
            texts = [(row, part) for row in rows for text in completions_of(row) for part, _ in parts_of(text, row)]
            encoded = continued_tokens([text for _, text in texts], tokenizer)
            found += [(row, tokens) for (row, _), tokens in zip(texts, encoded, strict=True)]
        for row, tokens in found:
            _require(model, tokenizer, tokens, size, f"in the row of the prompt {row.prompt[:80]!r}")


def _require(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], size: int, where: str
) -> None:
    largest = max(tokens, default=0)
    if largest >= size:
        raise BadConfig(
            f"found token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) of the tokenizer {where}, but "
            f"{type(model).__name__} has embeddings for {size} tokens only: set model.tokenizer to the tokenizer of "
            "this model, or resize the embeddings of the model"
        )
