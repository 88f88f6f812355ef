"""Staging area of an engine, in this process."""

import pytest
import torch
from sync_processes import beat, layout_of
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Chain, Manifest, Offer, Transport
from rlhf_core.weight_sync import broadcast_incoming
from rlhf_core.weight_sync.receiver import Receiver

pytestmark = pytest.mark.training


def offer_of(transport: Transport) -> Offer:
    """Offer of version 1 to one engine."""
    return Offer(
        transport=transport,
        manifest=Manifest(version=1, tensors=layout_of({"weight": torch.zeros(64)}), bucket_bytes=64),
        receiver="engine-1",
        chains=(Chain(sender="trainer", receivers=("engine-1",)),),
    )


class Allocations:
    """Memory of an engine, and the number of times that it was allocated."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, size: int) -> Tensor:
        self.count += 1
        return torch.zeros(size, dtype=torch.uint8)


def refuse(*_: object) -> None:
    raise WeightSyncFailed("failed to make a link with trainer", "trainer")


def test_memory_is_kept_where_no_link_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer to allocate than a sender waits for a link: the next attempt then has it."""
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
