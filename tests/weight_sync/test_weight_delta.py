"""Sparse deltas: exact for every type, refused on another base, and small after a step of AdamW."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_processes import (
    EngineProcess,
    Faults,
    Fleet,
    beat,
    blames,
    digests,
    layout_of,
    new_sender,
    odd_weights,
    streamed,
    sync,
)
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Manifest, TensorEntry
from rlhf_core.weight_sync.delta import DeltaEncoder, apply_delta, decode_places, encode, take_over
from rlhf_core.weight_sync.files import FilesOutgoing
from rlhf_core.weight_sync.layout import WHOLE, packed, tensors_of
from rlhf_core.weight_sync.receiver import Receiver
from rlhf_core.weight_sync.sender import Transfer
from rlhf_core.weight_sync.session import synchronize

pytestmark = pytest.mark.training

POOL = ThreadPoolExecutor(2)


def changed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with some elements of some tensors changed, and all elements of others."""
    new = {name: tensor.clone() for name, tensor in weights.items()}
    new["embed"][::200, 3] += 1
    new["large"][[0, 17, 59_999]] = -7.0
    new["odd"] += 1
    new["counter"] += 1
    return new


@settings(max_examples=60)
@given(
    st.integers(1, 300_000),
    st.lists(st.integers(0, 299_999), max_size=8),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]),
)
def test_changes_are_exact_for_any_gaps(size: int, places: list[int], dtype: torch.dtype) -> None:
    old = torch.zeros(size, dtype=dtype)
    new = old.clone()
    new.view(torch.uint8).view(size, -1)[[place % size for place in places], 0] = 3
    before = old.clone()
    gaps, values = encode(take_over(new, old, POOL), new)
    assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    indices = decode_places(gaps)
    assert indices.tolist() == sorted(set(indices.tolist()))
    layout, delta = _manifest(layout_of({"x": old})), _manifest(layout_of({"x#gaps": gaps, "x#values": values}))
    row = _row(layout, [("x", before)])
    if len(gaps):
        apply_delta(delta, {"x#gaps": gaps, "x#values": values}, layout, row)
    assert torch.equal(tensors_of(layout, row)["x"].view(torch.uint8), new.view(torch.uint8))


def test_elements_are_compared_by_their_bits() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    gaps, values = encode(take_over(new, old, POOL), new)
    assert decode_places(gaps).tolist() == [0]
    assert torch.signbit(values).tolist() == [True]


def test_engines_have_the_weights_bit_by_bit_after_deltas(fleet: Fleet) -> None:
    fleet.start(2)
    sender = new_sender(delta=DeltaEncoder(full_every=50))
    weights = odd_weights(0)
    first = sync(sender, fleet.engines, 0, weights)
    loaded = digests(weights)
    for version in (1, 2):
        weights = changed(weights)
        report = sync(sender, fleet.engines, version, weights)
        loaded |= digests(weights)
        assert report.sent.is_delta
        assert report.sent.bytes_sent < first.sent.bytes_sent / 10
        assert [engine.active_weights() for engine in fleet.engines] == [(version, loaded)] * 2
    unchanged = sync(sender, fleet.engines, 3, weights)
    assert unchanged.sent.bytes_sent == 0
    assert [engine.active_weights() for engine in fleet.engines] == [(3, loaded)] * 2


def test_whole_weights_are_sent_now_and_then_and_to_engines_without_a_base(fleet: Fleet) -> None:
    fleet.start(1)
    sender = new_sender(delta=DeltaEncoder(full_every=3))
    weights = odd_weights(0)
    kinds = []
    for version in range(5):
        weights = changed(weights)
        kinds.append(sync(sender, fleet.engines, version, weights).sent.is_delta)
    assert kinds == [False, True, True, False, True]
    fleet.engines.append(EngineProcess("engine-2"))
    sender.reset()
    assert not sync(sender, fleet.engines, 5, changed(weights)).sent.is_delta


def test_an_engine_that_comes_back_is_sent_the_whole_weights(fleet: Fleet) -> None:
    """At once: a delta against its own version would be refused, and the next try comes only later."""
    engines = fleet.start(2)
    sender = new_sender(delta=DeltaEncoder(full_every=50))
    weights = odd_weights(0)
    sync(sender, fleet.engines, 0, weights)
    engines[1].restart()
    report = synchronize(sender, engines[1:], 0, layout_of(weights), streamed(weights), beat, is_alone=True)
    assert not report.sent.is_delta
    assert engines[1].active_weights() == (0, digests(weights))
    kinds = []
    for version in (1, 2):
        weights = changed(weights)
        kinds.append(sync(sender, fleet.engines, version, weights).sent.is_delta)
    assert kinds == [False, True]


