"""A clock that notices when this process stood still."""

import threading
from collections import deque

NUM_PAUSES = 16
"""Number of the last pauses that are remembered."""


class PauseClock:
    """Ages that do not count pauses of the watcher itself: a suspended job, a frozen machine.

    Silence during a pause says nothing about the workers, so ages are counted from its end. The first call after a
    pause notices it, however that moment falls, as long as a thread ticks that does nothing else: a watcher that was
    busy for long (it collected evidence, its file system did not answer) has not paused.
    """

    def __init__(self, tolerance_s: float = 2.0) -> None:
        self._tolerance_s = tolerance_s
        self._lock = threading.Lock()
        self._last_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=NUM_PAUSES)
        self.num_pauses = 0
        """Number of pauses so far."""
        self.pause_s = 0.0
        """Length of the last one, in seconds."""

    def tick(self, now_s: float) -> None:
        """Say that this process is awake; called at least twice in the tolerance, with the monotonic time."""
        with self._lock:
            if self._last_s is not None and now_s - self._last_s > self._tolerance_s:
                self.pause_s = now_s - self._last_s
                self._pauses.append((now_s, self.pause_s))
                self.num_pauses += 1
            self._last_s = max(now_s, self._last_s or now_s)

    def age_s(self, beat_s: float, now_s: float) -> float:
        """Silence since a beat, not counting what was before the end of the last pause."""
        self.tick(now_s)
        with self._lock:
            end_s = self._pauses[-1][0] if self._pauses else float("-inf")
        return max(0.0, now_s - max(beat_s, end_s))

    def longest_pause_s(self, since_s: float = float("-inf")) -> float:
        """Length of the longest pause that ended after a moment, in seconds; 0 without any."""
        with self._lock:
            return max((length_s for end_s, length_s in self._pauses if end_s > since_s), default=0.0)
