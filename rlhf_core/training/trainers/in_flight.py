"""In-flight completions as a checkpoint stores them: sampled for a step that has not run yet."""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch

from rlhf_core.training.types import Completion

Groups = Mapping[str, list[Completion]]
"""Completions by the uid of their prompt."""


def stored_completions(step: int, made: Groups) -> dict[str, Any]:
    """Convert the completions of one rank to tensors: of their tokens, of the log-probabilities, and of a JSON text.

    Args:
        step: step that the completions are for.
    """
    flat = [completion for group in made.values() for completion in group]
    groups = {
        uid: [[len(one.token_ids), one.text, one.finished, one.weight_version] for one in group]
        for uid, group in made.items()
    }
    text = json.dumps(groups, ensure_ascii=False).encode(errors="surrogatepass")
    return {
        "step": step,
        "tokens": torch.tensor([token for completion in flat for token in completion.token_ids], dtype=torch.int64),
        "logprobs": torch.tensor([value for completion in flat for value in completion.logprobs], dtype=torch.float64),
        # A tensor: as a string, it would be part of the header of the file.
        "groups": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }


def kept_completions(stored: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, list[Completion]]]:
    """Restore the completions that any number of ranks stored, by step and prompt."""
    found: dict[int, dict[str, list[Completion]]] = {}
    for part in stored:
        tokens, logprobs = iter(part["tokens"].tolist()), iter(part["logprobs"].tolist())
        groups = found.setdefault(int(part["step"]), {})
        for uid, group in json.loads(part["groups"].numpy().tobytes()).items():
            groups[uid] = [
                Completion(list(islice(tokens, length)), text, finished, list(islice(logprobs, length)), version)
                for length, text, finished, version in group
            ]
    return found