def test_a_delta_on_a_stale_base_is_refused_and_the_whole_weights_follow(fleet: Fleet) -> None:
    (engine,) = fleet.start(1)
    sender = new_sender(delta=DeltaEncoder(full_every=50))
    weights = odd_weights(0)
    sync(sender, fleet.engines, 0, weights)
    sync(new_sender(), fleet.engines, 9, odd_weights(9))  # from another trainer: the base is gone
    sender.reset()
    new = changed(weights)
    with pytest.raises(WeightSyncFailed, match=r"engine-1 has version 9 .* as base, but the delta"):
        sync(sender, fleet.engines, 1, new)
    assert engine.active_weights()[0] == 9
    assert not sync(sender, fleet.engines, 1, new).sent.is_delta
    assert engine.active_weights() == (1, digests(new))


def test_without_a_base_and_a_digest_a_delta_gives_other_weights(fleet: Fleet) -> None:
    """Negative control of the test above."""
    (engine,) = fleet.start(1, {1: Faults(trusts_deltas=True)})
    sender = new_sender(delta=DeltaEncoder(full_every=50))
    weights = odd_weights(0)
    sync(sender, fleet.engines, 0, weights)
    sync(new_sender(), fleet.engines, 9, odd_weights(9))
    sender.reset()
    new = changed(weights)
    assert sync(sender, fleet.engines, 1, new).sent.is_delta
    version, found = engine.active_weights()
    assert version == 1
    assert found != digests(new)


def test_a_delta_with_another_result_is_refused_and_the_whole_weights_follow(tmp_path: Path) -> None:
    engine = Receiver("engine-1")
    sender = new_sender(FilesOutgoing("trainer", tmp_path), delta=DeltaEncoder(full_every=50))
    old, new = odd_weights(0), changed(odd_weights(0))

    def sent(version: int, weights: dict[str, Tensor]) -> Transfer:
        transfer = sender.offer(version, layout_of(weights), streamed(weights), ["engine-1"], beat)
        transfer.send(beat)
        return transfer

    transfer = sent(0, old)
    first = engine.receive(transfer.offers[0], beat)
    engine.commit(0)
    sender.settle(transfer, ["engine-1"])
    (delta,) = sent(1, new).offers
    wrong = delta.manifest.model_copy(update={"result_digest": first.receipt.digest})
    with pytest.raises(WeightSyncFailed, match="after the delta, expected"):
        engine.receive(delta.model_copy(update={"manifest": wrong}), beat)
    with pytest.raises(WeightSyncFailed, match="has none staged"):
        engine.commit(1)
    with pytest.raises(WeightSyncFailed, match="engine-1 has no version as base"):
        engine.receive(delta, beat)
    (again,) = sent(1, new).offers
    assert (delta.manifest.is_delta, again.manifest.is_delta) == (True, False)
    engine.receive(again, beat)
    assert digests(dict(engine.commit(1).tensors())) == digests(new)


def _manifest(entries: tuple[TensorEntry, ...]) -> Manifest:
    return Manifest(version=0, tensors=entries, bucket_bytes=8192)


def _row(manifest: Manifest, weights: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Row of bytes that holds these weights."""
    buckets = packed(manifest, weights, WHOLE, lambda _: torch.empty(8192, dtype=torch.uint8))
    return torch.cat([bucket for _, bucket in buckets])


def test_an_aborted_delta_leaves_the_old_version_in_force(fleet: Fleet) -> None:
    engines = fleet.start(2, {2: Faults(die_at_bucket=1)})
    encoder = DeltaEncoder(full_every=50)
    sender = new_sender(delta=encoder)
    weights = odd_weights(0)
    sync(sender, fleet.engines, 0, weights)
    new = changed(weights)
    with pytest.raises(WeightSyncFailed, check=blames("engine-2")):
        sync(sender, fleet.engines, 1, new)
    assert engines[0].active_weights() == (0, digests(weights))
    fleet.engines.pop().end()
    assert not sync(sender, fleet.engines, 1, new).sent.is_delta, "after a failure nothing counts as a base"
    assert engines[0].active_weights() == (1, digests(new))
