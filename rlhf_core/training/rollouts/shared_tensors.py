"""Tensors in memory shared by processes of one host: mapped files, and references to locate a tensor.

The process of a split engine stages weights in such memory (``vllm/worker.py``); its workers read them in place,
without a copy between processes.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Size, Tensor, dtype

from rlhf_core.files.private import FILE_MODE


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor in a mapped file."""

    name: str
    path: str
    start: int
    """Offset in the file in bytes."""
    dtype: dtype
    shape: Size


class SharedMemory:
    """One array of bytes at a time, in its own file; the previous file is removed."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: in an in-memory file system; used only by this process.
        """
        self._folder = folder
        self._number = 0

    def allocate(self, size: int) -> Tensor:
        """Allocate memory, all of it at once.

        Args:
            size: bytes.

        Raises:
            OSError: there is not enough memory.
        """
        self._path().unlink(missing_ok=True)
        self._number += 1
        path = self._path()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            # Accessing a page missing later would kill the process without an error.
            os.posix_fallocate(file, 0, max(size, 1))
        finally:
            os.close(file)
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def _path(self) -> Path:
        return self._folder / f"weights-{self._number}"


def place_of(name: str, tensor: Tensor) -> TensorPlace:
    """Place of a tensor that is part of an array of :class:`SharedMemory`.

    Raises:
        ValueError: it is in private memory of this process.
    """
    path = tensor.untyped_storage().filename
    if path is None or not tensor.is_contiguous():
        raise ValueError(f"found tensor {name} in private memory, expected it in shared memory")
    start = int(tensor.storage_offset()) * tensor.element_size()
    return TensorPlace(name, path, start, tensor.dtype, tensor.shape)


def buckets_of_places(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[TensorPlace]]:
    """Places of tensors in shared memory, in buckets.

    Args:
        size: bytes per bucket; the tensor that exceeds them is the last of its bucket.
    """
    bucket: list[TensorPlace] = []
    filled = 0
    for name, tensor in tensors:
        bucket.append(place_of(name, tensor))
        filled += tensor.nbytes
        if filled > size:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


class MappedRow:
    """Shared memory of another process, mapped once for as long as it is in use."""

    def __init__(self) -> None:
        """Map nothing yet."""
        self._path = ""
        self._row = torch.empty(0, dtype=torch.uint8)

    def tensor(self, place: TensorPlace) -> Tensor:
        """The tensor at a place; not a copy.

        Raises:
            FileNotFoundError: the memory is no longer in use.
        """
        if place.path != self._path:
            size = Path(place.path).stat().st_size
            self._row = torch.from_file(place.path, shared=True, size=size, dtype=torch.uint8)
            self._path = place.path
        end = place.start + place.shape.numel() * place.dtype.itemsize
        return self._row[place.start : end].view(place.dtype).view(place.shape)
