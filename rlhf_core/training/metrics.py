"""Reduction of all metrics with one packed collective per optimizer step, verified to be the same on every rank.

Ranks that reduce metrics one by one hang, or silently mix metrics up, when one of them has an extra metric or has
skipped a step: a collective compares shapes at best (ms-swift #3827, trl #3068). Here every rank contributes one vector
of fixed size (2.3 KB), so the collective itself always matches, and the vectors of all ranks are gathered:

    [fingerprint, step, votes: stop, save failed, sum_0, weight_0, sum_1, weight_1, ..., own values, sketch]

The fingerprint covers the step and the names of the metrics. Gathering instead of reducing yields sums, extremes,
per-rank values and the rank that differs from a single collective; sums are taken in rank order. Every rank sees the
same vectors, so all ranks reach the same verdict.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from operator import add

from rlhf_core.errors import MetricsMismatch
from rlhf_core.training.distributed import Ranks

CAPACITY = 128
"""Number of metrics that fit into one vector, whose size is fixed."""

RANK_CAPACITY = 12
"""Number of per-rank values in one vector (``StepMetrics.each``)."""

SKETCH_SIZE = 16
"""Number of hashes in the sketch of a rank's completions, which holds the smallest ones."""

_VOTES = ("stop", "failed")
_HEADER = 2 + len(_VOTES)
_DIGEST_BITS = 40  # a sum over 8192 ranks stays within 2^53: exact in double precision
_NO_HASH = -1.0
_OTHER = " (other)"
_DIAGNOSIS_WAIT_S = 3.0  # far below any silence that counts as a hang

VECTOR_SIZE = _HEADER + 2 * CAPACITY + RANK_CAPACITY + SKETCH_SIZE
"""Length of one rank's vector."""


@dataclass(frozen=True)
class ReducedMetrics:
    """Metrics of one step reduced over all ranks; the same on every rank."""

    values: dict[str, float]
    """Metric to value, names sorted."""
    by_rank: dict[str, tuple[float, ...]]
    """Per-rank values (``StepMetrics.each``), in rank order."""
    stop: bool
    """At least one rank was asked to save and stop."""
    save_failed: bool
    """At least one rank knows that a checkpoint could not be written."""


