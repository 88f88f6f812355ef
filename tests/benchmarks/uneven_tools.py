"""An environment for ``bench_rollout.py`` whose answers take unevenly long."""

import random
import time

TURNS = 4
"""Turns of every rollout."""
LONGEST_S = 4.0
"""Longest time that an answer takes, in seconds."""


class Uneven:
    """Answers after a time with a heavy tail (log-normal, 0.2 s in the median), drawn from the seed of the rollout."""

    def reset(self, seed: int, **columns: object) -> None:
        """Begin a rollout."""
        self._draw = random.Random(seed)
        self._num_turns = 0

    def respond(self, text: str) -> str | None:
        """Wait, and answer with a digit."""
        time.sleep(min(LONGEST_S, self._draw.lognormvariate(-1.6, 1.0)))
        self._num_turns += 1
        return None if self._num_turns == TURNS else str(self._num_turns)
