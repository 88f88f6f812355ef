"""Links between GPUs: without GPUs, gloo stands in for NCCL, and everything else is as it runs on GPUs."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu_stand_in import CpuForGpu
from sync_processes import Faults, Fleet, blames, digests, new_sender, odd_weights, sync
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import LinkBackend
from rlhf_core.weight_sync import gpu_links
from rlhf_core.weight_sync.broadcast import BroadcastOutgoing
from rlhf_core.weight_sync.gpu import Gpu
from rlhf_core.weight_sync.gpu_links import GpuLink
from rlhf_core.weight_sync.links import BUCKET, LinkEnd

pytestmark = pytest.mark.training

OLD, NEW = odd_weights(0), odd_weights(1)
OVER_NCCL: dict[str, Any] = {"backend": LinkBackend.NCCL}


@pytest.mark.usefixtures("stand_in")
def test_an_engine_makes_its_links_at_once(fleet: Fleet) -> None:
    """NCCL takes up to seconds for each: those of a long chain, one after the other, would exceed their time limit."""
    engines = fleet.start(3, {number: Faults(links_meet=True) for number in (1, 2)})
    sync(new_sender(**OVER_NCCL), engines, 0, OLD)
    assert [engine.active_weights() for engine in engines] == [(0, digests(OLD))] * 3


@pytest.mark.usefixtures("stand_in")
def test_a_bucket_that_stays_on_the_gpu_is_caught(fleet: Fleet) -> None:
    """Negative control: the relayed data are right, the staged data are not."""
    engines, sender = fleet.start(2, {1: Faults(leaves_on_gpu=True)}), new_sender(**OVER_NCCL)
    with pytest.raises(WeightSyncFailed, match="bucket 0 of version 0 was damaged on the way from trainer"):
        sync(sender, engines, 0, OLD)


@pytest.mark.usefixtures("stand_in")
def test_where_no_version_goes_through_others_go_over_gloo(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if the choice was left to the sender, and not once a version has gone through."""

    def refuse() -> CpuForGpu:
        raise RuntimeError("NCCL error: unhandled system error")

    engines = fleet.start(1)
    ways = [
        BroadcastOutgoing("trainer", "127.0.0.1", backend=LinkBackend.NCCL, fallback=fallback)
        for fallback in (LinkBackend.GLOO, LinkBackend.GLOO, None)
    ]
    proven, unproven, bound = (new_sender(way) for way in ways)
    sync(proven, engines, 0, OLD)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_links, "Gpu", refuse)
        for sender in (unproven, bound, proven):
            sender.reset()
            with pytest.raises(WeightSyncFailed, match="unhandled system error"):
                sync(sender, engines, 1, NEW)
    assert [way.backend for way in ways] == [LinkBackend.NCCL, LinkBackend.GLOO, LinkBackend.NCCL]
    sync(unproven, engines, 1, NEW)
    assert engines[0].active_weights() == (1, digests(NEW))


