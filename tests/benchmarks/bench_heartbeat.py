"""Cost of a heartbeat: ``python tests/benchmarks/bench_heartbeat.py``.

A beat sits in the innermost loops of training, so its limit is one microsecond. Prints the median of several rounds,
and its ratio to that limit; exits with 1 if a beat exceeds it.
"""

import statistics
import sys
import timeit

from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.liveness.heartbeat import Beat, SlotFile

LIMIT_NS = 1000.0
CALLS = 100_000
ROUNDS = 7


def measure(statement: str, names: dict[str, object]) -> float:
    """Median cost of one call, in nanoseconds."""
    rounds = timeit.repeat(statement, globals=names, number=CALLS, repeat=ROUNDS)
    return statistics.median(rounds) / CALLS * 1e9


def main() -> int:
    """Print one line per operation; the beat determines the exit code."""
    slots = SlotFile("bench-20260101-000000-abcdef", 1, "here", 1)
    try:
        beat = Beat(slots.path, 0)
        names: dict[str, object] = {"beat": beat, "slots": slots, "phase": Phase.TRAIN}
        costs = {
            "beat": measure("beat.beat(phase, 3)", names),
            "collective (enter and leave)": measure("with beat.collective(): pass", names),
            "request": measure("beat.request()", names),
            "read of one slot by the agent": measure("slots.read(0)", names),
        }
    finally:
        slots.remove()
    for name, cost_ns in costs.items():
        print(f"{name:32} {cost_ns:8.0f} ns   {cost_ns / LIMIT_NS:5.2f} of the limit of a beat (1 us)")
    return 0 if costs["beat"] <= LIMIT_NS else 1


if __name__ == "__main__":
    sys.exit(main())
