"""Sampling seeds derived from the sample, never from the rank or engine that samples it.

A seed built from a rank, engine or server index repeats in some cluster layouts, which makes whole groups of
completions identical (ms-swift #3745, #7219; vLLM #50440). Here the seed of a completion is a hash of the run's seed,
the step, the prompt and the sample's index: different for every completion, the same on every layout, and unchanged by
restarts.
Does not import torch.
"""

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers because torch has no unsigned
# arithmetic.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_UNIT = 2.0**-52


def sample_seed(run_seed: int, step: int, prompt_uid: str, sample_index: int) -> int:
    """Seed of one completion.

    Args:
        run_seed: ``seed`` of the run.
        step: optimizer step that the completion is for, counted from 1 over the whole run.
        prompt_uid: ``Row.uid``.
        sample_index: index within the prompt's group, from 0.

    Returns:
        63 bits, uniform: an int that fits a torch ``int64`` and is not negative.
    """
    # The lengths are included, so that different arguments never give the same bytes.
    return derived_seed(run_seed, f"{step}|{sample_index}|{len(prompt_uid)}|{prompt_uid}")


def derived_seed(seed: int, part: str) -> int:
    """Seed of a part of something that has a seed, 63 bits.

    Args:
        seed: seed of the whole, for instance of a completion.
        part: name of the part, for instance ``turn 2``.
    """
    return int.from_bytes(blake2b(f"{seed}|{part}".encode(), digest_size=8).digest(), "big") >> 1


def uniforms(seeds: "Tensor", position: int) -> "Tensor":
    """One random number per seed for one token position: a pure function of both, with no state.

    The generator is splitmix64, counted by position: the same integers on every device, so a completion's noise
    does not depend on which other sequences are in the batch.

    Args:
        seeds: ``[B]`` int64.
        position: index of the token in the completion, from 0.

    Returns:
        ``[B]`` float64 in ``[0, 1)``, with 52 random bits: the largest value times a sum stays below that sum.
    """
    state = _mix(seeds + _wrap(_GAMMA * (position + 1)))
    return _shift_right(state, 12).double() * _UNIT


def _mix(state: "Tensor") -> "Tensor":
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(state: "Tensor", bits: int) -> "Tensor":
    """Shift logically: torch's own shift keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(value: int) -> int:
    """The signed 64-bit number with the same low 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