@pytest.mark.usefixtures("stand_in")
def test_a_sender_whose_gpu_is_full_sends_from_main_memory(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is there by then: the first byte found room."""

    def full(self: CpuForGpu, size: int) -> Tensor:
        if size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB.")
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(CpuForGpu, "empty", full)
    engines = fleet.start(1)
    sender = new_sender(BroadcastOutgoing("trainer", "127.0.0.1", backend=LinkBackend.NCCL, fallback=LinkBackend.GLOO))
    with pytest.raises(WeightSyncFailed, match=r"trainer has no room for 4 buckets of .* MB: CUDA out of memory"):
        sync(sender, engines, 0, OLD)
    sync(sender, engines, 0, OLD)
    assert engines[0].active_weights() == (0, digests(OLD))


# ---------------------------------------------------------------------------------------------------------------------
# One link


def linked(stall_timeout_s: float = 60.0) -> tuple[GpuLink, GpuLink]:
    """Both ends of a link: the source and the receiver."""
    store = HashStore()
    ends = [LinkEnd(is_source, "127.0.0.1", "peer", stall_timeout_s, lambda: None) for is_source in (True, False)]
    with ThreadPoolExecutor() as pool:
        source, sink = pool.map(lambda end: GpuLink(store, "link", end), ends)
    return source, sink


def row(value: int) -> Tensor:
    return torch.full((64,), value, dtype=torch.uint8)


@pytest.mark.usefixtures("stand_in")
def test_a_bucket_that_does_not_come_is_given_up_and_its_link_with_it() -> None:
    """NCCL would wait forever, and keep the memory of the bucket in use."""
    source, sink = linked(stall_timeout_s=0.2)
    first, second = sink.receive(row(0), BUCKET), sink.receive(row(0), BUCKET)
    with pytest.raises(WeightSyncFailed, match=r"peer did not send or receive for 0\.2 s"):
        first.wait()
    with pytest.raises(WeightSyncFailed, match="was given up"):
        second.wait()
    with pytest.raises(WeightSyncFailed, match="was given up"):
        sink.receive(row(0), BUCKET)
    source.close()


@pytest.mark.usefixtures("stand_in")
def test_what_an_abort_has_completed_has_not_arrived() -> None:
    """Negative control: NCCL reports a success."""
    source, sink = linked()
    bucket = row(0)
    pending = sink.receive(bucket, BUCKET)
    sink.abort()
    with pytest.raises(WeightSyncFailed, match="was given up"):
        pending.wait()
    sink.is_aborted = False
    pending.wait()
    assert torch.equal(bucket, row(0)), "nothing has arrived"
    source.close()


@pytest.mark.usefixtures("stand_in")
def test_a_link_that_is_closed_has_sent_what_was_under_way() -> None:
    source, sink = linked()
    source.send(row(5), BUCKET)
    bucket = row(0)
    pending = sink.receive(bucket, BUCKET)
    source.close()
    pending.wait()
    assert torch.equal(bucket, row(5))
    sink.close()


@pytest.mark.usefixtures("stand_in")
def test_both_ends_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuForGpu, "identity", "GPU-1")
    with pytest.raises(WeightSyncFailed, match="found GPU-1 at both ends, expected a GPU at each end"):
        linked()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_process_without_a_gpu_says_so(fleet: Fleet) -> None:
    engines, sender = fleet.start(1), new_sender(**OVER_NCCL)
    with pytest.raises(WeightSyncFailed, match="found no GPU, or torch without NCCL"):
        sync(sender, engines, 0, OLD)


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("bucket", [None, 5])
def test_over_nccl(fleet: Fleet, bucket: int | None) -> None:
    """Not run yet. The sender has the first GPU, and each engine one of the following; the last engine dies at a
    bucket."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    count = min(torch.cuda.device_count() - 1, 3)
    faults = {number: Faults(has_gpu=True) for number in range(1, count + 1)}
    engines = fleet.start(count, faults | {count: Faults(has_gpu=True, die_at_bucket=bucket)})
    sender = new_sender(stall_timeout_s=20.0, **OVER_NCCL)
    on_gpu = {name: tensor.cuda() for name, tensor in NEW.items()}
    sync(sender, engines, 0, OLD)
    if bucket is not None:
        with pytest.raises(WeightSyncFailed, check=blames(engines[-1].name)):
            sync(sender, engines, 1, on_gpu)
        engines.pop()
        assert [engine.active_weights() for engine in engines] == [(0, digests(OLD))] * len(engines)
    if engines:
        sync(sender, engines, 1, on_gpu)
    assert [engine.active_weights() for engine in engines] == [(1, digests(NEW))] * len(engines)


@pytest.mark.gpu
def test_bytes_of_a_gpu_come_to_main_memory() -> None:
    gpu = Gpu()
    with gpu.aside():
        bucket, staging = gpu.empty(1 << 20), gpu.staging(1 << 20)
        bucket.copy_(torch.arange(1 << 20) % 251)
        gpu.copy_out(bucket, staging)
    assert torch.equal(staging, (torch.arange(1 << 20) % 251).to(torch.uint8))
    assert Gpu().identity == gpu.identity
