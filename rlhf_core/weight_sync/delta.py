"""Sparse deltas: the elements that have changed since the active version, instead of the whole weights.

At the learning rates of RL, a step of AdamW moves most bf16 weights by less than half of their last bit, so that nearly
all of them stay bitwise equal. For each tensor, the smallest encoding is sent: the changed values, in the tensor's own
type, each with its 16-bit distance from the previous one; or the whole tensor; or nothing.

Elements are compared by their bits, and the engine verifies the digest of the complete result: a delta either yields
exactly the trainer's weights or is refused.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.schemas.weight_sync import Manifest, SentVersion
from rlhf_core.weight_sync.base import Beat
from rlhf_core.weight_sync.layout import (
    bucket_bytes_for,
    buckets_of,
    checksum,
    digest_of,
    entries_of,
    matched,
    tensors_of,
)

GAPS, VALUES = "#gaps", "#values"
"""Suffixes of the two parts of a sparse tensor."""

Places = NDArray[np.int64]
"""Flat indices of elements."""
_Bits = NDArray[np.integer[Any]]

CHUNK_ELEMENTS = 1 << 18
"""Number of elements that a thread compares at once: what it makes of them stays in a processor's cache."""
MOST_THREADS = 8
"""With more, main memory is the limit."""

_LARGEST_GAP = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Changes(NamedTuple):
    """Changed elements of a tensor, or of a part of it."""

    places: Places
    """Flat indices in the tensor, sorted."""
    values: _Bits


