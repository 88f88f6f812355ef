"""The wait before a restart until GPU memory is free again."""

from collections.abc import Collection, Iterator

from rlhf_core.worker.agent.gpu_memory import GpuMemory, wait_until_free
from rlhf_core.worker.event_log import EventLog

GPU_TIMEOUT_S = 60.0
"""Longest wait, in seconds: a process blocked in the driver may never release its memory."""


class GpuWait:
    """Waits before a restart until the GPUs use no more memory than before the first start."""

    def __init__(self, events: EventLog) -> None:
        """Record the current use as the baseline. If it cannot be read, log an event and never wait."""
        self._events = events
        self._memory: GpuMemory | None = None
        try:
            self._memory = GpuMemory()
            self._before = self._memory.used_bytes()
        except OSError as error:
            self._memory = None
            self._events.print_line(f"restarting without waiting for GPU memory: {error}")

    def wait(self, without: Collection[int] = ()) -> Iterator[None]:
        """Wait for at most ``GPU_TIMEOUT_S``, then log an event naming the GPUs still in use. Yields between readings.

        If one cannot be read any more, for example because it has fallen off the bus, log an event and never wait
        again: the restarted workers report what is wrong with it.

        Args:
            without: GPUs used by workers of other groups, which keep running.
        """
        if self._memory is None:
            return
        try:
            full = yield from wait_until_free(self._memory.used_bytes, self._before, GPU_TIMEOUT_S, without)
        except OSError as error:
            self._memory = None
            self._events.print_line(f"restarting without waiting for GPU memory: {error}")
            return
        if full:
            self._events.print_line(f"GPUs {full} still hold memory of ended processes after {GPU_TIMEOUT_S:.0f} s")
