"""Files of safetensors, laid out before their tensors are there: in memory or on the disk, filled one by one.

The library writes a file from tensors that are all there at once, and copies them on the way. A snapshot has to be one
copy and nothing else, into memory that is there already, and its bytes are those of the file. The format: 8 bytes of
length, a header in JSON, the bytes of the tensors without a gap (https://github.com/huggingface/safetensors).
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Size, Tensor

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
"""Headers end at a multiple of this: a number that has a digit more must not change the size of a file, whose memory
is used again."""
_CONTENT = "content"
_TENSOR = "tensor"

Shapes = Mapping[str, tuple[torch.dtype, Size]]
"""Type and shape of each tensor, by name."""


@dataclass(frozen=True)
class TensorLayout:
    """Places of the tensors in one file."""

    header: bytes
    places: Mapping[str, tuple[int, int]]
    """First byte and number of bytes of each tensor; in the order of the file."""
    num_bytes: int
    """Size of the file."""


def lay_out(shapes: Shapes, metadata: Mapping[str, str]) -> TensorLayout:
    """Places for tensors that are not there yet.

    Raises:
        TypeError: a tensor has a type that the format does not know.
    """
    # The widest first, so that every tensor begins at a multiple of its element's size.
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
    """A file in memory while it is filled."""

    def __init__(self, layout: TensorLayout, memory: mmap.mmap) -> None:
        """Write the header.

        Args:
            memory: at least as many bytes as the file has.
        """
        self._places = layout.places
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        memory[: len(layout.header)] = layout.header

    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to its place; one on a GPU is still on its way when this returns, if the memory is pinned."""
        begin, size = self._places[name]
        place = self._bytes[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor, non_blocking=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, tensor by tensor: no more than one is in main memory twice.

    Raises:
        OSError: it cannot be written.
    """
    layout = lay_out({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    with path.open("wb") as file:
        file.write(layout.header)
        for name in layout.places:
            flat = tensors[name].detach().to("cpu").contiguous().view(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)


# ---------------------------------------------------------------------------------------------------------------------
# Nested content with tensors in it


def flattened(content: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a nested content by path, and the rest as metadata of a file.

    Args:
        content: dictionaries with texts as keys, lists, tensors, and what JSON knows. A tuple comes back as a list.

    Raises:
        TypeError: it holds something else.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _without_tensors(content, "", tensors)
    return tensors, {_CONTENT: json.dumps(skeleton)}


def _without_tensors(content: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(content, Tensor):
        tensors[path] = content
        return {_TENSOR: path}
    if isinstance(content, dict):
        # A level of its own around every dictionary: none of them can be taken for the name of a tensor.
        return {"items": {key: _without_tensors(value, f"{path}/{key}", tensors) for key, value in content.items()}}
    if isinstance(content, list | tuple):
        return [_without_tensors(value, f"{path}/{index}", tensors) for index, value in enumerate(content)]
    return content


def read_content(path: Path) -> Any:
    """Read what :func:`flattened` gave; its tensors stay in the file until they are read.

    Raises:
        SafetensorError, OSError: it cannot be read.
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
    """Types and shapes of tensors that are there."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def chunks(memory: mmap.mmap, num_bytes: int, chunk_bytes: int = 16 << 20) -> Iterator[memoryview]:
    """Pieces of a file in memory, without a copy."""
    with memoryview(memory) as view:
        for begin in range(0, num_bytes, chunk_bytes):
            with view[begin : min(begin + chunk_bytes, num_bytes)] as piece:
                yield piece