def take_over(new: Tensor, old: Tensor, pool: ThreadPoolExecutor) -> Changes:
    """Find the elements that have changed, and give them their new values in ``old``.

    Args:
        new: contiguous, of any shape.
        old: likewise, of the same type and shape.
        pool: threads among which a large tensor is divided.
    """
    now, before = _bits(new), _bits(old)

    def take(first: int) -> Changes:
        one, other = now[first : first + CHUNK_ELEMENTS], before[first : first + CHUNK_ELEMENTS]
        places = np.flatnonzero(one != other)
        values = one[places]
        other[places] = values
        return Changes(places + first, values)

    if len(now) <= CHUNK_ELEMENTS:
        return take(0)
    found = pool.map(take, range(0, len(now), CHUNK_ELEMENTS))
    return Changes(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def encode(changes: Changes, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Gaps ``[n]`` (int16, read as unsigned) and values ``[n]``, in the type of the tensor.

    A gap is the distance from the previous element, minus one. If it does not fit in 16 bits, unchanged elements in
    between are sent too.

    Args:
        whole: the tensor that has changed, contiguous.
    """
    places, values = changes
    steps = np.diff(places, prepend=-1)
    if len(steps) and steps.max() > _LARGEST_GAP:
        places = _with_fillers(steps)
        steps, values = np.diff(places, prepend=-1), _bits(whole)[places]
    gaps = (steps - 1).astype(np.uint16).view(np.int16)
    return torch.from_numpy(gaps), torch.from_numpy(values).view(whole.dtype)


def decode_places(gaps: Tensor) -> Places:
    """Flat indices ``[n]`` (int64) of the elements with these gaps."""
    places: Places = gaps.numpy().view(np.uint16).cumsum(dtype=np.int64) + np.arange(len(gaps))
    return places


def _with_fillers(steps: Places) -> Places:
    """Flat indices of elements at these distances from each other, and of the unchanged ones between distant ones."""
    fillers = (steps - 1) // _LARGEST_GAP
    filled = np.full(len(steps) + fillers.sum(), _LARGEST_GAP)
    filled[np.arange(len(steps)) + fillers.cumsum()] = steps - fillers * _LARGEST_GAP
    return filled.cumsum() - 1


@dataclass(frozen=True)
class _Base:
    """The version that is active on the engines, as the sender knows it."""

    manifest: Manifest
    digest: str
    receivers: frozenset[str]


class DeltaEncoder:
    """The sender's copy of the last version, in main memory, and the changes since."""

    def __init__(self, full_every: int) -> None:
        """Start without a copy.

        Args:
            full_every: number of versions after which the whole weights are sent again; 1 sends no deltas.
        """
        self._full_every = full_every
        self._row = torch.empty(0, dtype=torch.uint8)
        self._base: _Base | None = None
        self._layout: Manifest | None = None
        self._deltas = 0

    def encode(
        self, manifest: Manifest, weights: Iterator[tuple[str, Tensor]], receivers: Sequence[str], beat: Beat
    ) -> tuple[Manifest, Iterator[tuple[str, Tensor]]]:
        """Manifest and weights of a delta if all receivers have its base, otherwise the ones passed in.

        The whole weights are copied while they are sent; for a delta, they are iterated over here.
        """
        base, self._base, self._layout = self._base, None, manifest
        if base is None or not self._is_base_for(base, manifest, receivers):
            if len(self._row) != manifest.total_bytes:
                self._row = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
            self._deltas = 0
            return manifest, self._copied(manifest, weights)
        parts = self._changes(manifest, weights, beat)
        self._deltas += 1
        entries = entries_of({name: (part.dtype, part.shape) for name, part in parts.items()})
        delta = Manifest(
            version=manifest.version,
            tensors=entries,
            bucket_bytes=bucket_bytes_for(entries),
            base_version=base.manifest.version,
            base_digest=base.digest,
            result_digest=row_digest(manifest, self._row, beat),
        )
        return delta, iter(parts.items())

    def _is_base_for(self, base: _Base, manifest: Manifest, receivers: Sequence[str]) -> bool:
        is_like_base = base.manifest.model_copy(update={"version": manifest.version}) == manifest
        return is_like_base and base.receivers >= set(receivers) and self._deltas + 1 < self._full_every

    def _copied(self, manifest: Manifest, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        copies = tensors_of(manifest, self._row)
        for entry, tensor in matched(manifest, weights):
            copies[entry.name].copy_(tensor.detach())
            yield entry.name, copies[entry.name]

    def _changes(self, manifest: Manifest, weights: Iterator[tuple[str, Tensor]], beat: Beat) -> dict[str, Tensor]:
        """Parts of the delta by name. Afterwards the copy holds the new version."""
        copies = tensors_of(manifest, self._row)
        parts: dict[str, Tensor] = {}
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_THREADS), "delta") as pool:
            for entry, tensor in matched(manifest, weights):
                whole = copies[entry.name]
                gaps, values = encode(take_over(tensor.detach().to("cpu").contiguous(), whole, pool), whole)
                if gaps.nbytes + values.nbytes >= entry.num_bytes > 0:
                    parts[entry.name] = whole
                elif len(gaps):
                    parts |= {entry.name + GAPS: gaps, entry.name + VALUES: values}
                beat()
        return parts

    def forget(self) -> None:
        """Send the whole weights next."""
        self._base = None

    def settle(self, sent: SentVersion, engines: Collection[str]) -> None:
        """Record on which engines the last version is active: they can receive a delta against it."""
        if self._layout is not None and sent.version == self._layout.version:
            self._base = _Base(self._layout, sent.digest, frozenset(engines))


def row_digest(manifest: Manifest, row: Tensor, beat: Beat) -> str:
    """Digest of a row of bytes in main memory."""

    def checksums() -> Iterator[bytes]:
        for bucket in buckets_of(manifest, row):
            yield checksum(bucket)
            beat()

    return digest_of(manifest, checksums())


def apply_delta(delta: Manifest, parts: dict[str, Tensor], layout: Manifest, row: Tensor) -> None:
    """Change a row of bytes in place.

    Args:
        delta: manifest of the delta.
        parts: its tensors by name.
        layout: manifest of the whole weights in ``row``.
    """
    whole = tensors_of(layout, row)
    for entry in delta.tensors:
        name = entry.name.removesuffix(GAPS)
        if name.endswith(VALUES):
            continue
        target = _bits(whole[name])
        if name == entry.name:
            target[:] = _bits(parts[name])
        else:
            target[decode_places(parts[entry.name])] = _bits(parts[name + VALUES])


def _bits(tensor: Tensor) -> _Bits:
    """Elements ``[n]`` of a contiguous tensor as integers, which can be compared and indexed for every type.

    In NumPy, which finds the changed elements in half of PyTorch's time.
    """
    return tensor.view(-1).view(_INTEGERS[tensor.element_size()]).numpy()
