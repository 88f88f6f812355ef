"""The end of an agent that does not come to it by itself: its main thread may wait in a call that never returns.

Torch elastic asks the store of agent 0 without a time-out. Where agent 0 is stopped, or the network swallows packets,
that answer never comes, and nothing that Python does can wake the thread that waits for it.
"""

import os
import threading
import time
from collections.abc import Callable

from rlhf_core.worker import processes

LAST_WORDS_S = 3.0
"""Longest wait for the last event to be written: a file system that does not answer holds up no end."""
KILL_TIMEOUT_S = 5.0
"""Longest wait for processes that this one has started."""
POLL_S = 0.2


class ExitDeadline:
    """Ends this process by force at a given time, with all that it has started, unless it has ended before."""

    def __init__(
        self,
        last_words: Callable[[str], None],
        end_descendants: Callable[[float], object] = processes.end_descendants,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """Set no deadline yet.

        Args:
            last_words: writes down why the process is ended; may block.
            end_descendants: kills all that this process has started, in so many seconds at most.
            leave: ends the process.
        """
        self._last_words = last_words
        self._end_descendants = end_descendants
        self._leave = leave
        self._lock = threading.Lock()
        self._at_s = float("inf")
        self._why = ""
        self._thread: threading.Thread | None = None

    def set(self, seconds: float, why: str) -> None:
        """End the process in so many seconds; an earlier deadline stands."""
        at_s = time.monotonic() + seconds
        with self._lock:
            if at_s >= self._at_s:
                return
            self._at_s, self._why = at_s, why
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="exit deadline", daemon=True)
                self._thread.start()

    def leave_now(self) -> None:
        """End the process at once, with all that it has started, and without a word: the run goes on elsewhere."""
        self._end_descendants(KILL_TIMEOUT_S)
        self._leave(1)

    def _wait(self) -> None:
        while time.monotonic() < self._at_s:
            time.sleep(POLL_S)
        words = threading.Thread(target=self._last_words, args=(self._why,), daemon=True)
        words.start()
        self._end_descendants(KILL_TIMEOUT_S)
        words.join(LAST_WORDS_S)
        self._leave(1)
