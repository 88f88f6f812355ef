"""An engine's side of weight sync: staging, verification, commit."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Manifest, Offer, Receipt, Transport
from rlhf_core.weight_sync.base import Beat, Incoming
from rlhf_core.weight_sync.broadcast_incoming import BroadcastIncoming
from rlhf_core.weight_sync.delta import apply_delta, row_digest
from rlhf_core.weight_sync.files import FilesIncoming
from rlhf_core.weight_sync.layout import digest_of, tensors_of
from rlhf_core.weight_sync.shared_memory import SharedMemoryIncoming


@dataclass
class StagedVersion:
    """A version in an engine's staging area, verified."""

    receipt: Receipt
    """Answer to the offer."""
    layout: Manifest
    """Manifest of the whole weights, also of a version that arrived as a delta."""
    row: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors in main memory.

        They are views of the staging area: valid until the next version is received, and not to be written to.
        """
        yield from tensors_of(self.layout, self.row).items()


def _own_memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Receiver:
    """The staging area of one engine, in its main memory: one copy of the weights, reused for every version.

    The copy stays after a commit, as the base of the next delta. It is not a base while a version is being received,
    and the engine serves from its own weights.
    """

    def __init__(self, name: str, allocate: Callable[[int], Tensor] = _own_memory) -> None:
        """Start without a version.

        Args:
            name: name of the engine, as in offers.
            allocate: returns a row of the given number of bytes; raises OSError if there is not enough memory.
        """
        self.name = name
        self._allocate = allocate
        self.version: int | None = None
        self._row: Tensor | None = None
        self._base: StagedVersion | None = None
        self._staged: StagedVersion | None = None
        self._incoming: dict[Transport, Incoming] = {}
        self._receiving = threading.Lock()
        self._newest: Offer | None = None

    def receive(self, offer: Offer, beat: Beat) -> StagedVersion:
        """Receive a version into staging; blocks until it is complete and verified.

        One transfer at a time: an earlier one that the trainer has abandoned may still write to its row. It stages
        nothing once a later one has begun.

        Raises:
            WeightSyncFailed: the transfer failed; nothing of it is kept. ``peer`` names the process that is to blame.
        """
        if offer.receiver != self.name:
            raise WeightSyncFailed(f"found an offer for {offer.receiver}, expected one for {self.name}", self.name)
        self._newest = offer
        if not self._receiving.acquire(timeout=offer.stall_timeout_s):
            raise WeightSyncFailed(f"{self.name} is still busy with an earlier transfer", self.name)
        try:
            return self._receive_exclusively(offer, beat)
        finally:
            self._receiving.release()

    def _receive_exclusively(self, offer: Offer, beat: Beat) -> StagedVersion:
        self._require_newest(offer)
        base, self._base, self._staged = self._base, None, None
        begin = time.perf_counter()
        if offer.manifest.is_delta:
            layout, row, digest = self._receive_delta(offer, base, beat)
        else:
            layout, row, digest = self._receive_whole(offer, beat)
        self._require_newest(offer)
        receipt = Receipt(version=offer.manifest.version, digest=digest, wire_s=time.perf_counter() - begin)
        self._staged = StagedVersion(receipt, layout, row)
        return self._staged

    def _require_newest(self, offer: Offer) -> None:
        if self._newest is not offer:
            text = f"{self.name} gave up version {offer.manifest.version}: a later transfer has begun"
            raise WeightSyncFailed(text, self.name)

    def commit(self, version: int) -> StagedVersion:
        """Make the staged version the active one; the caller then loads it.

        Raises:
            WeightSyncFailed: another version is staged, or none.
        """
        if self._staged is None or self._staged.receipt.version != version:
            found = "none" if self._staged is None else f"version {self._staged.receipt.version}"
            raise WeightSyncFailed(f"{self.name} has {found} staged, expected version {version}", self.name)
        self._base, self._staged, self.version = self._staged, None, version
        return self._base

    def abort(self, version: int) -> None:
        """Drop a staged version. Does nothing if it is not staged."""
        if self._staged is not None and self._staged.receipt.version == version:
            self._staged = None

    def _receive_whole(self, offer: Offer, beat: Beat) -> tuple[Manifest, Tensor, str]:
        """Layout, row and digest of the version."""
        manifest = offer.manifest
        row = self._row = self._take_row(manifest.total_bytes, beat)
        incoming = self._connected(offer)
        self._row = None  # after a failure the transport may still write to it
        digest = digest_of(manifest, incoming.fill(offer, row, beat))
        self._row = row
        return manifest, row, digest

    def _receive_delta(self, offer: Offer, base: StagedVersion | None, beat: Beat) -> tuple[Manifest, Tensor, str]:
        """Likewise, after changing the base in place: the sender relies on it only if the version is committed."""
        manifest = offer.manifest
        found = None if base is None else (base.receipt.version, base.receipt.digest)
        if base is None or found != (manifest.base_version, manifest.base_digest):
            raise WeightSyncFailed(
                f"{self.name} has {'no version' if found is None else f'version {found[0]} ({found[1]})'} as base, "
                f"but the delta of version {manifest.version} is against version {manifest.base_version} "
                f"({manifest.base_digest}); send the whole weights",
                self.name,
            )
        parts_row = torch.empty(manifest.total_bytes, dtype=torch.uint8)
        self._connected(offer).fill(offer, parts_row, beat)
        apply_delta(manifest, tensors_of(manifest, parts_row), base.layout, base.row)
        digest = row_digest(base.layout, base.row, beat)
        if digest != manifest.result_digest:
            raise WeightSyncFailed(
                f"the weights of version {manifest.version} have digest {digest} after the delta, expected "
                f"{manifest.result_digest}; send the whole weights",
                self.name,
            )
        return base.layout, base.row, digest

    def _connected(self, offer: Offer) -> Incoming:
        incoming = self._incoming.setdefault(offer.transport, _INCOMING[offer.transport]())
        incoming.connect(offer)
        return incoming

    def _take_row(self, size: int, beat: Beat) -> Tensor:
        """Memory for a version: that of the last one if the size is the same."""
        row, self._row = self._row, None
        if row is not None and len(row) == size:
            return row
        try:
            row = self._allocate(size)
        except OSError as error:
            text = f"{self.name} has no room for {size / 1e9:.3g} GB of weights: {error}"
            raise WeightSyncFailed(text, self.name) from error
        beat()
        return row


_INCOMING: dict[Transport, type[Incoming]] = {
    Transport.BROADCAST: BroadcastIncoming,
    Transport.SHARED_MEMORY: SharedMemoryIncoming,
    Transport.FILES: FilesIncoming,
}
