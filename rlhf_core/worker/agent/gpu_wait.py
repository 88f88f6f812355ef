"""The wait before a restart until GPU memory is free again: a killed process holds on to it for a moment.

NVML is called directly in the driver's own library, which is present wherever an NVIDIA GPU can be used.
"""

import ctypes
import time
from collections.abc import Collection, Iterator

from rlhf_core.machine.amd_gpus import AmdGpus, nvidia_or_amd
from rlhf_core.machine.gpus import listed_gpus
from rlhf_core.worker.event_log import EventLog

GPU_TIMEOUT_S = 60.0
"""Longest wait, in seconds: a process blocked in the driver may never release its memory."""
TOLERANCE_BYTES = 512 << 20
"""Memory that may remain in use beyond the level before the first start."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuMemory:
    """Memory in use on the NVIDIA GPUs visible to the job."""

    def __init__(self) -> None:
        """Load NVML.

        Raises:
            OSError: the library is missing or fails to initialise; the message says which.
        """
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._check("nvmlInit_v2")
        self._handles = [self._handle(device) for device in self._devices()]

    def used_bytes(self) -> list[int]:
        """Memory in use on each device, in bytes."""
        found = []
        for handle in self._handles:
            memory = _Memory()
            self._check("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            found.append(int(memory.used))
        return found

    def _devices(self) -> list[str]:
        listed = listed_gpus()
        if listed is not None:
            return listed
        count = ctypes.c_uint()
        self._check("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [str(index) for index in range(count.value)]

    def _handle(self, device: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if device.isdigit():
            self._check("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(device)), ctypes.byref(handle))
        else:
            self._check("nvmlDeviceGetHandleByUUID", device.encode(), ctypes.byref(handle))
        return handle

    def _check(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise OSError(f"NVML: {function} answered {status}")


class GpuWait:
    """Waits before a restart until the GPUs use no more memory than before the first start."""

    def __init__(self, events: EventLog) -> None:
        """Record the current use as the baseline. If it cannot be read, log an event and never wait."""
        self._events = events
        self._memory: GpuMemory | AmdGpus | None = None
        try:
            self._memory = nvidia_or_amd(GpuMemory)
            self._before = self._memory.used_bytes()
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
        while self._memory is not None:
            try:
                used = self._memory.used_bytes()
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
        self._memory = None
        self._events.print_line(f"restarting without waiting for GPU memory: {error}")
