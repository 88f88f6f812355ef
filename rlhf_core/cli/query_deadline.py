"""Last resort to end ``rlhf sql``.

SQLite can be interrupted between instructions, but one instruction can take forever (``instr`` of two long texts). The
database is only read, so the process may end at any moment.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_core.history.sql_limits import WorkClock

GRACE_S = 2.0
"""Time that SQLite has to stop by itself, in seconds."""
_PULSE_S = 0.25


@contextmanager
def enforce_deadline(clock: WorkClock) -> Iterator[None]:
    """End this process if the database does not stop after its time limit or after a Ctrl-C. Main thread only.

    Args:
        clock: Measures the time of the statement.
    """
    signals, wakes = os.pipe()
    os.set_blocking(wakes, False)
    before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(clock, signals, over), name="query-deadline", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        watcher.join()
        os.close(signals)
        os.close(wakes)


def _watch(clock: WorkClock, signals: int, over: threading.Event) -> None:
    interrupted_at: float | None = None
    while not over.is_set():
        ready, _, _ = select.select([signals], [], [], _PULSE_S)
        if ready and signal.SIGINT in os.read(signals, 64) and interrupted_at is None:
            interrupted_at = time.monotonic()
        if not clock.is_working:
            interrupted_at = None
        elif interrupted_at is not None and time.monotonic() - interrupted_at > GRACE_S:
            os._exit(130)
        elif clock.left_s < -GRACE_S:
            os.write(2, f"error: the query took longer than {clock.limit_s:g} s and could not be ended\n".encode())
            os._exit(2)
