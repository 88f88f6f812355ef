"""Weight files of a model folder, inspected without a library."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from rlhf_core.files.whole import read_object
from rlhf_core.text.formatting import listed

_FORMATS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""The whole weights in one file, and the index of several, in the order in which transformers looks for them."""
_LFS_POINTER = b"version "
"""First bytes of the text that Git leaves in place of a file that it has not fetched."""
_MOST_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file that the format allows."""
_SHOWN = 3


@dataclass(frozen=True)
class Weights:
    """Weights of a model folder."""

    problem: str = ""
    """Reason why they cannot be loaded; empty if none was found."""
    num_bytes: int = 0
    """Size of their files."""
    matrices: frozenset[str] = frozenset()
    """Layers with a matrix, by the last part of their names, without those of experts."""


def inspect_weights(folder: Path) -> Weights:
    """Inspect the files that transformers loads the weights from; each must be there in full."""
    files = _weight_files(folder)
    if not files:
        return Weights("it has no weights (model*.safetensors)")
    found = {file.name: _inspect(file) for file in files}
    problems = [f"{name} {one.problem}" for name, one in found.items() if one.problem]
    if problems:
        return Weights(f"{len(problems)} of its {len(files)} weight files cannot be loaded: {listed(problems, _SHOWN)}")
    matrices = frozenset[str]().union(*(one.matrices for one in found.values()))
    return Weights("", sum(one.num_bytes for one in found.values()), matrices)


def _weight_files(folder: Path) -> Sequence[Path]:
    """The files that transformers loads; the same weights may also be there in other formats."""
    for single, index in _FORMATS:
        if (folder / single).is_file():
            return [folder / single]
        names = read_object(folder / index).get("weight_map")
        if isinstance(names, dict) and names:
            return sorted({folder / Path(str(name)).name for name in names.values()})
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _inspect(file: Path) -> Weights:
    try:
        size = file.stat().st_size
    except OSError as error:
        return Weights("is missing" if isinstance(error, FileNotFoundError) else f"is not accessible: {error.strerror}")
    try:
        with file.open("rb") as content:
            start = content.read(8)
            length = int.from_bytes(start, "little")
            text = content.read(length) if length <= _MOST_HEADER_BYTES else b""
    except OSError:
        return Weights("", size)  # the nodes may read it as another user
    if start == _LFS_POINTER:
        return Weights("is a pointer of Git LFS instead of the file, which `git lfs pull` fetches")
    if file.suffix != ".safetensors":
        return Weights("", size)
    try:
        tensors = {name: entry for name, entry in from_json(text).items() if name != "__metadata__"}
        expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        matrices = frozenset(name for key, entry in tensors.items() if (name := _layer(key, entry["shape"])))
    except (ValueError, AttributeError, LookupError, TypeError):
        return Weights(f"is cut off or no safetensors file ({size} bytes)")
    return Weights("", size, matrices) if size == expected else Weights(f"has {size} of {expected} bytes")


def _layer(name: str, shape: Sequence[int]) -> str:
    """Name of the layer that a matrix belongs to, ``q_proj`` for instance; empty if it is not that of a layer.

    The experts of a layer, each with its own matrices in the file, are one tensor in transformers, not linear layers.
    """
    *layers, kind = name.split(".")
    return layers[-1] if layers and kind == "weight" and len(shape) == 2 and "experts" not in layers else ""
