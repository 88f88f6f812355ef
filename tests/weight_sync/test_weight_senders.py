"""One sender, and several with a share each: the weights that arrive, and those that remain in force after a loss."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_stand_in import CpuForGpu
from sender_processes import SenderFault, Trainer
from sync_processes import EngineProcess, Faults, Fleet, beat, blames, digests, layout_of, living, odd_weights, streamed
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import LinkBackend, Manifest
from rlhf_core.weight_sync import gpu_links
from rlhf_core.weight_sync.layout import Share, checksum, digest_of, merged, packed
from rlhf_core.weight_sync.sender import Sender, Transfer, rotated
from rlhf_core.weight_sync.sender_group import sender_ranks
from rlhf_core.weight_sync.session import culprit

pytestmark = pytest.mark.training


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    """Trainers started by a test, and stopped after it."""
    started: list[Trainer] = []
    yield started
    for trainer in started:
        trainer.end()


def have(engines: Sequence[EngineProcess], version: int, seed: int) -> bool:
    """True if all engines have the odd weights with this seed in force, bit for bit."""
    return all(engine.active_weights() == (version, digests(odd_weights(seed))) for engine in engines)


# ---------------------------------------------------------------------------------------------------------------------
# Shares


@pytest.mark.parametrize(
    ("nodes", "senders", "ranks"),
    [
        (["a"], 1, [0]),
        (["a", "a", "b", "b"], 1, [0]),
        (["a", "a", "b", "b"], 2, [0, 2]),
        (["a", "a", "b", "b"], 3, [0, 2, 1]),
        (["a", "a", "b", "b"], 9, [0, 2, 1, 3]),
        (["a", "b", "a", "c"], 3, [0, 1, 3]),
        (["a", "a", "a", "b"], 4, [0, 3, 1, 2]),
    ],
)
def test_senders_are_spread_over_the_nodes(nodes: list[str], senders: int, ranks: list[int]) -> None:
    assert sender_ranks(nodes, senders) == ranks


def test_chains_begin_with_different_engines() -> None:
    assert [rotated(["a", "b", "c"], place)[0] for place in range(4)] == ["a", "b", "c", "a"]
    assert rotated(["a", "b", "c"], 2) == ["c", "a", "b"]


def shares_of(manifest: Manifest, weights: dict[str, Tensor], senders: int) -> list[dict[int, Tensor]]:
    """Buckets of each share, by their index."""

    def take(_: int) -> Tensor:
        return torch.full((manifest.bucket_bytes,), 99, dtype=torch.uint8)

    return [dict(packed(manifest, streamed(weights), Share(place, senders), take)) for place in range(senders)]


@pytest.mark.parametrize("bucket_bytes", [64, 8192, 1 << 20])
@pytest.mark.parametrize("senders", [1, 3, 5])
def test_every_bucket_belongs_to_one_share(senders: int, bucket_bytes: int) -> None:
    """Weights of every kind, in many buckets and in one, with a ragged last bucket; the digest equals that of one
    sender."""
    weights = odd_weights(3)
    manifest = manifest_of(3, bucket_bytes)
    shares = shares_of(manifest, weights, senders)
    assert [list(share) for share in shares] == [list(Share(k, senders).buckets(manifest)) for k in range(senders)]
    ((_, whole),) = enumerate(shares_of(manifest, weights, 1))
    assert sorted(index for share in shares for index in share) == list(whole)
    assert all(torch.equal(bucket, whole[index]) for share in shares for index, bucket in share.items())
    assert len(whole[manifest.num_buckets - 1]) == (manifest.total_bytes - 1) % bucket_bytes + 1
    found = merged(manifest, [[checksum(bucket) for bucket in share.values()] for share in shares])
    assert digest_of(manifest, found) == digest_of(manifest, map(checksum, whole.values()))


def test_shares_are_equal_to_within_a_bucket() -> None:
    manifest = manifest_of(3, 8192)
    sizes = [len(Share(place, 3).buckets(manifest)) for place in range(3)]
    assert max(sizes) - min(sizes) <= 1


# ---------------------------------------------------------------------------------------------------------------------
# Arrival


@pytest.mark.parametrize(
    ("senders", "bucket_bytes", "backend"),
    [
        (1, 8192, LinkBackend.GLOO),
        (3, 8192, LinkBackend.GLOO),
        (3, 1 << 20, LinkBackend.GLOO),
        (3, 8192, LinkBackend.NCCL),
    ],
)
def test_every_engine_has_the_weights_bit_by_bit(
    fleet: Fleet,
    trainers: list[Trainer],
    senders: int,
    bucket_bytes: int,
    backend: LinkBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with more senders than buckets, and from GPU to GPU; the digest equals that of one sender."""
    monkeypatch.setattr(gpu_links, "Gpu", CpuForGpu)
    trainers.append(Trainer(senders, bucket_bytes=bucket_bytes, backend=backend))
    engines = fleet.start(3)
    for version in (0, 1, 4):
        report = trainers[0].sync(engines, version, seed=version)
        assert have(engines, version, seed=version)
        assert report.sent.digest == digest_of_one_sender(version, bucket_bytes)
        assert {receipt.digest for receipt in report.receipts} == {report.sent.digest}
        assert report.sent.bytes_sent == manifest_of(version, bucket_bytes).total_bytes
        assert not report.lost


