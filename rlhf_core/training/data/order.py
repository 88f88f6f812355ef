"""Order in which training rows are taken: one shuffled pass after the other, over one source or a mixture of several.

A pure function of the rows, their weights and the seed: only a position has to be saved, and any number of ranks takes
the same batches.
"""

import dataclasses
import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

from rlhf_core.errors import BadData
from rlhf_core.training.types import Row


class RowOrder:
    """Endless sequence of the indices of training rows.

    An epoch of a mixture has as many rows as its sources together. Each source has its share of them, in shuffled
    places, and is itself taken in one shuffled pass after the other: those of a small source are shorter than an epoch.
    """

    def __init__(self, rows: Sequence[Row], weights: Mapping[str, float], seed: int) -> None:
        """Args:
        rows: training rows in use, grouped by source or not.
        weights: weight of each source by name, all 0 to take each row once in an epoch; the only source has no name.
        seed: ``seed`` of the run.

        Raises:
            BadData: a source has no rows in use, or too small a weight to be taken at all.
        """
        self._num_rows, self._seed = len(rows), seed
        self._places = {name: array("q") for name in weights}
        for index, row in enumerate(rows):
            self._places[row.source].append(index)
        self._quotas = _quotas({name: len(places) for name, places in self._places.items()}, weights)
        self._mixed = lru_cache(maxsize=4)(self._epoch)

    def indices(self, start: int, count: int) -> list[int]:
        """Part of the sequence.

        Args:
            start: position in the sequence, from 0.
            count: number of indices.
        """
        if len(self._places) == 1:
            return row_indices(self._num_rows, self._seed, start, count)
        places = (divmod(position, self._num_rows) for position in range(start, start + count))
        return [self._mixed(epoch)[place] for epoch, place in places]

    def _epoch(self, number: int) -> "array[int]":
        """Indices of one epoch of a mixture."""
        names = [name for name, quota in self._quotas.items() for _ in range(quota)]
        random.Random(f"sources {self._seed} {number}").shuffle(names)
        drawn = {
            name: iter(row_indices(len(self._places[name]), f"{self._seed} {name}", number * quota, quota))
            for name, quota in self._quotas.items()
        }
        return array("q", (self._places[name][next(drawn[name])] for name in names))


def _quotas(num_rows: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Rows of each source in an epoch: its share, rounded by the largest remainders."""
    for name, number in num_rows.items():
        if not number:
            raise BadData(f"found no training row of data.sources.{name} that is neither malformed nor too long")
    if not any(weights.values()):
        return dict(num_rows)
    total, size = sum(Fraction(str(weight)) for weight in weights.values()), sum(num_rows.values())
    exact = {name: Fraction(str(weight)) * size / total for name, weight in weights.items()}
    quotas = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (quotas[name] - exact[name], name))
    for name in by_remainder[: size - sum(quotas.values())]:
        quotas[name] += 1
    for name, quota in quotas.items():
        if not quota:
            raise BadData(
                f"found data.sources.{name}.weight = {weights[name]:g}, which gives it none of the {size} rows of an "
                "epoch; raise it, or remove the source"
            )
    return quotas


def row_indices(num_rows: int, seed: int | str, start: int, count: int) -> list[int]:
    """Part of the endless sequence of the rows of one source: one permutation of all rows after another.

    Args:
        num_rows: rows of the source.
        seed: ``seed`` of the run, with the name of the source in a mixture.
        start: position in the sequence, from 0.
        count: number of indices.
    """
    return [
        _permutation(num_rows, seed, position // num_rows)[position % num_rows]
        for position in range(start, start + count)
    ]


def occurrences_before(indices: Sequence[int]) -> list[int]:
    """Number of earlier occurrences of each index."""
    seen: Counter[int] = Counter()
    counts = []
    for index in indices:
        counts.append(seen[index])
        seen[index] += 1
    return counts


def repeated(row: Row, number: int) -> Row:
    """Give a row's ``number``-th repetition a uid of its own; 0 is the row itself."""
    return dataclasses.replace(row, uid=f"{row.uid}@{number}") if number else row


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int | str, epoch: int) -> "array[int]":
    order = list(range(num_rows))
    random.Random(f"rows {seed} {epoch}").shuffle(order)
    return array("q", order)


def in_proportion(rows: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Held-out rows of several sources, in an order of which every beginning has about the same share of each."""
    placed = [
        ((place + 0.5) / len(of_source), name, row)
        for name, of_source in rows.items()
        for place, row in enumerate(of_source)
    ]
    return [row for _, _, row in sorted(placed, key=lambda one: one[:2])]
