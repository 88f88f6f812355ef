"""Main memory for the files of a snapshot, allocated once and reused by every save.

The first use of memory costs ten times as much as a copy: the kernel has to find and zero its pages.
"""

import ctypes
import functools
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from rlhf_core.files.private import FILE_MODE, make_folder
from rlhf_core.machine.main_memory import memory_bytes

SPARE_SHARE = 0.1
"""Share of the free memory that a snapshot leaves to other uses."""


class HostBuffers:
    """Buffers of one rank, by file name."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        """Allocate nothing yet.

        Args:
            folder: folder in an in-memory file system if the files are to outlive this process; None otherwise.
            device: device that the memory is filled from; for a GPU it is pinned.
        """
        self.folder = folder
        self._pins = device.type == "cuda"
        self._buffers: dict[str, HostMemory] = {}

    def __getitem__(self, name: str) -> "HostMemory":
        """Return the memory that :meth:`reserve` allocated for a file."""
        return self._buffers[name]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each buffer in bytes."""
        return {name: len(memory) for name, memory in self._buffers.items()}

    def num_missing(self, sizes: Mapping[str, int]) -> int:
        """Number of bytes to allocate for files of these sizes. Buffers of other sizes, and of files that no longer
        exist, are released."""
        for name in [name for name, found in self._buffers.items() if sizes.get(name) != len(found)]:
            self._release(name)
        missing = self._missing(sizes)
        if self.folder is not None:
            for name in missing:  # from an earlier process: its copy is no longer valid, and its memory is needed
                (self.folder / name).unlink(missing_ok=True)
        return sum(missing.values())

    def num_available(self) -> int:
        """Number of bytes that all ranks of the node may allocate together."""
        return int((1 - SPARE_SHARE) * free_memory(self.folder))

    def reserve(self, sizes: Mapping[str, int]) -> bool:
        """Allocate what :meth:`num_missing` counts; False if there is not enough memory, and the step has to save
        without it."""
        try:
            for name, size in self._missing(sizes).items():
                self._buffers[name] = self._take(name, size)
        except OSError:  # the in-memory file system is smaller than reported, or another process was faster
            return False
        return True

    def _missing(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {name: size for name, size in sizes.items() if name not in self._buffers}

    def _take(self, name: str, size: int) -> "HostMemory":
        if self.folder is None:
            memory = HostMemory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = _mapped_file(self.folder / name, size)
        if self._pins:
            memory.pin()
        return memory

    def _release(self, name: str) -> None:
        self._buffers.pop(name).unpin()
        if self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)


class HostMemory(mmap.mmap):
    """Mapped main memory that can be pinned.

    It is unpinned before it is unmapped. Otherwise a later mapping at the same address would count as pinned, and a GPU
    would copy into the pages of this one: the later mapping would stay empty, without an error.
    """

    _pinned_at: int | None = None

    def pin(self) -> None:
        """Let a GPU copy into the memory directly. Memory that cannot be pinned is only slower."""
        driver, address = _driver(), ctypes.addressof(ctypes.c_char.from_buffer(self))
        if driver is not None and driver.cuMemHostRegister_v2(address, len(self), 0) == 0:
            self._pinned_at = address

    def unpin(self) -> None:
        """Undo :meth:`pin`, if it had an effect."""
        address, self._pinned_at = self._pinned_at, None
        driver = _driver()
        if address is not None and driver is not None:
            driver.cuMemHostUnregister(address)

    def __del__(self) -> None:
        self.unpin()


def _mapped_file(path: Path, size: int) -> HostMemory:
    """Create and map a new file in memory, with all pages allocated: writing to an unavailable page would kill the
    process.

    Raises:
        OSError: there is not enough memory.
    """
    make_folder(path.parent)
    # Never an existing file: this process's model may be mapped from it, having been loaded without a copy.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return HostMemory(descriptor, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """CUDA's driver; None if there is none, as on AMD.

    A failed call of the runtime would leave an error behind, which the next kernel reports as its own, for instance as
    "out of memory".
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    driver.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    driver.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
    return driver


def free_memory(folder: Path | None) -> int:
    """Bytes of main memory available to the job, and in the in-memory file system of a folder, if there is one."""
    free = memory_bytes()[0]
    if folder is None:
        return free
    found = os.statvfs(next(parent for parent in (folder, *folder.parents) if parent.exists()))
    return min(free, found.f_bavail * found.f_frsize)
