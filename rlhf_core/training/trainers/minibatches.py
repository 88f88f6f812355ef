"""Division of the completions of a step into the parts of its updates. Imports no torch."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b


def divide(places: Sequence[int], num_minibatches: int, *words: object) -> list[list[int]]:
    """Indices of a rank's completions by part of a pass.

    Completions that follow each other are dealt to different parts, in an order drawn anew for each turn: a part holds
    as many of every group as any other part does, and the division is the same whatever rank has which completion.

    Args:
        places: index of each completion of the rank among those of the whole step, over all ranks.
        num_minibatches: parts of the pass.
        words: seed of the run, step and pass, which the order follows from.

    Returns:
        One list for each part; a rank with fewer completions than parts has empty ones.
    """
    parts: list[list[int]] = [[] for _ in range(num_minibatches)]
    for index, place in enumerate(places):
        turn, within = divmod(place, num_minibatches)
        parts[_order(num_minibatches, *words, turn)[within]].append(index)
    return parts


@lru_cache(maxsize=8)
def _order(num_minibatches: int, *words: object) -> list[int]:
    """Permutation of the parts that follows from the words alone, on every machine and in every version of Python."""
    text = "|".join(map(str, words))
    keys = [blake2b(f"{text}|{part}".encode(), digest_size=8).digest() for part in range(num_minibatches)]
    return sorted(range(num_minibatches), key=keys.__getitem__)
