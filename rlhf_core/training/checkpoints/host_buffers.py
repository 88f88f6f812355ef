"""Main memory for the files of a snapshot, taken once and used again by every save.

Memory that is used for the first time costs ten times what a copy costs: the kernel has to find and clear its pages.
"""

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from rlhf_core.files.private import FILE_MODE, make_folder
from rlhf_core.machine.main_memory import memory_bytes

SPARE_SHARE = 0.1
"""Share of what is free that a snapshot leaves to others."""


class HostBuffers:
    """Memory of one rank, by the name of the file that it holds."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        """Take nothing yet.

        Args:
            folder: folder of a file system in memory where the files are to outlive this process; None where they need
                not.
            device: device from which the memory is filled: for a GPU it is pinned.
        """
        self.folder = folder
        self._pins = device.type == "cuda"
        self._buffers: dict[str, mmap.mmap] = {}

    def __getitem__(self, name: str) -> mmap.mmap:
        """Memory for a file, as :meth:`reserve` has taken it."""
        return self._buffers[name]

    def reserve(self, sizes: Mapping[str, int]) -> bool:
        """Take memory for files of these sizes; False where there is not enough of it, and the step must do without.

        What fits already is kept as it is. Memory of files that there are no more is given back.
        """
        for name in [name for name, found in self._buffers.items() if sizes.get(name) != len(found)]:
            self._release(name)
        missing = {name: size for name, size in sizes.items() if name not in self._buffers}
        if self.folder is not None:
            for name in missing:  # of an earlier process: its copy counts no more, and its memory is needed
                (self.folder / name).unlink(missing_ok=True)
        if sum(missing.values()) > (1 - SPARE_SHARE) * free_memory(self.folder):
            return False
        try:
            for name, size in missing.items():
                self._buffers[name] = self._take(name, size)
        except OSError:  # the file system in memory is smaller than it said, or another process was faster
            return False
        return True

    def _take(self, name: str, size: int) -> mmap.mmap:
        if self.folder is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = _mapped_file(self.folder / name, size)
        if self._pins:
            _pin(memory)
        return memory

    def _release(self, name: str) -> None:
        memory = self._buffers.pop(name)
        if self._pins:
            torch.cuda.cudart().cudaHostUnregister(_address(memory))
        if self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)


def _mapped_file(path: Path, size: int) -> mmap.mmap:
    """A new file in memory, mapped, with all its pages: a write to one that cannot be had would kill the process.

    Raises:
        OSError: there is no room for it.
    """
    make_folder(path.parent)
    # Never one that was there: the model of this process may lie in it, which was loaded from there without a copy.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _pin(memory: mmap.mmap) -> None:
    """Have a GPU copy into the memory directly. Without, copies only take longer, so a refusal changes nothing."""
    torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)


def free_memory(folder: Path | None = None) -> int:
    """Bytes of main memory that can be had: of the job, and in the file system of a folder that lies in memory."""
    free = memory_bytes()[0]
    if folder is None:
        return free
    found = os.statvfs(next(parent for parent in (folder, *folder.parents) if parent.exists()))
    return min(free, found.f_bavail * found.f_frsize)
