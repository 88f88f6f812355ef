"""Signals that reach the agent, turned into something its supervising thread can read.

Python runs signal handlers only in the main thread and only between two bytecodes; the agent's main thread may be
inside a C++ call of the rendezvous then. The interpreter's wake-up descriptor is written by the C handler itself, at
once.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""End everything now."""
SAVING = signal.SIGUSR2
"""The time limit is near, or the nodes will be taken back: save, then end."""


class SignalInbox:
    """Keeps the signals that arrive until they are asked for. Made in the main thread."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.install()

    def install(self) -> None:
        """Take the signals, also back from a library that has taken them since (elastic does so with SIGQUIT)."""
        for number in (*ENDING, SAVING):
            signal.signal(number, _wake_up)

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Signals that came, in their order; waits for the first one for at most so long."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        return [signal.Signals(number) for number in os.read(self._reader, 1024)] if ready else []


@contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Keep signals from processes that are started in here, until they let them through themselves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _wake_up(number: int, frame: FrameType | None) -> None:
    """Nothing to do: the wake-up descriptor has it."""
