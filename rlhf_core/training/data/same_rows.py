"""Comparison of the rows that ranks have loaded: each loads all of them, and takes its part of a common order."""

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from rlhf_core.errors import BadData
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.types import Row


def require_same_rows(ranks: Ranks, source: str, rows: Iterable[Row]) -> str:
    """Refuse different rows, with which some would be used twice and others never. Collective.

    Args:
        source: the file or generator.

    Returns:
        A digest of the rows.

    Raises:
        BadData: the ranks have different rows, or the same ones in different orders; raised by every rank.
    """
    found = ranks.gather(_digest(rows))
    others = [rank for rank, one in enumerate(found) if one != found[0]]
    if others:
        raise BadData(
            f"{source}: rank {others[0]} has loaded other rows than rank 0, or the same ones in another order. "
            "Expected the same on every rank: a generator must depend only on its arguments (a set of texts is in a "
            "different order in every process), and a file must be the same on all nodes"
        )
    return found[0]


def _digest(rows: Iterable[Row]) -> str:
    """Digest of everything that is trained on or given to reward functions. Of a value that is not JSON, as generators
    may give, only the type counts: its text may contain an address, and that of a set is in any order."""
    digest = blake2b(digest_size=8)
    encoder = json.JSONEncoder(skipkeys=True, default=lambda value: type(value).__name__)
    for row in rows:
        texts = (row.uid, row.answer, row.target, row.chosen, row.rejected)
        content = [*texts, row.margin, row.desirable, _ordered(row.columns), *([row.source] if row.source else [])]
        digest.update(encoder.encode(content).encode())
    return digest.hexdigest()


def _ordered(value: object) -> object:
    """Put mappings in an order that does not depend on that of their keys, of whatever types these are."""
    if isinstance(value, Mapping):
        return sorted(((str(key), _ordered(item)) for key, item in value.items()), key=lambda item: item[0])
    return [_ordered(item) for item in value] if isinstance(value, list | tuple) else value
