"""Orderly termination of processes of this user."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil

POLL_INTERVAL_S = 0.05

KILL_TIMEOUT_S = 10.0
"""Time that a process has to be gone after SIGKILL: the kernel first removes it from a core and reclaims its memory."""


def terminate(pid: int, is_alive: Callable[[], bool], timeout_s: float) -> bool:
    """End a process: SIGTERM, and SIGKILL after ``timeout_s`` seconds. Return True if it had to be killed.

    Args:
        pid: Process id.
        is_alive: True as long as ``pid`` is still that process; a reused pid is never signalled.
        timeout_s: Time between SIGTERM and SIGKILL.
    """
    if not is_alive():
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)  # a stopped process receives no other signal
    if wait_until(lambda: not is_alive(), timeout_s):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    # Even with a timeout of 0: callers must not mistake the dying process for a live one.
    wait_until(lambda: not is_alive(), KILL_TIMEOUT_S)
    return True


def terminate_all(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    """End processes: SIGTERM to all, then SIGKILL to those that remain after ``timeout_s`` seconds."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, remaining = psutil.wait_procs(processes, timeout=timeout_s)
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(remaining, timeout=timeout_s)


def wait_until(condition: Callable[[], bool], timeout_s: float, interval_s: float = POLL_INTERVAL_S) -> bool:
    """Poll a condition until it holds; return False if it does not within ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True