class StepMetrics:
    """Metrics of one rank for one step. Every rank adds the same names; the order does not matter."""

    def __init__(self, step: int, ranks: Ranks) -> None:
        self.step = step
        self._ranks = ranks
        self._entries: dict[str, tuple[float, float]] = {}
        self._own: dict[str, float] = {}
        self._digests: set[str] = set()
        self._extremes: dict[str, Callable[[Iterable[float]], float]] = {}
        self._correlations: list[str] = []
        self._sketch = sketch_of([])
        self._shared = ""

    def mean(self, name: str, total: float, weight: float) -> None:
        """Add a mean over all ranks: the sum of ``total`` divided by the sum of ``weight``.

        If the weight is 0 on all ranks, the metric is left out of the step.
        """
        self._entries[name] = (float(total), float(weight))

    def total(self, name: str, value: float) -> None:
        """Add a sum over the ranks; integers stay exact up to 2^53."""
        self._entries[name] = (float(value), 1.0 if self._ranks.is_first else 0.0)

    def shared(self, name: str, value: float) -> None:
        """Add a value that is the same on all ranks, or for which rank 0's counts."""
        self._entries[name] = (float(value), 1.0) if self._ranks.is_first else (0.0, 0.0)

    def digest(self, name: str, texts: Iterable[str]) -> None:
        """Add a 40-bit digest that is equal for two steps with the same texts, in any order and on any ranks."""
        self.total(name, sum(_hash(text, _DIGEST_BITS) for text in texts) % (1 << _DIGEST_BITS))
        self._digests.add(name)

    def each(self, name: str, value: float) -> None:
        """Add a per-rank value; all ranks receive all of them (``ReducedMetrics.by_rank``)."""
        self._own[name] = float(value)

    def highest(self, name: str, value: float) -> None:
        """Add a maximum over the ranks."""
        self.each(name, value)
        self._extremes[name] = max

    def lowest(self, name: str, value: float) -> None:
        """Add a minimum over the ranks."""
        self.each(name, value)
        self._extremes[name] = min

    def correlation(self, name: str, products: float, squares: float, other_squares: float) -> None:
        """Add a Pearson correlation over all ranks; left out if either variable does not vary.

        Args:
            products: sum of the products of the two deviations from their means.
            squares: sum of the squared deviations of the first variable.
            other_squares: that of the second.
        """
        self._entries[name] = (float(products), float(squares))
        self._entries[name + _OTHER] = (float(other_squares), 1.0)
        self._correlations.append(name)

    def shared_share(self, name: str, texts: Iterable[str]) -> None:
        """Add the estimated share of distinct texts that more than one rank has, from a sketch of each rank's
        hashes."""
        self._sketch = sketch_of(texts)
        self._shared = name

    def reduced(self, request: str = "") -> ReducedMetrics:
        """Combine the metrics of all ranks with one collective.

        Args:
            request: the agent's request to this rank (none or ``stop``), or ``failed`` after a checkpoint that could
                not be written. The votes travel with the metrics, so that all ranks act on them at the same step.

        Raises:
            MetricsMismatch: the ranks have different metrics or are at different steps. Raised by every rank; names the
                ranks that differ from the majority.
            ValueError: more than ``CAPACITY`` metrics, or more than ``RANK_CAPACITY`` per-rank values.
        """
        entries, own = dict(sorted(self._entries.items())), dict(sorted(self._own.items()))
        vectors = self._ranks.gather_numbers(self._packed(entries, own, request))
        odd = odd_ranks([vector[0] for vector in vectors])
        if odd:
            steps_found = [vector[1] for vector in vectors]
            raise MetricsMismatch(_explain(self.step, [*entries, *own], odd, steps_found, self._ranks))
        totals: dict[str, tuple[float, float]] = {}
        for index, name in enumerate(entries):
            place = _HEADER + 2 * index
            total, weight = (reduce(add, (vector[place + part] for vector in vectors)) for part in (0, 1))
            totals[name] = (total, weight)
        first = _HEADER + 2 * CAPACITY
        by_rank = {name: tuple(vector[first + index] for vector in vectors) for index, name in enumerate(own)}
        values = {name: choose(by_rank.pop(name)) for name, choose in self._extremes.items()}
        values |= self._values_of(totals)
        if self._shared:
            values[self._shared] = share_of_shared([vector[-SKETCH_SIZE:] for vector in vectors])
        votes = (any(vector[2 + vote] > 0 for vector in vectors) for vote in range(len(_VOTES)))
        return ReducedMetrics(dict(sorted(values.items())), by_rank, *votes)

    def _packed(
        self, entries: Mapping[str, tuple[float, float]], own: Mapping[str, float], request: str
    ) -> list[float]:
        """Build this rank's vector.

        Raises:
            ValueError: the metrics do not fit.
        """
        for kind, found, most in (("metrics", entries, CAPACITY), ("values of each rank", own, RANK_CAPACITY)):
            if len(found) > most:
                raise ValueError(f"found {len(found)} {kind} in one step, expected at most {most}")
        mark = _hash(json.dumps([self.step, *entries, *own]), _DIGEST_BITS)
        votes = [float(request == vote) for vote in _VOTES]
        body = [number for entry in entries.values() for number in entry]
        body += [0.0] * (2 * (CAPACITY - len(entries)))
        own_values = [*own.values(), *[0.0] * (RANK_CAPACITY - len(own))]
        return [float(mark), float(self.step), *votes, *body, *own_values, *self._sketch]

    def _values_of(self, totals: dict[str, tuple[float, float]]) -> dict[str, float]:
        """Means, digests and correlations from the sums of all ranks."""
        values = {}
        for name in self._correlations:
            (products, squares), (other, _) = totals.pop(name), totals.pop(name + _OTHER)
            if squares > 0 and other > 0:
                values[name] = products / math.sqrt(squares * other)
        values |= {name: total / weight for name, (total, weight) in totals.items() if weight != 0}
        values |= {name: totals[name][0] % (1 << _DIGEST_BITS) for name in self._digests}
        return values


