"""Layout of a version in one row of bytes: entries, buckets packed from tensors, and tensors as views of the row.

Every transport uses the same layout, so that the digest of a version does not depend on the transport.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import ALIGNMENT, Manifest, TensorEntry

BUCKETS = 32
"""Target number of buckets of a version, within the limits below: a chain of ``n`` engines takes longer than one engine
by the time of ``n - 1`` buckets."""
SMALLEST_BUCKET_BYTES = 2 << 20
"""Below this size, the messages around a bucket cost more than the shorter pipeline delay gains."""
LARGEST_BUCKET_BYTES = 16 << 20


class Share(NamedTuple):
    """The buckets of one sender: every ``senders``-th one, starting at ``place``.

    So shares are equal to within one bucket for any tensors, and all senders have work from the first tensors on.
    """

    place: int
    """Index of the sender, from 0."""
    senders: int
    """Number of senders."""

    def has(self, bucket: int) -> bool:
        """True if the bucket of this index belongs to the share."""
        return bucket % self.senders == self.place

    def buckets(self, manifest: Manifest) -> range:
        """Indices of its buckets; empty if there are no more buckets than senders before it."""
        return range(self.place, manifest.num_buckets, self.senders)


WHOLE = Share(0, 1)
"""All buckets, for a single sender."""


def entries_of(shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[TensorEntry, ...]:
    """Entries of tensors of these types and shapes, in their order (``gathering.weight_shapes`` of a model)."""
    return tuple(
        TensorEntry(name=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(shape))
        for name, (dtype, shape) in shapes.items()
    )


def bucket_bytes_for(tensors: Iterable[TensorEntry]) -> int:
    """Bucket size in bytes for these tensors."""
    total = sum(entry.num_bytes for entry in tensors)
    wanted = min(max(total // BUCKETS, SMALLEST_BUCKET_BYTES), LARGEST_BUCKET_BYTES)
    return -(-wanted // ALIGNMENT) * ALIGNMENT


def bytes_of(tensor: Tensor) -> Tensor:
    """Elements of a tensor as bytes ``[n]``: a view if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def packed(
    manifest: Manifest, weights: Iterable[tuple[str, Tensor]], share: Share, take: Callable[[int], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Buckets of a share, one after the other, packed from the tensors of a version.

    Args:
        weights: all of them; those of other shares are skipped.
        take: returns the memory of a bucket for its index, at least ``bucket_bytes`` long; called when it is needed.

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
            length = min(padded - done, manifest.bucket_bytes - filled)
            if share.has(index):
                bucket = take(index) if bucket is None else bucket
                part = data[done : done + length]
                bucket[filled : filled + len(part)].copy_(part)
                bucket[filled + len(part) : filled + length].zero_()
            done, filled = done + length, filled + length
            if filled == manifest.bucket_bytes:
                if bucket is not None:
                    yield index, bucket[:filled]
                index, filled, bucket = index + 1, 0, None
    if bucket is not None:
        yield index, bucket[:filled]


def matched(manifest: Manifest, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Tensors, each with its entry.

    Raises:
        WeightSyncFailed: ``weights`` are not the tensors of the manifest, in its order.
    """
    expected = iter(manifest.tensors)
    for name, tensor in weights:
        entry = next(expected, None)
        found = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if entry is None or found != (entry.name, entry.dtype, entry.shape):
            wanted = "no further tensor" if entry is None else f"{entry.name} {entry.dtype} {list(entry.shape)}"
            raise WeightSyncFailed(
                f"found {found[0]} {found[1]} {list(found[2])} among the weights of version {manifest.version}, "
                f"expected {wanted}; offer the layout of the weights to send"
            )
        yield entry, tensor
    if (entry := next(expected, None)) is not None:
        raise WeightSyncFailed(
            f"the weights of version {manifest.version} end before {entry.name}; offer the layout of the weights to "
            "send"
        )


def buckets_of(manifest: Manifest, row: Tensor) -> Iterator[Tensor]:
    """Buckets of a row of bytes, as views of it."""
    total = manifest.total_bytes
    for start in range(0, total, manifest.bucket_bytes):
        yield row[start : min(start + manifest.bucket_bytes, total)]


def merged(manifest: Manifest, shares: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Checksums of all buckets in their order, from those of each share.

    Raises:
        ValueError: the number of checksums of a share is not its number of buckets.
    """
    found = [b""] * manifest.num_buckets
    for place, checksums in enumerate(shares):
        for bucket, one in zip(Share(place, len(shares)).buckets(manifest), checksums, strict=True):
            found[bucket] = one
    return found


def tensors_of(manifest: Manifest, row: Tensor) -> dict[str, Tensor]:
    """Tensors of a row of bytes by name, as views of it."""
    found = {}
    for entry, offset in zip(manifest.tensors, manifest.offsets, strict=True):
        data = row[offset : offset + entry.num_bytes]
        found[entry.name] = data.view(getattr(torch, entry.dtype)).view(entry.shape)
    return found


def checksum(data: Tensor) -> bytes:
    """Checksum of bytes in main memory (XXH3, 128 bits: 10 GB/s per core, where SHA-256 reaches 1 GB/s).

    It detects damage by memory and networks, not forgery by an attacker.
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
