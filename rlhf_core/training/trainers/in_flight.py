"""In-flight completions as a checkpoint stores them: sampled for a step that has not run yet."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from rlhf_core.training.types import Completion, Episode, ModelTurn

Groups = dict[str, list[Completion]]
"""Completions by the uid of their prompt."""


@dataclass(frozen=True)
class InFlight:
    """Prompts of a step that has not run yet."""

    position: int
    """Position of the first of their rows in the order of the data."""
    made: Groups
    """Completions of the prompts that have all of theirs."""


def stored_completions(step: int, found: InFlight) -> dict[str, Any]:
    """Convert the completions of one rank to tensors: of their tokens (those of observations, and prompts that an
    environment completed, among them), of the log-probabilities, and of a JSON text.

    Args:
        step: step that the completions are for.
    """
    made = found.made
    flat = [completion for group in made.values() for completion in group]
    text = json.dumps({uid: [_description(one) for one in group] for uid, group in made.items()}, ensure_ascii=False)
    episodes = [completion.episode for completion in flat if completion.episode is not None]
    return {
        "step": step,
        "position": found.position,
        "tokens": torch.tensor([token for completion in flat for token in completion.token_ids], dtype=torch.int64),
        "logprobs": torch.tensor([value for completion in flat for value in completion.logprobs], dtype=torch.float64),
        "prompts": torch.tensor([token for one in episodes for token in one.prompt_ids], dtype=torch.int64),
        "sampled": torch.tensor([flag for one in episodes for flag in one.sampled], dtype=torch.bool),
        # A tensor: as a string, it would be part of the header of the file.
        "groups": torch.frombuffer(bytearray(text.encode(errors="surrogatepass")), dtype=torch.uint8),
    }


def kept_completions(stored: Iterable[Mapping[str, Any]]) -> dict[int, InFlight]:
    """Restore the completions that any number of ranks stored, by step."""
    found: dict[int, InFlight] = {}
    for part in stored:
        values = {name: iter(part[name].tolist()) for name in ("tokens", "logprobs", "prompts", "sampled")}
        step = found.setdefault(int(part["step"]), InFlight(int(part["position"]), {}))
        for uid, group in json.loads(part["groups"].numpy().tobytes()).items():
            step.made[uid] = [_completion(one, values) for one in group]
    return found


def _description(made: Completion) -> dict[str, Any]:
    """Everything about a completion that is not a tensor, and the lengths of its parts of the tensors."""
    content = asdict(made)
    lengths = {name: len(content.pop(name)) for name in ("token_ids", "logprobs")}
    if made.episode is not None:
        lengths["prompt_ids"] = len(content["episode"].pop("prompt_ids"))
        del content["episode"]["sampled"]
    return {**content, "lengths": lengths}


def _completion(content: dict[str, Any], values: Mapping[str, Iterator[Any]]) -> Completion:
    lengths = content.pop("lengths")
    tokens = list(islice(values["tokens"], lengths["token_ids"]))
    logprobs = list(islice(values["logprobs"], lengths["logprobs"]))
    if content["episode"] is not None:
        content["episode"] = Episode(
            **{
                **content["episode"],
                "turns": tuple(ModelTurn(**turn) for turn in content["episode"]["turns"]),
                "sampled": tuple(islice(values["sampled"], len(tokens))),
                "prompt_ids": tuple(islice(values["prompts"], lengths["prompt_ids"])),
                "messages": tuple(content["episode"]["messages"]),
            }
        )
    return Completion(tokens, logprobs=logprobs, **content)
