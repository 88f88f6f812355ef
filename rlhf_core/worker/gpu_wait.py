"""What must be there before workers are started: compiled operations once, free GPU memory before every restart."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from rlhf_core.diagnosis.classify import read_log
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.worker import processes
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.gpu_memory import GpuMemory, wait_until_free
from rlhf_core.worker.signals import SAVING, held_back

GPU_TIMEOUT_S = 60.0
PROGRESS = "... "
"""Begins a line in which ``python -m rlhf_core.worker prebuild`` says what it is doing."""
PROGRESS_S = 10.0
"""How often it says so."""
TOOK_TOO_LONG = 75
"""Its exit code when nothing says that it could not be compiled."""
_NOT_THE_PACKAGES = (FailureKind.DISK_FULL, FailureKind.FILE_SYSTEM, FailureKind.HOST_OOM)


@dataclass(frozen=True)
class Prebuilt:
    """How the compilation went."""

    kind: FailureKind | None
    """Why it is not there; None when it is."""
    seconds: float
    output: str

    @property
    def ok(self) -> bool:
        """Whether all is there."""
        return self.kind is None


def prebuild(
    timeout_s: float, is_over: Callable[[], bool], say: Callable[[str], object] = lambda doing: None
) -> Prebuilt:
    """Compile what native workers on CPU need, in a process of its own; when all is there it takes a fraction of a
    second.

    A compilation may take as long as it says what it does (it knows itself when to give up): on a machine on which
    several runs start at once, one compiles and the others wait.

    Args:
        timeout_s: Longest silence of the process, in seconds.
        is_over: Asked now and then; True ends it.
        say: Told what it does while it takes time, about every ``PROGRESS_S``.
    """
    started_s = heard_s = time.monotonic()
    command = [sys.executable, "-u", "-P", "-m", "rlhf_core.worker", "prebuild"]
    # Slurm signals every process of a job: what was meant for the agent must not look like a compilation that failed.
    with held_back(signal.SIGTERM, SAVING):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    reader = process.stdout.fileno()
    os.set_blocking(reader, False)
    said, told, kind, ended = b"", 0, None, False
    while not ended:
        select.select([reader], [], [], 0.2)
        new = _read(reader)
        said += new or b""
        ended = new == b""
        lines = said.decode(errors="replace").split("\n")
        for line in lines[told:-1]:
            if line.startswith(PROGRESS):
                say(line.removeprefix(PROGRESS))
        told = len(lines) - 1
        now_s = time.monotonic()
        heard_s = now_s if new else heard_s
        if not ended and (now_s - heard_s > timeout_s or is_over()):
            kind = FailureKind.HANG if now_s - heard_s > timeout_s else None
            # With its compilers, which hold its output open.
            processes.end_descendants()
    process.stdout.close()
    code = process.wait()
    output = "\n".join(line for line in said.decode(errors="replace").splitlines() if not line.startswith(PROGRESS))
    if kind is not None:
        output += f"no sign of life for {timeout_s:.0f} s"
    return Prebuilt(kind or _kind(code, output), round(time.monotonic() - started_s, 2), output.strip())


def _read(descriptor: int) -> bytes | None:
    """What there is; empty at the end, None when there is nothing yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _kind(code: int, output: str) -> FailureKind | None:
    """What it was. A compiler's words are read for what may pass; everything else comes back every time."""
    if code == 0:
        return None
    if code == TOOK_TOO_LONG:
        return FailureKind.HANG
    if code < 0:
        return FailureKind.WORKER_KILLED
    found = read_log(output)
    return found.kind if found is not None and found.kind in _NOT_THE_PACKAGES else FailureKind.IMPORT_ERROR


class GpuWait:
    """Waits before a restart until the GPUs hold no more than they did before the first start."""

    def __init__(self, events: EventLog) -> None:
        """Take the present use as what is normal; where it cannot be read, say so, and never wait."""
        self._events = events
        self._memory: GpuMemory | None = None
        try:
            self._memory = GpuMemory()
            self._before = self._memory.used_bytes()
        except OSError as error:
            self._memory = None
            self._events.say(f"GPU memory is not waited for before a restart: {error}")

    def wait(self, without: Collection[int] = ()) -> Iterator[None]:
        """Wait, but not for ever: a process blocked in the driver may never let go. Yields between two readings.

        Args:
            without: GPUs that workers of other groups use, which stay at work.
        """
        if self._memory is None:
            return
        full = yield from wait_until_free(self._memory.used_bytes, self._before, GPU_TIMEOUT_S, without)
        if full:
            self._events.say(f"GPUs {full} still hold memory of ended processes after {GPU_TIMEOUT_S:.0f} s")
