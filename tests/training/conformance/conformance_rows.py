"""Rows that all comparisons use: ragged lengths, and a group whose rewards are all equal."""

from collections.abc import Sequence
from typing import Any

PROMPTS = ("abca", "d", "fedcba")

COMPLETIONS = (
    ("bc$", "gfedhijkl", "n$", "ackm$"),
    ("ijklmna$", "$", "mlkjihgf$", "bbbb$"),
    ("aabbccd$", "h$", "kkklm$", "nmlkjihgf"),
)
"""Completions of each prompt. ``$`` ends one; one without it was cut off at the longest length."""


def sampled_flags(completion: Sequence[int]) -> list[bool]:
    """False for the tokens of two observations, one of them at a place where other completions have ended: the third
    token, and the fifth and sixth. The last token is always a sampled one."""
    return [at == len(completion) - 1 or at not in (2, 4, 5) for at in range(len(completion))]


REWARDS = ((1.0, 0.0, 0.25, 0.75), (0.5, -0.5, 1.5, 0.0), (0.5, 0.5, 0.5, 0.5))
"""Rewards of each group; the last has no spread."""

PAIRS: list[dict[str, Any]] = [
    {"prompt": "abca", "chosen": "bc", "rejected": "gfedhijk", "margin": 0.5},
    {"prompt": "d", "chosen": "mlkjihgf", "rejected": "n", "margin": 1.0},
    {"prompt": "fedcba", "chosen": "ackm", "rejected": "bbbb", "margin": 0.0},
    {"prompt": "nn", "chosen": "h", "rejected": "aabbccd", "margin": 2.0},
    {"prompt": "ghi", "chosen": "kkklm", "rejected": "jj", "margin": 0.25},
]

LABELLED: list[dict[str, Any]] = [
    {"prompt": row["prompt"], "completion": row["chosen"] if desirable else row["rejected"], "label": desirable}
    for row, desirable in zip(PAIRS, (True, False, True, True, False), strict=True)
]
