"""Completions of a step as the ranks of a replica train on them: every rank samples its own, and all train on all."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from rlhf_core.training.algorithms.objective import SampledBatch
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.trainers.updates import StepBatch
from rlhf_core.training.types import Completion, Episode


def of_replica(batch: StepBatch, ranks: Ranks) -> StepBatch:
    """Completions of all ranks of this rank's replica, in rank order; without texts. Collective if there are several.

    Args:
        batch: completions that this rank has sampled.
    """
    group = ranks.sequence
    if group is None:
        return batch
    with ranks.collective():
        columns = [torch.cat(group.gather(column.to(ranks.device))).cpu() for column in _columns(batch)]
    places, finished, num_sampled, rewards = columns[:4]
    prompts, tokens, flags, logprobs, trained = (_cut(*columns[at : at + 2]) for at in range(4, len(columns), 2))
    completions = [
        Completion(own, "", bool(ended), values, episode=None if all(marks) else Episode((), marks, prompt))
        for own, ended, values, marks, prompt in zip(
            tokens, finished.tolist(), logprobs, (list(map(bool, one)) for one in flags), prompts, strict=True
        )
    ]
    mask = torch.arange(max(num_sampled.tolist(), default=0)) < num_sampled[:, None]
    counted = torch.zeros_like(mask)
    counted[mask] = torch.tensor(list(chain.from_iterable(trained)), dtype=torch.bool)
    return StepBatch(
        prompts,
        completions,
        places.tolist(),
        SampledBatch(
            rewards.view(-1, batch.sampled.rewards.shape[1]), mask, counted, torch.tensor([*map(len, tokens)])
        ),
    )


def _columns(batch: StepBatch) -> Iterator[Tensor]:
    """The batch as vectors: one value per completion, and lists of values after the length of each."""
    sampled, made = batch.sampled, batch.completions
    yield torch.tensor(list(batch.places), dtype=torch.int64)
    yield torch.tensor([one.finished for one in made], dtype=torch.uint8)
    yield sampled.mask.sum(1)
    yield sampled.rewards.flatten()
    yield from _joined(batch.prompts, torch.int64)
    yield from _joined([one.token_ids for one in made], torch.int64)
    yield from _joined([one.sampled or [True] * len(one.token_ids) for one in made], torch.uint8)
    yield from _joined([one.logprobs for one in made], torch.float64)
    yield from _joined([row[own].tolist() for row, own in zip(sampled.trained, sampled.mask, strict=True)], torch.uint8)


def _joined(lists: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lengths of lists, and all their values."""
    lengths = torch.tensor([*map(len, lists)], dtype=torch.int64)
    return lengths, torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)


def _cut(lengths: Tensor, values: Tensor) -> list[list[Any]]:
    """The lists that were joined."""
    left = iter(values.tolist())
    return [list(islice(left, length)) for length in lengths.tolist()]
