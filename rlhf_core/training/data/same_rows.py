"""Comparison of the rows that ranks have loaded: each loads all of them, and takes its part of a common order."""

from collections.abc import Iterable
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
    digest = blake2b(digest_size=8)
    for row in rows:
        digest.update(
            f"{row.uid}\0{row.answer}\0{row.target}\0{row.chosen}\0{row.rejected}\0".encode(errors="surrogatepass")
        )
    return digest.hexdigest()
