"""Safetensors files laid out before their tensors exist, in memory or on disk, and filled one tensor at a time.

The library needs all tensors of a file at once, and copies them in the process. A snapshot must make only one copy,
into memory that is already allocated, with exactly the bytes of the file. The format: 8 bytes of length, a header in
JSON, the bytes of the tensors without gaps (https://github.com/huggingface/safetensors).
"""

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Size, Tensor

from rlhf_core.files.reading import bring_to_disk

SYNC_BYTES = 256 << 20
"""Bytes after which a file is synced, so that progress shows while the disk works: a single sync at the end of a large
file may take longer than a stall is tolerated."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HEADER_BLOCK = 64 << 10
"""Alignment of the end of headers: an additional digit must not change the size of a file, whose memory is reused."""
_CONTENT = "content"
_TENSOR = "tensor"

Shapes = Mapping[str, tuple[torch.dtype, Size]]
"""Type and shape of each tensor, by name."""


@dataclass(frozen=True)
class TensorLayout:
    """Offsets of the tensors in one file."""

    header: bytes
    places: Mapping[str, tuple[int, int]]
    """Offset and size of each tensor in bytes, in file order."""
    num_bytes: int
    """Size of the file in bytes."""


def lay_out(shapes: Shapes, metadata: Mapping[str, str]) -> TensorLayout:
    """Lay out a file for tensors that do not exist yet.

    Raises:
        TypeError: a tensor has a type that the format does not support.
    """
    # The widest element types first, so that every tensor is aligned to its element size.
    order = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    relative, end = {}, 0
    for name in order:
        dtype, shape = shapes[name]
        if dtype not in _DTYPES:
            raise TypeError(f"found a tensor {name!r} of {dtype}, expected one of {', '.join(map(str, _DTYPES))}")
        begin, end = end, end + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        relative[name] = (begin, end - begin)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_BLOCK)
    header = len(text).to_bytes(8, "little") + text
    places = {name: (len(header) + begin, size) for name, (begin, size) in relative.items()}
    return TensorLayout(header, places, len(header) + end)


class TensorImage:
    """A file image in memory, being filled."""

    def __init__(self, layout: TensorLayout, memory: mmap.mmap) -> None:
        """Write the header.

        Args:
            memory: at least as large as the file.
        """
        self._places = layout.places
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        memory[: len(layout.header)] = layout.header

    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to its place; if the memory is pinned, a copy from a GPU is asynchronous."""
        begin, size = self._places[name]
        place = self._bytes[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor, non_blocking=True)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], beat: Callable[[], None]
) -> None:
    """Write a file tensor by tensor, so that at most one is in main memory twice, and sync it to disk.

    Args:
        beat: called after every piece.

    Raises:
        OSError: the file cannot be written.
    """
    write_pieces(path, _pieces(tensors, lay_out(shapes_of(tensors), metadata)), beat)


def _pieces(tensors: Mapping[str, Tensor], layout: TensorLayout) -> Iterator[bytes | memoryview]:
    yield layout.header
    for name in layout.places:
        flat = tensors[name].detach().to("cpu").contiguous().view(-1)
        if flat.numel():
            yield from chunks(flat.view(torch.uint8).numpy().data)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], beat: Callable[[], None]) -> None:
    """Write a file and sync it to disk.

    Args:
        beat: called after every piece.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        num_unsynced = 0
        for piece in pieces:
            file.write(piece)
            num_unsynced += len(piece)
            if num_unsynced >= SYNC_BYTES:
                file.flush()
                os.fdatasync(file.fileno())
                num_unsynced = 0
            beat()
    bring_to_disk(path)
    beat()


# ---------------------------------------------------------------------------------------------------------------------
# Nested content that contains tensors


def flattened(content: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Flatten nested content into tensors by path, and the rest as file metadata.

    Args:
        content: dictionaries with string keys, lists, tensors and JSON values. A tuple comes back as a list.

    Raises:
        TypeError: the content holds anything else.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _without_tensors(content, "", tensors)
    return tensors, {_CONTENT: json.dumps(skeleton)}


def _without_tensors(content: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(content, Tensor):
        tensors[path] = content
        return {_TENSOR: path}
    if isinstance(content, dict):
        # Each dictionary is wrapped in its own level, so that none can be mistaken for a tensor name.
        return {"items": {key: _without_tensors(value, f"{path}/{key}", tensors) for key, value in content.items()}}
    if isinstance(content, list | tuple):
        return [_without_tensors(value, f"{path}/{index}", tensors) for index, value in enumerate(content)]
    return content


def read_content(path: Path) -> Any:
    """Read the content that :func:`flattened` produced; tensors are loaded from the file only on use.

    Raises:
        SafetensorError, OSError: the file cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        return _with_tensors(json.loads(file.metadata()[_CONTENT]), file)


def _with_tensors(content: Any, file: Any) -> Any:
    if isinstance(content, list):
        return [_with_tensors(value, file) for value in content]
    if not isinstance(content, dict):
        return content
    if "items" in content:
        return {key: _with_tensors(value, file) for key, value in content["items"].items()}
    return file.get_tensor(content[_TENSOR])


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, Size]]:
    """Types and shapes of existing tensors."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def chunks(memory: mmap.mmap | bytes | memoryview, chunk_bytes: int = 16 << 20) -> Iterator[memoryview]:
    """Yield the chunks of a file in memory, without copying."""
    with memoryview(memory) as view:
        for begin in range(0, len(view), chunk_bytes):
            with view[begin : begin + chunk_bytes] as piece:
                yield piece
