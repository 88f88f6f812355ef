"""One packed reduction per optimizer step for all metrics, and the proof that every rank meant the same ones.

Ranks that reduce metrics one by one hang or mix up silently when one of them has a metric more, or has skipped a step:
a collective compares shapes at best (ms-swift #3827, trl #3068). Here every rank contributes one vector of fixed size,
so the collective itself always matches, and the vector carries a fingerprint of the metric names and of the step:

    [f1, f1^2, f2, f2^2, votes to save, votes to stop, sum_0, weight_0, sum_1, weight_1, ..., slots of each rank]

In the slots every rank writes its own value and leaves those of the others at zero. Their sum is what each rank had,
so that highest, lowest and repeated values need no collective of their own.

By Cauchy and Schwarz ``ranks * sum(f^2) == (sum f)^2`` holds exactly when all fingerprints are equal. Every rank sees
the same sums, so all ranks of the reduction come to the same verdict.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rlhf_core.errors import MetricsMismatch
from rlhf_core.training.distributed import Ranks

CAPACITY = 128
"""Metrics that fit into one reduction. The vector always has this size."""

RANK_CAPACITY = 8
"""Values that every rank can put beside those of the others. Their slots always take part in the reduction."""

_HEADER = 6
_WORD_BITS = 20  # squares of 20 bits, summed over 8192 ranks, stay within 2^53: exact in double precision
_DIGEST_BITS = 40  # summed over 8192 ranks likewise
_DIAGNOSIS_WAIT_S = 3.0  # far below any silence that is taken for a hang


class StepMetrics:
    """What one rank knows about one step. Every rank adds the same names; the order does not matter."""

    def __init__(self, step: int, ranks: Ranks) -> None:
        self.step = step
        self._is_first = ranks.is_first
        self._entries: dict[str, tuple[float, float]] = {}
        self._own: dict[str, float] = {}
        self._digests: set[str] = set()
        self._extremes: dict[str, Callable[[Iterable[float]], float]] = {}

    def mean(self, name: str, total: float, weight: float) -> None:
        """A mean over everything the ranks have seen: the sums of ``total`` and ``weight`` are divided.

        With a weight of 0 on all ranks the metric is left out of the step.
        """
        self._entries[name] = (float(total), float(weight))

    def total(self, name: str, value: float) -> None:
        """A sum over the ranks; integers stay exact up to 2^53."""
        self._entries[name] = (float(value), 1.0 if self._is_first else 0.0)

    def shared(self, name: str, value: float) -> None:
        """A value that is the same on all ranks, or of which rank 0's counts."""
        self._entries[name] = (float(value), 1.0) if self._is_first else (0.0, 0.0)

    def digest(self, name: str, texts: Iterable[str]) -> None:
        """40 bits that tell whether two steps saw the same texts, in whatever order and on whatever ranks."""
        self.total(name, sum(_hash(text, _DIGEST_BITS) for text in texts) % (1 << _DIGEST_BITS))
        self._digests.add(name)

    def each(self, name: str, value: float) -> None:
        """A value that every rank has its own of; all ranks get to see all of them (``ReducedMetrics.by_rank``)."""
        self._own[name] = float(value)

    def highest(self, name: str, value: float) -> None:
        """The highest value of all ranks."""
        self.each(name, value)
        self._extremes[name] = max

    def lowest(self, name: str, value: float) -> None:
        """The lowest value of all ranks."""
        self.each(name, value)
        self._extremes[name] = min

    def is_digest(self, name: str) -> bool:
        """Whether the metric is a digest."""
        return name in self._digests

    def entries(self) -> dict[str, tuple[float, float]]:
        """Name to sum and weight, names sorted."""
        return dict(sorted(self._entries.items()))

    def own(self) -> dict[str, float]:
        """Name to this rank's value of what every rank has its own of, names sorted."""
        return dict(sorted(self._own.items()))

    def split(self, by_rank: Mapping[str, tuple[float, ...]]) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        """Highest and lowest values, and what is left to be seen rank by rank."""
        extremes = {name: choose(by_rank[name]) for name, choose in self._extremes.items()}
        return extremes, {name: values for name, values in by_rank.items() if name not in extremes}


@dataclass(frozen=True)
class ReducedMetrics:
    """What all ranks together know about one step; the same on every rank."""

    values: dict[str, float]
    """Metric to value, names sorted."""
    by_rank: dict[str, tuple[float, ...]]
    """Values that every rank has its own of (``StepMetrics.each``), in the order of the ranks."""
    save: bool
    """At least one rank was asked to save."""
    stop: bool
    """At least one rank was asked to save and end."""