def manifest_of(seed: int, bucket_bytes: int) -> Manifest:
    return Manifest(version=seed, tensors=layout_of(odd_weights(seed)), bucket_bytes=bucket_bytes)


def digest_of_one_sender(seed: int, bucket_bytes: int) -> str:
    weights, manifest = odd_weights(seed), manifest_of(seed, bucket_bytes)
    (buckets,) = shares_of(manifest, weights, 1)
    return digest_of(manifest, map(checksum, buckets.values()))


def test_an_engine_that_comes_back_is_given_weights_by_the_first_sender_alone(
    fleet: Fleet, trainers: list[Trainer]
) -> None:
    """The other senders make new links for the next version, because the engine has none of theirs."""
    trainers.append(Trainer(2))
    engines = fleet.start(2)
    trainers[0].sync(engines, 0, seed=0)
    engines[1].restart()
    trainers[0].sync(engines[1:], 0, seed=0, is_alone=True)
    assert have(engines, 0, seed=0)
    trainers[0].sync(engines, 1, seed=1)
    assert have(engines, 1, seed=1)


def test_without_a_check_of_the_participants_the_next_version_would_be_lost(
    fleet: Fleet, trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above, with one engine: its name is the same before and after."""
    trainers.append(Trainer(2))
    engines = fleet.start(1)
    trainers[0].sync(engines, 0, seed=0)
    engines[0].restart()
    trainers[0].sender.reset()
    trainers[0].sync(engines, 0, seed=0, is_alone=True)
    sender = trainers[0].sender
    monkeypatch.setattr(sender, "_settled", (("trainer-0", "trainer-1"), ("engine-1",)))
    with pytest.raises(WeightSyncFailed, match="engine-1 has no links of this session"):
        trainers[0].sync(engines, 1, seed=1)
    trainers[0].sync(engines, 2, seed=2)
    assert have(engines, 2, seed=2)


@pytest.mark.parametrize("senders", [1, 2])
def test_an_engine_that_was_restarted_says_so_at_once(fleet: Fleet, trainers: list[Trainer], senders: int) -> None:
    trainers.append(Trainer(senders))
    engines = fleet.start(2)
    trainers[0].sync(engines, 0, seed=0)
    engines[1].restart()
    with pytest.raises(WeightSyncFailed, match="engine-2 has no links of this session", check=blames("engine-2")):
        trainers[0].sync(engines, 1, seed=1)
    trainers[0].sync(engines, 1, seed=1)
    assert have(engines, 1, seed=1)


# ---------------------------------------------------------------------------------------------------------------------
# Losses


@pytest.mark.parametrize(("senders", "dead"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3)])
def test_an_engine_that_dies_in_mid_transfer_leaves_the_old_version_everywhere(
    fleet: Fleet, trainers: list[Trainer], senders: int, dead: int
) -> None:
    trainers.append(Trainer(senders))
    engines = fleet.start(3, {dead: Faults(die_at_bucket=5 if senders == 1 else 9)})
    trainers[0].sync(engines, 0, seed=0)
    for place in range(senders):
        trainers[0].read(place)
    with pytest.raises(WeightSyncFailed, match=f"engine-{dead}", check=blames(f"engine-{dead}")):
        trainers[0].sync(engines, 1, seed=1)
    for place in range(senders):
        assert trainers[0].read(place) == list(odd_weights()), "other ranks gather too, so all read to the end"
    others = living(engines, f"engine-{dead}")
    assert have(others, 0, seed=0)
    trainers[0].sync(others, 1, seed=1)
    assert have(others, 1, seed=1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "trainer-1 failed: ZeroDivisionError: a fault of a test"),
        ("layout", "expected odd bfloat16"),
        ("damage", "damaged on the way from trainer-1"),
    ],
)
def test_a_sender_that_fails_is_named_and_sends_the_next_version(
    fleet: Fleet, trainers: list[Trainer], kind: str, message: str
) -> None:
    trainers.append(Trainer(3, {1: SenderFault(4, kind)}))
    engines = fleet.start(2)
    trainers[0].sync(engines, 0, seed=0)
    trainers[0].read(1), trainers[0].read(2)
    with pytest.raises(WeightSyncFailed, match=message, check=blames("trainer-1")):
        trainers[0].sync(engines, 1, seed=1)
    for place in (1, 2):
        assert trainers[0].read(place) == list(odd_weights()), "all have read their weights to the end"
    assert have(engines, 0, seed=0)


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_sender_that_is_lost_leaves_the_old_version_everywhere(
    fleet: Fleet, trainers: list[Trainer], kind: str
) -> None:
    """The trainer is then restarted as a whole, and continues with the same engines."""
    trainers.append(Trainer(2, {1: SenderFault(4, kind)}, timeout_s=3.0))
    engines = fleet.start(2)
    trainers[0].sync(engines, 0, seed=0)
    with pytest.raises(WeightSyncFailed, check=blames("trainer-1")):
        trainers[0].sync(engines, 1, seed=1)
    assert have(engines, 0, seed=0)
    trainers.append(Trainer(2))
    trainers[1].sync(engines, 1, seed=1)
    assert have(engines, 1, seed=1)


def test_the_first_sender_that_fails_has_the_others_give_up(fleet: Fleet, trainers: list[Trainer]) -> None:
    trainers.append(Trainer(2))
    engines = fleet.start(1)
    trainers[0].sync(engines, 0, seed=0)
    trainers[0].read(1)

    def fail() -> None:
        raise ZeroDivisionError

    weights = odd_weights(1)
    trainers[0].others[0][1].send((1, 1))
    transfer = trainers[0].sender.offer(1, layout_of(weights), streamed(weights), ["engine-1"], beat)
    engines[0].begin("receive", transfer.offers[0].model_dump_json())
    with pytest.raises(ZeroDivisionError):
        transfer.send(fail)
    with pytest.raises(WeightSyncFailed):
        engines[0].finish()
    assert trainers[0].read(1) == list(weights)
    trainers[0].sync(engines, 2, seed=2)
    assert have(engines, 2, seed=2)


@pytest.mark.parametrize(
    ("senders", "failures", "name"),
    [
        (1, {"a": "b", "b": None, "c": "b", "t0": ""}, "b"),
        (1, {"a": "b", "c": "b"}, "b"),
        (1, {"a": "t0", "b": "b", "t0": ""}, "b"),
        (1, {"a": "t0", "b": "a", "t0": ""}, "t0"),
        (1, {"a": "b", "b": "a"}, "a"),
        (2, {"a": "b", "b": None, "t0": "", "t1": "b"}, "b"),
        (2, {"a": "t0", "b": "a", "t0": "", "t1": "t1"}, "t1"),
        (2, {"a": "t1", "b": "t0", "t0": "t0", "t1": ""}, "t0"),
        (2, {"a": "t0", "b": "t1", "t0": "", "t1": "t1"}, "t1"),
        (2, {"a": "t1", "t0": ""}, "t1"),
        (2, {"a": "t0", "b": "b", "t0": "", "t1": ""}, "b"),
    ],
)
def test_a_failure_is_followed_to_the_process_it_goes_back_to(
    senders: int, failures: dict[str, str | None], name: str
) -> None:
    errors = {
        process: ConnectionError("gone") if peer is None else WeightSyncFailed("x", peer)
        for process, peer in failures.items()
    }
    assert culprit(errors, ["t0", "t1"][:senders]) == name


# ---------------------------------------------------------------------------------------------------------------------
# Negative controls


def test_an_engine_that_has_one_share_alone_has_another_digest(fleet: Fleet, trainers: list[Trainer]) -> None:
    """Its first share is intact, and it reports that it has the version; the version comes into force nowhere."""
    trainers.append(Trainer(2))
    engines = fleet.start(2, {2: Faults(keeps_first_share_only=True)})
    with pytest.raises(WeightSyncFailed, match="engine-2 has staged version 0 with digest", check=blames("engine-2")):
        trainers[0].sync(engines, 0, seed=0)
    assert [engine.active_weights() for engine in engines] == [(None, {})] * 2


def test_an_engine_that_is_offered_one_chain_alone_refuses_the_second_bucket(
    fleet: Fleet, trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = Sender.offer
    trainers.append(Trainer(2, timeout_s=3.0))
    (engine,) = fleet.start(1)

    def of_one_chain(*args: Any, **named: Any) -> Transfer:
        transfer = offer(*args, **named)
        offers = [one.model_copy(update={"chains": one.chains[:1]}) for one in transfer.offers]
        return replace(transfer, offers=offers)

    monkeypatch.setattr(Sender, "offer", of_one_chain)
    with pytest.raises(WeightSyncFailed, match="trainer-0 has sent bucket 2 of version 0, expected bucket 1"):
        trainers[0].sync([engine], 0, seed=0)
    assert engine.active_weights() == (None, {})
