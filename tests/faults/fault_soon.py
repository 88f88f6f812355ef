"""Runs at default floors: faults that must be found within 30 s all the same, and healthy silences of a minute.

The other cases lower the floors to seconds. Here they are the defaults, of two minutes and more, and the run has made
20 steps before the first fault.
"""

from typing import Any

from fault_cases import Expected, Kind, Scenario, chain, expect, in_a_collective, in_a_rank, repeated

from rlhf_core.schemas.supervision import SuperviseSpec

PREFIX = "default floors"
STEPS_BEFORE = 20
PER_RUN = 3
DEFAULTS = tuple(
    f"supervise.{name}={value}" for name, value in SuperviseSpec().model_dump().items() if name.endswith("floor_s")
)
_HEALTHY = Expected()


def _kind(row: str, expected: Expected = _HEALTHY, **fields: Any) -> Kind:
    return Kind(f"{PREFIX}: {row}", expected, first_step=STEPS_BEFORE, overrides=DEFAULTS, **fields)


_HANG = expect("hang", "restart_in_place", "rank", "soon")
_MISMATCH = expect("collective_mismatch", "stop", limit="soon", same_numbers=False)

KINDS: tuple[Kind, ...] = (
    _kind("SIGSTOP a rank", _HANG, outside="stop_rank"),
    _kind("a rank deadlocks on a lock", _HANG, inside=in_a_rank("reward", "deadlock")),
    _kind("a rank enters another collective", _MISMATCH, inside=in_a_collective("another_operation"), ends_run=True),
)

CONTROLS: tuple[Kind, ...] = (
    _kind("control: a reward service answers after 60 s", inside=in_a_rank("reward", "wait_for_service", seconds=60.0)),
    _kind("control: a reward function sleeps 60 s", inside=in_a_rank("reward", "sleep", seconds=60.0)),
    _kind("control: a file stalls 60 s", inside=in_a_rank("reward", "wait_for_file", seconds=60.0)),
    _kind("control: the kernel blocks 60 s (state D)", inside=in_a_rank("reward", "block_in_kernel", seconds=60.0)),
    _kind("control: a compiler works 90 s", inside=in_a_rank("reward", "compile", seconds=90.0)),
    _kind(
        "control: torch waits 60 s for another compilation",
        inside=in_a_rank("reward", "wait_for_compilation", seconds=60.0),
    ),
    _kind("control: 60 s in C without a beat", inside=in_a_rank("reward", "compute", seconds=60.0)),
    _kind("control: a thread works 60 s for the main thread", inside=in_a_rank("reward", "delegate", seconds=60.0)),
    _kind("control: all processes suspended 60 s", outside="suspend_long"),
)


def soon_scenarios(seed: int, times: int) -> list[Scenario]:
    """Runs at default floors: every fault ``times`` times, every control once."""
    found = repeated("default-floors", KINDS, seed, times, PER_RUN)
    for first in range(0, len(CONTROLS), PER_RUN):
        found.append(chain(f"default-floors-controls-{first}", CONTROLS[first : first + PER_RUN], seed))
    return found