def odd_ranks(fingerprints: Sequence[float]) -> list[int]:
    """Ranks whose fingerprint differs from the most frequent one; all ranks if there is a tie."""
    frequent = Counter(fingerprints).most_common(2)
    if len(frequent) == 1:
        return []
    if frequent[0][1] == frequent[1][1]:
        return list(range(len(fingerprints)))
    return [rank for rank, found in enumerate(fingerprints) if found != frequent[0][0]]


def sketch_of(texts: Iterable[str]) -> list[float]:
    """Smallest hashes of the texts of a rank, padded to ``SKETCH_SIZE``."""
    hashes = sorted({_hash(text, _DIGEST_BITS) for text in texts})[:SKETCH_SIZE]
    return [*map(float, hashes), *[_NO_HASH] * (SKETCH_SIZE - len(hashes))]


def share_of_shared(sketches: Sequence[Sequence[float]]) -> float:
    """Share of distinct hashes that more than one rank has, estimated from the smallest hashes of each rank.

    Below the smallest of the maxima of the full sketches, every sketch is complete (bottom-k sketches: Bar-Yossef et
    al. 2002, RANDOM).
    """
    full = [max(sketch) for sketch in sketches if _NO_HASH not in sketch]
    limit = min(full, default=float("inf"))
    counts = Counter(found for sketch in sketches for found in sketch if _NO_HASH < found <= limit)
    return sum(count > 1 for count in counts.values()) / len(counts) if counts else 0.0


def fingerprint(parts: Iterable[object]) -> int:
    """40-bit hash of a sequence, sensitive to its order."""
    return _hash(json.dumps([repr(part) for part in parts]), _DIGEST_BITS)


def _hash(text: str, bits: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - bits)


def _explain(step: int, names: list[str], odd: list[int], steps_found: list[float], ranks: Ranks) -> str:
    """Report the odd ranks and the steps and metrics of all. Uses no collective: the ranks' collectives no longer
    match."""
    received = ranks.exchange("metrics-mismatch", {"step": step, "names": names}, _DIAGNOSIS_WAIT_S)
    missing = [rank for rank in range(ranks.num_ranks) if rank not in received]
    steps = {rank: content["step"] for rank, content in received.items()}
    names_of = {rank: tuple(content["names"]) for rank, content in received.items()}
    parts = [f"the metrics of the ranks do not match (rank {ranks.rank} reduced step {step})"]
    if len(odd) < ranks.num_ranks:
        which = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {odd} differ"
        brought = ", ".join(f"{steps_found[rank]:.0f}" for rank in odd)
        parts.append(f"{which} from the other {ranks.num_ranks - len(odd)} (brought step {brought})")
    if len(set(steps.values())) > 1:
        parts.append("steps: " + ", ".join(f"rank {rank} at {found}" for rank, found in sorted(steps.items())))
    if len(set(names_of.values())) > 1:
        parts.append(
            "; ".join(f"rank {rank} has the metrics {list(found)}" for rank, found in sorted(names_of.items()))
        )
        differing = set().union(*names_of.values()) - set(names_of[ranks.rank]).intersection(*names_of.values())
        parts.append(f"not on every rank: {sorted(differing)}")
    if missing:
        parts.append(f"not in the metric collective but in another one: ranks {missing}")
    return "; ".join(parts) + ". A rank skipped or added a collective or a metric: this is a bug in the training code"
