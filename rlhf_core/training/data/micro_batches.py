"""Division of sequences into micro-batches by their lengths. Imports no torch.

Padding is what ragged lengths cost: with a mean of a quarter of the longest length, three quarters of the work of
padded batches in arrival order are padding. A model that packs its sequences makes none; for others those of like
length go together. Every pass holds as many as its budget of tokens allows.
"""

from collections.abc import Sequence


def micro_batches(
    lengths: Sequence[int], max_sequences: int, max_tokens: int = 0, *, packed: bool = False
) -> list[list[int]]:
    """Cut sequences into micro-batches.

    Args:
        lengths: tokens of each sequence.
        max_sequences: most sequences of one micro-batch.
        max_tokens: most tokens of one micro-batch, its padding included; 0 for no bound. A sequence that is longer by
            itself is alone in its micro-batch.
        packed: the model takes sequences without padding (``models/packing.py``). Then those that follow each other
            stay together, because they may begin with the same tokens; otherwise those of like length go together.

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
    """No division under these bounds has fewer micro-batches; without bounds of tokens, all but the last are full."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if not max_tokens:
        return [order[start : start + max_sequences] for start in range(0, len(order), max_sequences)]
    cut: list[list[int]] = []
    # From the longest on: each micro-batch is as wide as its first sequence, and takes all that fit into that width.
    while order:
        count = max(1, min(max_sequences, max_tokens // max(1, lengths[order[-1]])))
        cut.append(order[-count:])
        del order[-count:]
    return cut[::-1]


def evened(cut: Sequence[list[int]], count: int) -> list[list[int]]:
    """As many micro-batches as the rank with the most has: empty ones follow where this rank has fewer.

    Stages 2 and 3 of ZeRO communicate in every pass, so all ranks make as many. A pass for an empty micro-batch is made
    over padding, and counts for nothing.
    """
    return [*cut, *([] for _ in range(count - len(cut)))]


def balanced(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Deal items to parts of as many items each and of totals as equal as may be: the heaviest first, each to the
    lightest part that has room (longest processing time first, Graham 1969, with places).

    Args:
        weights: of the items; their number is a multiple of ``num_parts``.

    Returns:
        The indices of the items of each part, in their order. The same for the same weights, wherever it is called.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0.0] * num_parts
    room = len(weights) // num_parts
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        lightest = min((part for part in range(num_parts) if len(parts[part]) < room), key=totals.__getitem__)
        parts[lightest].append(index)
        totals[lightest] += weights[index]
    return [sorted(part) for part in parts]
