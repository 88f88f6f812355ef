"""Detection of a main thread that is stuck in a call, as on a hung file system."""

import time

from rlhf_core.worker.nodes.probe import FACTS_S

MAX_INTERVAL_S = 1.0
"""Longest time that counts between two observations, in seconds: more shows that the observer was stuck too."""


class MainThreadWatch:
    """Turns of the agent's main thread, which the supervising thread observes.

    There is no lock: the main thread writes the number of its turn, and the supervising thread everything else.
    """

    def __init__(self, floor_s: float) -> None:
        """Expect no turn before the first one.

        Args:
            floor_s: Shortest time after which the main thread counts as stuck, in seconds.
        """
        self._limit_s = max(floor_s, FACTS_S)
        self._turn: int | None = None
        self._observed_turn: int | None = None
        self._observed_at_s = time.monotonic()
        self._stuck_s = 0.0

    def take_turn(self) -> None:
        """Show that the main thread is not stuck in a call; called all the time from the start of an attempt on."""
        self._turn = (self._turn or 0) + 1

    def end_turns(self) -> None:
        """Expect no more turns until the next one: the phase is over."""
        self._turn = None

    def observe(self, now_s: float) -> float | None:
        """Seconds for which the main thread has been stuck, once these are too many; until then None.

        Only time in which the supervising thread was able to run counts.
        """
        passed_s, self._observed_at_s = min(now_s - self._observed_at_s, MAX_INTERVAL_S), now_s
        before, self._observed_turn = self._observed_turn, self._turn
        is_stuck = self._observed_turn is not None and self._observed_turn == before
        self._stuck_s = self._stuck_s + passed_s if is_stuck else 0.0
        return self._stuck_s if self._stuck_s > self._limit_s else None
