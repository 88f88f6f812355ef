"""Runs at default floors: faults that must be found within 30 s all the same, and healthy silences of a minute.

The other cases lower the floors to seconds. Here they are the defaults, of two minutes and more, and the run has made
20 steps before the first fault.
"""

import random
from collections.abc import Callable
from typing import Any

from fault_cases import NUM_RANKS, Expected, Kind, Scenario, chain, repeated

from rlhf_core.schemas.supervision import SuperviseSpec

PREFIX = "default floors"
STEPS_BEFORE = 20
PER_RUN = 3
DEFAULTS = tuple(
    f"supervise.{name}={value}" for name, value in SuperviseSpec().model_dump().items() if name.endswith("floor_s")
)


_HEALTHY = Expected()


def _reward(what: str, seconds: float = 0.0) -> Callable[[random.Random], dict[str, Any]]:
    return lambda chance: {"moment": "reward", "what": what, "rank": chance.randrange(NUM_RANKS), "seconds": seconds}


def _kind(row: str, expected: Expected = _HEALTHY, **fields: Any) -> Kind:
    return Kind(f"{PREFIX}: {row}", expected, first_step=STEPS_BEFORE, overrides=DEFAULTS, **fields)


_HANG = Expected(frozenset({"hang"}), frozenset({"restart_in_place"}), "rank", "soon")
_MISMATCH = Expected(frozenset({"collective_mismatch"}), frozenset({"stop"}), "", "soon", same_numbers=False)

KINDS: tuple[Kind, ...] = (
    _kind("SIGSTOP a rank", _HANG, outside="stop_rank"),
    _kind("a rank deadlocks on a lock", _HANG, inside=_reward("deadlock")),
    _kind(
        "a rank enters another collective",
        _MISMATCH,
        inside=lambda chance: {
            "moment": "metrics",
            "what": "another_operation",
            "rank": -1,
            "odd_rank": chance.randrange(NUM_RANKS),
        },
        ends_run=True,
    ),
)

CONTROLS: tuple[Kind, ...] = (
    _kind("control: a reward service answers after 60 s", inside=_reward("wait_for_service", 60.0)),
    _kind("control: a reward function sleeps 60 s", inside=_reward("sleep", 60.0)),
    _kind("control: a file stalls 60 s", inside=_reward("wait_for_file", 60.0)),
    _kind("control: the kernel blocks 60 s (state D)", inside=_reward("block_in_kernel", 60.0)),
    _kind("control: a compiler works 90 s", inside=_reward("compile", 90.0)),
    _kind("control: torch waits 60 s for another compilation", inside=_reward("wait_for_compilation", 60.0)),
    _kind("control: 60 s in C without a beat", inside=_reward("compute", 60.0)),
    _kind("control: a thread works 60 s for the main thread", inside=_reward("delegate", 60.0)),
    _kind("control: all processes suspended 60 s", outside="suspend_long"),
)


def soon_scenarios(seed: int, times: int) -> list[Scenario]:
    """Runs at default floors: every fault ``times`` times, every control once."""
    found = repeated("default-floors", KINDS, seed, times, PER_RUN)
    for first in range(0, len(CONTROLS), PER_RUN):
        found.append(chain(f"default-floors-controls-{first}", CONTROLS[first : first + PER_RUN], seed))
    return found
