"""Delivery of the agent's signals to its supervising thread.

Python runs signal handlers only in the main thread and only between bytecodes, so not while that thread is inside a
call. The C-level handler, however, writes to the interpreter's wake-up descriptor at once.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that end everything at once."""
SAVING = signal.SIGUSR2
"""Signal to save and then stop: the time limit or a preemption is near."""


class SignalInbox:
    """Queues arriving signals until they are read. Create it in the main thread."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*ENDING, SAVING):
            signal.signal(number, _wake_up)

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Signals received, in order; waits for the first one for at most ``seconds``."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        return [signal.Signals(number) for number in os.read(self._reader, 1024)] if ready else []


@contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in processes started within the block, until they unblock them themselves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _wake_up(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor delivers the signal."""
