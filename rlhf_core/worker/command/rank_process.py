"""The process of one rank of an external trainer: found among the node's processes and followed until it exits."""

import contextlib
import os
import select
import signal
import threading
from pathlib import Path

import psutil

from rlhf_core.machine.process_identity import stat_fields
from rlhf_core.worker.in_rank.rlhf_rank_file import PATH_VARIABLE, PID, RankFile

MAX_WAIT_S = 30.0
"""Longest wait for the next reading of the environments of all processes, in seconds; with Ray, no rank is found."""


def find_rank(status: RankFile, prefix: str, local_rank: int) -> int | None:
    """Process id of a rank; None until it has been started.

    A Python rank reports itself. Any other is the first process that has the job's variable and this LOCAL_RANK.
    """
    reported = status.get(PID)
    if reported:
        return reported
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if variables.get(PATH_VARIABLE) == prefix and variables.get("LOCAL_RANK") == str(local_rank):
                found.append((process.create_time(), process.pid))
    return min(found)[1] if found else None


class RankSearch:
    """Repeated search for one rank. Between two readings of the environments of all processes, the wait doubles."""

    def __init__(self, status: RankFile, prefix: str, local_rank: int) -> None:
        self._status = status
        self._place = prefix, local_rank
        self._wait_s = 0.1
        self._next_s = float("-inf")

    def find(self, now_s: float) -> int | None:
        """Process id of the rank; None while it has not been found.

        Args:
            now_s: Monotonic time in seconds.
        """
        if now_s < self._next_s:
            return self._status.get(PID) or None
        self._next_s, self._wait_s = now_s + self._wait_s, min(2 * self._wait_s, MAX_WAIT_S)
        return find_rank(self._status, *self._place)


class RankProcess:
    """A followed process, not necessarily a child of this one."""

    def __init__(self, pid: int) -> None:
        """Start following a process.

        Raises:
            ProcessLookupError: it has exited.
        """
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._launcher = _descriptor_of_parent(pid)
        self._early_code: int | None = None
        self.has_ended = False
        self.code: int | None = None
        """Exit code once it has exited, negative for a signal. Stays None if the process is not a child and was reaped
        before its code could be read."""

    def watch(self) -> None:
        """Read its exit code in a thread as soon as it exits: its launcher may reap it before the next poll."""
        threading.Thread(target=self._await_end, name="rank-exit", daemon=True).start()

    def _await_end(self) -> None:
        select.select([self._descriptor], [], [])
        self._early_code = _exit_code(self.pid)

    @property
    def has_failed(self) -> bool:
        """True if it failed by itself. A launcher kills the rest of a failed group with SIGTERM."""
        return self.has_ended and self.code not in (0, None, -signal.SIGTERM)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """True once it has exited.

        Args:
            timeout_s: Longest wait for its exit, in seconds.
        """
        if not self.has_ended and select.select([self._descriptor], [], [], timeout_s)[0]:
            code = _exit_code(self.pid)
            self.has_ended, self.code = True, self._early_code if code is None else code
        return self.has_ended

    @property
    def has_launcher_exited(self) -> bool:
        """True once the process that started it, which collects its exit code, has exited; False if it is unknown."""
        return self._launcher is not None and bool(select.select([self._launcher], [], [], 0.0)[0])

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a no-op once it has exited."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Stop following."""
        for descriptor in (self._descriptor, self._launcher):
            if descriptor is not None:
                os.close(descriptor)


def has_handler(pid: int, number: signal.Signals) -> bool:
    """True if a process handles a signal, which ends most processes that do not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    handled = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(handled.split()[1], 16) >> (number - 1) & 1)


def _descriptor_of_parent(pid: int) -> int | None:
    """A descriptor that becomes readable when the parent of a process exits; None if it has exited already."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        return os.pidfd_open(psutil.Process(pid).ppid())
    return None


def _exit_code(pid: int) -> int | None:
    """Exit code of a zombie, from ``/proc/<pid>/stat``."""
    fields = stat_fields(pid)
    if fields[:1] != ["Z"]:
        return None
    status = int(fields[-1])
    return -(status & 0x7F) if status & 0x7F else status >> 8 & 0xFF
