"""In-flight completions as a checkpoint stores them: sampled for a step that has not run yet."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch

from rlhf_core.training.types import Completion

Item = TypeVar("Item")
Groups = Mapping[str, list[Completion]]
"""Completions by the uid of their prompt."""


def stored_completions(step: int, made: Groups) -> dict[str, Any]:
    """Convert the completions of one rank to tensors, with small values as strings and numbers.

    Args:
        step: step that the completions are for.
    """
    flat = [completion for group in made.values() for completion in group]
    texts = [completion.text.encode(errors="surrogatepass") for completion in flat]
    whole_numbers = {
        "sizes": [len(group) for group in made.values()],
        "lengths": [len(completion.token_ids) for completion in flat],
        "tokens": [token for completion in flat for token in completion.token_ids],
        "finished": [int(completion.finished) for completion in flat],
        "versions": [completion.weight_version for completion in flat],
        "text_lengths": list(map(len, texts)),
    }
    return {
        "step": step,
        "uids": list(made),
        **{name: torch.tensor(values, dtype=torch.int64) for name, values in whole_numbers.items()},
        "logprobs": torch.tensor([value for completion in flat for value in completion.logprobs], dtype=torch.float64),
        "texts": torch.tensor(list(b"".join(texts)), dtype=torch.uint8),
    }


def kept_completions(stored: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, list[Completion]]]:
    """Restore the completions that any number of ranks stored, by step and prompt."""
    found: dict[int, dict[str, list[Completion]]] = {}
    for part in stored:
        numbers = {name: value.tolist() for name, value in part.items() if isinstance(value, torch.Tensor)}
        flat = [
            Completion(tokens, bytes(text).decode(errors="surrogatepass"), bool(finished), logprobs, version)
            for tokens, text, finished, logprobs, version in zip(
                _divided(numbers["tokens"], numbers["lengths"]),
                _divided(numbers["texts"], numbers["text_lengths"]),
                numbers["finished"],
                _divided(numbers["logprobs"], numbers["lengths"]),
                numbers["versions"],
                strict=True,
            )
        ]
        groups = found.setdefault(int(part["step"]), {})
        groups.update(zip(part["uids"], _divided(flat, numbers["sizes"]), strict=True))
    return found


def _divided(items: Iterable[Item], sizes: Sequence[int]) -> list[list[Item]]:
    left = iter(items)
    return [list(islice(left, size)) for size in sizes]
