"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(number: signal.Signals = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Have the kernel signal this process when the thread that started it exits (prctl(2)). Call this first.

    The setting survives ``execve``, so this can be called between fork and exec.

    Args:
        number: Signal to be sent.
        parent: Expected parent. If it is already gone, the request came too late and this process exits at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, so that none can hide (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
