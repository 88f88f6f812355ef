"""Wait for GPU memory to be released: a killed process holds on to it for a moment.

NVML is called directly in the driver's own library, which is present wherever an NVIDIA GPU can be used.
"""

import ctypes
import os
import time
from collections.abc import Callable, Collection, Generator, Sequence

TOLERANCE_BYTES = 512 << 20
"""Memory that may remain in use beyond the level before the first start."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuMemory:
    """Memory in use on the GPUs visible to the job."""

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
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return [device for device in visible.split(",") if device]
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


def wait_until_free(
    used_bytes: Callable[[], list[int]], before: Sequence[int], timeout_s: float, without: Collection[int] = ()
) -> Generator[None, None, list[int]]:
    """Wait until every device is back to its earlier memory use, within a tolerance. Yields between readings.

    Args:
        used_bytes: Reads the memory in use on each device.
        before: Memory in use before the first worker was started.
        timeout_s: Longest wait in seconds.
        without: Positions of devices to ignore.

    Returns:
        Positions of devices that still use more after the wait; normally empty.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        pairs = zip(used_bytes(), before, strict=True)
        full = [index for index, (used, base) in enumerate(pairs) if used > base + TOLERANCE_BYTES]
        full = [index for index in full if index not in without]
        if not full or time.monotonic() >= deadline:
            return full
        yield
