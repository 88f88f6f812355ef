"""The process of one rank of another program: found among the processes of the node, followed to its end."""

import contextlib
import os
import select
import signal
import threading
from pathlib import Path

import psutil

from rlhf_core.worker.command.in_rank.rlhf_rank_file import PATH_VARIABLE, PID, RankFile


def find_rank(status: RankFile, prefix: str, local_rank: int) -> int | None:
    """Process id of a rank; None while it has not been started.

    A rank in Python says so itself. Any other is the first process that has the job's variable and this LOCAL_RANK.
    """
    told = status.get(PID)
    if told:
        return told
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if variables.get(PATH_VARIABLE) == prefix and variables.get("LOCAL_RANK") == str(local_rank):
                found.append((process.create_time(), process.pid))
    return min(found)[1] if found else None


class RankProcess:
    """A process that is followed; not necessarily a child of this one."""

    def __init__(self, pid: int) -> None:
        """Begin to follow.

        Raises:
            ProcessLookupError: it has ended.
        """
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._early_code: int | None = None
        self.has_ended = False
        self.code: int | None = None
        """Exit code once it has ended, negative for a signal. None of a process that is no child and was collected
        before it could be read."""

    def watch(self) -> None:
        """Read its exit in a thread, at the moment of its end: its launcher may collect it before the next poll."""
        threading.Thread(target=self._await_end, name="rank-exit", daemon=True).start()

    def _await_end(self) -> None:
        select.select([self._descriptor], [], [])
        self._early_code = _exit_code(self.pid)

    @property
    def has_failed(self) -> bool:
        """True if it has ended badly by itself. A launcher ends the rest of a failed group by SIGTERM."""
        return self.has_ended and self.code not in (0, None, -signal.SIGTERM)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """True once it has ended.

        Args:
            timeout_s: Longest wait for its end, in seconds.
        """
        if not self.has_ended and select.select([self._descriptor], [], [], timeout_s)[0]:
            code = _exit_code(self.pid)
            self.has_ended, self.code = True, self._early_code if code is None else code
        return self.has_ended

    def pids(self) -> list[int]:
        """The process and its descendants."""
        try:
            process = psutil.Process(self.pid)
            return [self.pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.Error:
            return []

    def send(self, number: signal.Signals) -> None:
        """Send a signal; harmless when it has ended."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Stop following."""
        os.close(self._descriptor)


def _exit_code(pid: int) -> int | None:
    """Exit code of a process that waits to be collected, from ``/proc/<pid>/stat``."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if state[0] != "Z":
        return None
    status = int(state[-1])
    return -(status & 0x7F) if status & 0x7F else status >> 8 & 0xFF
