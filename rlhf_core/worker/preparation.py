"""What must be there before workers are started: compiled operations once, free GPU memory before every restart."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_core.worker import processes
from rlhf_core.worker.events import EventLog
from rlhf_core.worker.gpu_memory import GpuMemory, wait_until_free

GPU_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Prebuilt:
    """How the compilation went."""

    ok: bool
    seconds: float
    output: str


def prebuild(patience_s: float, is_over: Callable[[], bool]) -> Prebuilt:
    """Compile what native workers on CPU need, in a process of its own; when all is there it takes a fraction of a
    second.

    A rank that is killed while it compiles would leave a lock that the others wait for, and elastic would see only that
    they do not come.

    Args:
        patience_s: Longest time it may take.
        is_over: Asked now and then; True ends it.
    """
    started_s = time.monotonic()
    command = [sys.executable, "-m", "rlhf_core.worker", "prebuild"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    late = False
    while True:
        try:
            output, _ = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            late = time.monotonic() - started_s > patience_s
            if late or is_over():
                # With its compilers, which hold its output open.
                processes.end_descendants()
    if late:
        output += f"no end within {patience_s:.0f} s"
    return Prebuilt(process.returncode == 0, round(time.monotonic() - started_s, 2), output.strip())


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

    def wait(self) -> None:
        """Wait, but not for ever: a process blocked in the driver may never let go."""
        if self._memory is None:
            return
        full = wait_until_free(self._memory.used_bytes, self._before, GPU_PATIENCE_S)
        if full:
            self._events.say(f"GPUs {full} still hold memory of ended processes after {GPU_PATIENCE_S:.0f} s")
