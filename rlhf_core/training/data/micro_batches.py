"""Division of sequences into micro-batches by length. Does not import torch.

Ragged lengths cost padding: if the mean is a quarter of the maximum length, three quarters of the work of padded
batches in arrival order is padding. A model that packs its sequences has none; for others, sequences of similar length
go together. Every pass holds as many as its token budget allows.
"""

from collections.abc import Sequence


def micro_batches(
    lengths: Sequence[int], max_sequences: int, max_tokens: int = 0, *, packed: bool = False
) -> list[list[int]]:
    """Divide sequences into micro-batches.

    Args:
        lengths: tokens of each sequence.
        max_sequences: maximum number of sequences in a micro-batch.
        max_tokens: maximum number of tokens in a micro-batch, including padding; 0 for no limit. A longer sequence gets
            its own micro-batch.
        packed: the model takes sequences without padding (``models/packing.py``). Then consecutive sequences stay
            together, because they may share a prefix; otherwise those of similar length go together.

    Returns:
        The indices of the sequences of each micro-batch; padded ones from the shortest to the longest.
    """
    return _in_order(lengths, max_sequences, max_tokens) if packed else _by_length(lengths, max_sequences, max_tokens)


def _in_order(lengths: Sequence[int], max_sequences: int, max_tokens: int) -> list[list[int]]:
    cut: list[list[int]] = []
    num_tokens = 0
    for index, length in enumerate(lengths):
        num_tokens += length
        if not cut or len(cut[-1]) == max_sequences or 0 < max_tokens < num_tokens:
            cut.append([])
            num_tokens = length
        cut[-1].append(index)
    return cut


def _by_length(lengths: Sequence[int], max_sequences: int, max_tokens: int) -> list[list[int]]:
    """Divide into the fewest micro-batches under these limits; without a token limit, all but the last are full."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if not max_tokens:
        return [order[start : start + max_sequences] for start in range(0, len(order), max_sequences)]
    cut: list[list[int]] = []
    # From the longest on: each micro-batch is as wide as its first sequence, and holds as many as fit at that width.
    while order:
        count = max(1, min(max_sequences, max_tokens // max(1, lengths[order[-1]])))
        cut.append(order[-count:])
        del order[-count:]
    return cut[::-1]


def evened(cut: Sequence[list[int]], count: int) -> list[list[int]]:
    """Pad with empty micro-batches to the largest number on any rank.

    Stages 2 and 3 of ZeRO communicate in every pass, so all ranks must run the same number of passes. The pass of an
    empty micro-batch runs over padding and contributes nothing.
    """
    return [*cut, *([] for _ in range(count - len(cut)))]


def balanced(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Distribute items over parts of equal size with nearly equal totals: the heaviest first, each to the lightest part
    that has room (longest processing time first, Graham 1969, with a capacity).

    Args:
        weights: weights of the items; their number is a multiple of ``num_parts``.

    Returns:
        The indices of the items of each part, in order. Deterministic: the same weights give the same result
        everywhere.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0.0] * num_parts
    room = len(weights) // num_parts
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        lightest = min((part for part in range(num_parts) if len(parts[part]) < room), key=totals.__getitem__)
        parts[lightest].append(index)
        totals[lightest] += weights[index]
    return [sorted(part) for part in parts]
