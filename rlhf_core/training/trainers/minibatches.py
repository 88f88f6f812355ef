"""Division of a step's completions into minibatches, one per update. Does not import torch."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b


def divide(places: Sequence[int], num_minibatches: int, *words: object) -> list[list[int]]:
    """Divide a rank's completions into the minibatches of one pass, as lists of indices.

    Consecutive completions go to different minibatches, in an order redrawn for each round: every minibatch holds
    equally many completions of each group, and the division does not depend on which rank has which completion.

    Args:
        places: index of each of the rank's completions among those of the whole step, over all ranks.
        num_minibatches: minibatches per pass.
        words: seed of the run, step and pass, which determine the order.

    Returns:
        One list per minibatch; some are empty if the rank has fewer completions than minibatches.
    """
    parts: list[list[int]] = [[] for _ in range(num_minibatches)]
    for index, place in enumerate(places):
        turn, within = divmod(place, num_minibatches)
        parts[_order(num_minibatches, *words, turn)[within]].append(index)
    return parts


@lru_cache(maxsize=8)
def _order(num_minibatches: int, *words: object) -> list[int]:
    """Permutation of the minibatches that depends only on ``words``, on every machine and Python version."""
    text = "|".join(map(str, words))
    keys = [blake2b(f"{text}|{part}".encode(), digest_size=8).digest() for part in range(num_minibatches)]
    return sorted(range(num_minibatches), key=keys.__getitem__)
