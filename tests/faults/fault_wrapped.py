"""Runs of a program that knows nothing of this project: a script that torchrun starts on four nodes."""

from typing import Any

from fault_cases import CHAIN, Expected, Kind, Scenario, expect, in_a_rank, repeated

PREFIX = "torchrun script"
STEPS_BEFORE = 20
"""In its first seconds of training, a rank still has the limits of the set-up: the program may compile."""


def _kind(row: str, expected: Expected, **fields: Any) -> Kind:
    return Kind(f"{PREFIX}: {row}", expected, is_wrapped=True, first_step=STEPS_BEFORE, **fields)


_KILLED = expect("worker_killed", "restart_in_place", "rank", "death", same_numbers=False)
_HUNG = expect("hang", "restart_in_place", "rank", "relayed", same_numbers=False)
_MISMATCH = expect("collective_mismatch", "stop", same_numbers=False)
_CIRCLE = expect("collective_mismatch", "restart_in_place", same_numbers=False)

KINDS: tuple[Kind, ...] = (
    _kind("SIGKILL a rank", _KILLED, outside="kill_program_rank"),
    _kind("SIGSTOP a rank", _HUNG, outside="stop_program_rank"),
    _kind("a rank enters another collective", _MISMATCH, inside=in_a_rank("step", "disagree"), ends_run=True),
    _kind("a rank does not come to a pair", _HUNG, inside=in_a_rank("pair", "sleep", seconds=1000.0)),
    _kind("a rank comes to its pairs in another order", _CIRCLE, inside=in_a_rank("pair", "reorder")),
    _kind("control: a step takes 3.5 s", Expected(), inside=in_a_rank("step", "sleep", seconds=3.5)),
)


def wrapped_scenarios(seed: int, times: int) -> list[Scenario]:
    """Runs with every kind this many times."""
    return repeated("torchrun-script", KINDS, seed, times, CHAIN)