def reduce_metrics(metrics: StepMetrics, ranks: Ranks, request: str = "") -> ReducedMetrics:
    """Combine the metrics of all ranks with one collective.

    Args:
        request: what the agent asks of this rank: nothing, ``save`` or ``stop``. The votes ride along, so that all
            ranks act on them at the same step.

    Raises:
        MetricsMismatch: the ranks reduced different metrics, or were at different steps. Raised by every rank.
        ValueError: more than ``CAPACITY`` metrics, or more than ``RANK_CAPACITY`` values of each rank.
    """
    entries, own = metrics.entries(), metrics.own()
    sums = ranks.sum([*_pack(metrics.step, entries, list(own), request), *_slots(own, ranks)])
    if not same_on_all_ranks(sums, ranks.num_ranks):
        raise MetricsMismatch(_explain(metrics.step, [*entries, *own], ranks))
    values = {}
    for index, name in enumerate(entries):
        total, weight = sums[_HEADER + 2 * index : _HEADER + 2 * index + 2]
        if weight != 0:
            values[name] = total % (1 << _DIGEST_BITS) if metrics.is_digest(name) else total / weight
    slots = sums[_HEADER + 2 * CAPACITY :]
    by_rank = {
        name: tuple(slots[index * ranks.num_ranks : (index + 1) * ranks.num_ranks]) for index, name in enumerate(own)
    }
    extremes, by_rank = metrics.split(by_rank)
    return ReducedMetrics(dict(sorted((values | extremes).items())), by_rank, save=sums[4] > 0, stop=sums[5] > 0)


def vector_size(num_ranks: int) -> int:
    """Numbers in the vector of one reduction: whatever is measured, always the same."""
    return _HEADER + 2 * CAPACITY + RANK_CAPACITY * num_ranks


def _pack(step: int, entries: dict[str, tuple[float, float]], own: Sequence[str], request: str) -> list[float]:
    if len(entries) > CAPACITY:
        raise ValueError(f"found {len(entries)} metrics in one step, expected at most {CAPACITY} (metrics.CAPACITY)")
    first, second = _fingerprint(step, [*entries, *own])
    votes = [float(request == "save"), float(request == "stop")]
    body = [number for entry in entries.values() for number in entry]
    empty = [0.0] * (2 * (CAPACITY - len(entries)))
    return [first, first**2, second, second**2, *votes, *body, *empty]


def _slots(own: Mapping[str, float], ranks: Ranks) -> list[float]:
    if len(own) > RANK_CAPACITY:
        raise ValueError(
            f"found {len(own)} values of each rank in one step, expected at most {RANK_CAPACITY} "
            f"(metrics.RANK_CAPACITY)"
        )
    slots = [0.0] * (RANK_CAPACITY * ranks.num_ranks)
    slots[ranks.rank : len(own) * ranks.num_ranks : ranks.num_ranks] = own.values()
    return slots


def _fingerprint(step: int, names: Sequence[str]) -> tuple[int, int]:
    """Two words of 20 bits from the step and the sorted names."""
    both = _hash(json.dumps([step, *names]), 2 * _WORD_BITS)
    return both >> _WORD_BITS, both & ((1 << _WORD_BITS) - 1)


def fingerprint(parts: Iterable[object]) -> int:
    """40 bits of a sequence, its order included."""
    return _hash(json.dumps([repr(part) for part in parts]), _DIGEST_BITS)


def _hash(text: str, bits: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - bits)


def same_on_all_ranks(sums: Sequence[float], num_ranks: int) -> bool:
    """Whether all ranks had the same fingerprint, from the sums over the ranks of a reduced vector."""
    header = sums[:4]
    if not all(math.isfinite(number) and number.is_integer() for number in header):
        return False
    first, first_square, second, second_square = (int(number) for number in header)
    return num_ranks * first_square == first**2 and num_ranks * second_square == second**2


def _explain(step: int, names: list[str], ranks: Ranks) -> str:
    """Name steps and metrics of all ranks. No collective is used: the ranks' collectives no longer match."""
    told = ranks.tell("metrics-mismatch", {"step": step, "names": names}, _DIAGNOSIS_WAIT_S)
    silent = [rank for rank in range(ranks.num_ranks) if rank not in told]
    steps = {rank: content["step"] for rank, content in told.items()}
    names_of = {rank: tuple(content["names"]) for rank, content in told.items()}
    parts = [f"the metrics of the ranks do not belong together (rank {ranks.rank} reduced step {step})"]
    if len(set(steps.values())) > 1:
        parts.append("steps: " + ", ".join(f"rank {rank} at {found}" for rank, found in sorted(steps.items())))
    if len(set(names_of.values())) > 1:
        parts.append(
            "; ".join(f"rank {rank} has the metrics {list(found)}" for rank, found in sorted(names_of.items()))
        )
        differing = set().union(*names_of.values()) - set(names_of[ranks.rank]).intersection(*names_of.values())
        parts.append(f"not on every rank: {sorted(differing)}")
    if silent:
        parts.append(f"not in the metric reduction but in another collective: ranks {silent}")
    return "; ".join(parts) + ". A rank left out or added a collective or a metric: this is a bug in the training code"
