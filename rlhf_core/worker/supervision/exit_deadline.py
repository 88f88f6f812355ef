"""Forced exit of an agent that cannot exit by itself because its main thread is stuck in a call.

A read or write on a hung file system may never return, and nothing in Python can wake the waiting thread.
"""

import os
import threading
import time
from collections.abc import Callable

from rlhf_core.worker import processes

RECORD_TIMEOUT_S = 3.0
"""Longest wait for the last event to be written, in seconds: a hung file system must not delay the exit."""
KILL_TIMEOUT_S = 5.0
"""Longest wait for this process's descendants to die, in seconds."""
POLL_S = 0.2


class ExitDeadline:
    """Kills this process and all its descendants at a given time, unless it has exited before."""

    def __init__(self, record_exit: Callable[[str], None]) -> None:
        """Create it without a deadline.

        Args:
            record_exit: Records why the process is killed; may block.
        """
        self._record_exit = record_exit
        self._lock = threading.Lock()
        self._at_s = float("inf")
        self._why = ""
        self._thread: threading.Thread | None = None

    def set(self, seconds: float, why: str) -> None:
        """Kill the process after ``seconds``; an earlier deadline stays in force."""
        at_s = time.monotonic() + seconds
        with self._lock:
            if at_s >= self._at_s:
                return
            self._at_s, self._why = at_s, why
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="exit deadline", daemon=True)
                self._thread.start()

    def leave_now(self) -> None:
        """Kill the process and its descendants at once, recording nothing: the run continues elsewhere."""
        processes.end_descendants(KILL_TIMEOUT_S)
        os._exit(1)

    def _wait(self) -> None:
        while time.monotonic() < self._at_s:
            time.sleep(POLL_S)
        recorder = threading.Thread(target=self._record_exit, args=(self._why,), daemon=True)
        recorder.start()
        processes.end_descendants(KILL_TIMEOUT_S)
        recorder.join(RECORD_TIMEOUT_S)
        os._exit(1)
