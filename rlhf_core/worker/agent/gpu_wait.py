"""Waiting before a restart until the GPUs are free again."""

from collections.abc import Collection, Iterator

from rlhf_core.worker.agent.gpu_memory import GpuMemory, wait_until_free
from rlhf_core.worker.event_log import EventLog

GPU_TIMEOUT_S = 60.0
"""Longest wait, in seconds: a process blocked in the driver may never let go."""


class GpuWait:
    """Waits before a restart until the GPUs hold no more than they did before the first start."""

    def __init__(self, events: EventLog) -> None:
        """Take the present use as normal. Where it cannot be read, an event says so and nothing is waited for."""
        self._events = events
        self._memory: GpuMemory | None = None
        try:
            self._memory = GpuMemory()
            self._before = self._memory.used_bytes()
        except OSError as error:
            self._memory = None
            self._events.say(f"GPU memory is not waited for before a restart: {error}")

    def wait(self, without: Collection[int] = ()) -> Iterator[None]:
        """Wait for at most ``GPU_TIMEOUT_S``; an event names the GPUs that are still full then. Yields between two
        readings.

        Args:
            without: GPUs that workers of other groups use, which stay at work.
        """
        if self._memory is None:
            return
        full = yield from wait_until_free(self._memory.used_bytes, self._before, GPU_TIMEOUT_S, without)
        if full:
            self._events.say(f"GPUs {full} still hold memory of ended processes after {GPU_TIMEOUT_S:.0f} s")
