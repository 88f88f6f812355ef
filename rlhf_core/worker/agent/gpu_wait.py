"""The wait before a restart until GPU memory is free again: a killed process holds on to it for a moment."""

import time
from collections.abc import Collection, Iterator

from rlhf_core.machine.amd_gpus import AmdGpus
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.telemetry.gpus import GpuTelemetry, open_gpus

GPU_TIMEOUT_S = 60.0
"""Longest wait, in seconds: a process blocked in the driver may never release its memory."""
TOLERANCE_BYTES = 512 << 20
"""Memory that may remain in use beyond the level before the first start."""


class GpuWait:
    """Waits before a restart until the GPUs use no more memory than before the first start."""

    def __init__(self, events: EventLog) -> None:
        """Record the current use as the baseline. If it cannot be read, log an event and never wait."""
        self._events = events
        self._gpus: GpuTelemetry | AmdGpus | None = None
        try:
            self._gpus = open_gpus()
            self._before = self._gpus.used_bytes()
        except OSError as error:
            self._give_up(error)

    def wait(self, without: Collection[int] = ()) -> Iterator[None]:
        """Wait for at most ``GPU_TIMEOUT_S``, then log an event naming the GPUs still in use. Yields between readings.

        If one cannot be read any more, for example because it has fallen off the bus, log an event and never wait
        again: the restarted workers report what is wrong with it.

        Args:
            without: GPUs used by workers of other groups, which keep running.
        """
        deadline = time.monotonic() + GPU_TIMEOUT_S
        while self._gpus is not None:
            try:
                used = self._gpus.used_bytes()
            except OSError as error:
                self._give_up(error)
                return
            grown = [now > before + TOLERANCE_BYTES for now, before in zip(used, self._before, strict=True)]
            full = [index for index, has_grown in enumerate(grown) if has_grown and index not in without]
            if not full:
                return
            if time.monotonic() >= deadline:
                held = f"GPUs {full} still hold memory of ended processes after {GPU_TIMEOUT_S:.0f} s"
                self._events.print_line(held)
                return
            yield

    def _give_up(self, error: OSError) -> None:
        self._gpus = None
        self._events.print_line(f"restarting without waiting for GPU memory: {error}")
