"""A clock that detects pauses of its own process."""

import threading
from collections import deque

NUM_PAUSES = 16
"""Number of recent pauses remembered."""


class PauseClock:
    """Measures ages without the watcher's own pauses, such as a suspended job or a frozen machine.

    Silence during a pause says nothing about the workers, so ages are counted from its end. The first call after a
    pause detects it, provided that a dedicated thread does the ticking: a watcher that was merely busy (collecting
    evidence, or blocked on a file system) has not paused.
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
        """Record that this process is running; call at least twice per tolerance, with the monotonic time."""
        with self._lock:
            if self._last_s is not None and now_s - self._last_s > self._tolerance_s:
                self.pause_s = now_s - self._last_s
                self._pauses.append((now_s, self.pause_s))
                self.num_pauses += 1
            self._last_s = max(now_s, self._last_s or now_s)

    def age_s(self, beat_s: float, now_s: float) -> float:
        """Seconds since a beat, counted at the earliest from the end of the last pause."""
        self.tick(now_s)
        with self._lock:
            end_s = self._pauses[-1][0] if self._pauses else float("-inf")
        return max(0.0, now_s - max(beat_s, end_s))

    def longest_pause_s(self, since_s: float = float("-inf")) -> float:
        """Length of the longest pause that ended after ``since_s``, in seconds; 0 if there was none."""
        with self._lock:
            return max((length_s for end_s, length_s in self._pauses if end_s > since_s), default=0.0)
