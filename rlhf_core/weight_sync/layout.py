"""Layout of a version in one row of bytes: entries, buckets packed from tensors, and tensors as views of the row.

Every way has the same layout, so that the digest of a version is the same however it has come.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import xxhash
from torch import Tensor, nn

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import ALIGNMENT, Manifest, TensorEntry

BUCKETS = 64
"""Buckets that a version is cut into, within the limits below: a chain of ``n`` engines takes the time of ``n - 1``
buckets longer than one engine."""
SMALLEST_BUCKET_BYTES = 1 << 20
"""Below it, the messages around a bucket cost more than a shorter chain gains."""
LARGEST_BUCKET_BYTES = 32 << 20


def entries_of(
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], aliases: Mapping[str, str] | None = None
) -> tuple[TensorEntry, ...]:
    """Entries of tensors of these types and shapes, in their order (``gathering.weight_shapes`` of a model).

    Args:
        aliases: names of tied tensors, with the name in ``shapes`` that each is tied to (:func:`tied_names`).
    """
    own = [
        TensorEntry(name=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(shape))
        for name, (dtype, shape) in shapes.items()
    ]
    by_name = {entry.name: entry for entry in own}
    tied = [
        by_name[first].model_copy(update={"name": name, "alias_of": first}) for name, first in (aliases or {}).items()
    ]
    return (*own, *tied)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several, with the first name of each."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def bucket_bytes_for(tensors: Iterable[TensorEntry]) -> int:
    """Bytes of a bucket of these tensors."""
    total = sum(entry.num_bytes for entry in tensors)
    wanted = min(max(total // BUCKETS, SMALLEST_BUCKET_BYTES), LARGEST_BUCKET_BYTES)
    return -(-wanted // ALIGNMENT) * ALIGNMENT


def bytes_of(tensor: Tensor) -> Tensor:
    """Elements of a tensor as bytes ``[n]``: a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def packed(
    manifest: Manifest, weights: Iterable[tuple[str, Tensor]], take: Callable[[int], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Buckets of a version one after the other, copied together from its tensors.

    Args:
        take: gives the memory of a bucket by its index, at least ``bucket_bytes`` long; called when it is needed.

    Yields:
        Index and bytes ``[n]`` of a bucket.

    Raises:
        WeightSyncFailed: ``weights`` are not the tensors of the manifest, in its order.
    """
    index, filled = 0, 0
    bucket: Tensor | None = None
    for _, tensor in matched(manifest, weights):
        data = bytes_of(tensor)
        padded = -(-len(data) // ALIGNMENT) * ALIGNMENT
        done = 0
        while done < padded:
            bucket = take(index) if bucket is None else bucket
            part = data[done : done + manifest.bucket_bytes - filled]
            bucket[filled : filled + len(part)].copy_(part)
            length = min(padded - done, manifest.bucket_bytes - filled)
            bucket[filled + len(part) : filled + length].zero_()
            done, filled = done + length, filled + length
            if filled == manifest.bucket_bytes:
                yield index, bucket[:filled]
                index, filled, bucket = index + 1, 0, None
    if bucket is not None:
        yield index, bucket[:filled]


def matched(manifest: Manifest, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Tensors with their entries.

    Raises:
        WeightSyncFailed: ``weights`` are not the tensors of the manifest, in its order.
    """
    expected = iter([entry for entry in manifest.tensors if not entry.alias_of])
    for name, tensor in weights:
        entry = next(expected, None)
        found = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if entry is None or found != (entry.name, entry.dtype, entry.shape):
            wanted = "no further tensor" if entry is None else f"{entry.name} {entry.dtype} {list(entry.shape)}"
            raise WeightSyncFailed(
                f"found {found[0]} {found[1]} {list(found[2])} among the weights of version {manifest.version}, "
                f"expected {wanted}; offer the layout of the weights that are sent"
            )
        yield entry, tensor
    if (entry := next(expected, None)) is not None:
        raise WeightSyncFailed(
            f"the weights of version {manifest.version} end before {entry.name}; offer the layout of the weights that "
            "are sent"
        )


def buckets_of(manifest: Manifest, row: Tensor) -> Iterator[Tensor]:
    """Buckets of a row of bytes, as views of it."""
    for start in range(0, manifest.total_bytes, manifest.bucket_bytes):
        yield row[start : min(start + manifest.bucket_bytes, manifest.total_bytes)]


def tensors_of(manifest: Manifest, row: Tensor) -> dict[str, Tensor]:
    """Tensors of a row of bytes by name, as views of it; aliases left out."""
    found = {}
    for entry, offset in zip(manifest.tensors, manifest.offsets, strict=True):
        if not entry.alias_of:
            data = row[offset : offset + entry.num_bytes]
            found[entry.name] = data.view(getattr(torch, entry.dtype)).view(entry.shape)
    return found


def aliases_of(manifest: Manifest) -> dict[str, str]:
    """Names of tied tensors, with the name that each is tied to."""
    return {entry.name: entry.alias_of for entry in manifest.tensors if entry.alias_of}


def checksum(data: Tensor) -> bytes:
    """Checksum of bytes in main memory (XXH3, 128 bits: 10 GB/s of a core, where SHA-256 has 1).

    It finds what memory and networks damage, not what an attacker forges.
    """
    return xxhash.xxh3_128_digest(data.numpy().data)


def digest_of(manifest: Manifest, checksums: Iterable[bytes]) -> str:
    """Digest of a version from its layout and the checksums of its buckets."""
    digest = xxhash.xxh3_128()
    for entry in manifest.tensors:
        digest.update(entry.model_dump_json().encode())
    digest.update(str(manifest.bucket_bytes).encode())
    for one in checksums:
        digest.update(one)
    return digest.hexdigest()
