"""The staging area of an engine, in this process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sync_processes import beat, layout_of
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Chain, Manifest, Offer, Transport
from rlhf_core.weight_sync import broadcast_incoming, receiver
from rlhf_core.weight_sync.base import Beat
from rlhf_core.weight_sync.layout import buckets_of, checksum
from rlhf_core.weight_sync.receiver import Receiver

pytestmark = pytest.mark.training


def offer_of(transport: Transport, stall_timeout_s: float = 60.0) -> Offer:
    """Offer of version 1 to one engine."""
    return Offer(
        transport=transport,
        manifest=Manifest(version=1, tensors=layout_of({"weight": torch.zeros(64)}), bucket_bytes=64),
        receiver="engine-1",
        chains=(Chain(sender="trainer", receivers=("engine-1",)),),
        stall_timeout_s=stall_timeout_s,
    )


class Allocations:
    """Allocator of an engine that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, size: int) -> Tensor:
        self.count += 1
        return torch.zeros(size, dtype=torch.uint8)


def refuse(*_: object) -> None:
    raise WeightSyncFailed("failed to make a link with trainer", "trainer")


def test_memory_is_kept_where_no_link_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation may take longer than a sender waits for a link: the memory is then ready for the next attempt."""
    allocate = Allocations()
    engine = Receiver("engine-1", allocate)
    monkeypatch.setattr(broadcast_incoming, "_connect", refuse)
    for _ in range(2):
        with pytest.raises(WeightSyncFailed, match="failed to make a link"):
            engine.receive(offer_of(Transport.BROADCAST), beat)
    assert allocate.count == 1


def test_memory_that_a_link_may_still_write_to_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = Allocations()
    engine = Receiver("engine-1", allocate)
    monkeypatch.setattr(broadcast_incoming, "_connect", lambda *_: ())
    monkeypatch.setattr(broadcast_incoming._PlaceInChain, "fill", refuse)
    for _ in range(2):
        with pytest.raises(WeightSyncFailed):
            engine.receive(offer_of(Transport.BROADCAST), beat)
    assert allocate.count == 2


class GatedIncoming:
    """A transport whose weights are all 1 in the first transfer, which waits, and all 2 in later ones."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> "GatedIncoming":
        return self

    def connect(self, offer: Offer) -> None:
        """Nothing to do."""

    def fill(self, offer: Offer, row: Tensor, beat: Beat) -> list[bytes]:
        """Fill the row with the number of the transfer."""
        is_first = not self.has_begun.is_set()
        self.has_begun.set()
        if is_first:
            self.may_end.wait()
        row.view(torch.float32).fill_(1.0 if is_first else 2.0)
        return [checksum(bucket) for bucket in buckets_of(offer.manifest, row)]

    def close(self) -> None:
        """Do nothing: no resources are held."""


def test_a_transfer_that_ends_late_stages_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer has given it up, and may have a receipt for the same version from a later transfer."""
    way = GatedIncoming()
    monkeypatch.setitem(receiver._INCOMING, Transport.FILES, way)  # type: ignore[arg-type]  # makes itself
    engine = Receiver("engine-1")
    with ThreadPoolExecutor() as pool:
        early = pool.submit(engine.receive, offer_of(Transport.FILES), beat)
        way.has_begun.wait()
        try:
            with pytest.raises(WeightSyncFailed, match="still busy with an earlier transfer"):
                engine.receive(offer_of(Transport.FILES, stall_timeout_s=0.1), beat)
        finally:
            way.may_end.set()
        with pytest.raises(WeightSyncFailed, match="a later transfer has begun"):
            early.result()
    with pytest.raises(WeightSyncFailed, match="has none staged"):
        engine.commit(1)
    engine.receive(offer_of(Transport.FILES), beat)
    assert dict(engine.commit(1).tensors())["weight"].tolist() == [2.0] * 64
