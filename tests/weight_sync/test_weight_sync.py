"""Versions of weights over real processes: the weights that arrive, and those that remain in force after a loss."""

import os
import signal
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from fork_server import fork_server
from sync_processes import (
    EngineProcess,
    Faults,
    Fleet,
    beat,
    blames,
    digests,
    layout_of,
    living,
    new_sender,
    odd_weights,
    streamed,
    sync,
)
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import LinkBackend, Offer
from rlhf_core.weight_sync import broadcast
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.links import CONNECT_TIMEOUT_S, GlooLink, Pending
from rlhf_core.weight_sync.session import synchronize

pytestmark = pytest.mark.training

OLD, NEW = odd_weights(0), odd_weights(1)


# ---------------------------------------------------------------------------------------------------------------------
# Arrival


def test_an_engine_in_another_place_is_linked_anew(fleet: Fleet) -> None:
    engines, sender = fleet.start(3), new_sender()
    sync(sender, engines, 0, OLD)
    sync(sender, [engines[2], engines[0]], 1, NEW)
    sync(sender, engines, 2, OLD)
    assert [engine.active_weights() for engine in engines] == [(2, digests(OLD))] * 3


# ---------------------------------------------------------------------------------------------------------------------
# Losses


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("backend", "lost", "fault"),
    [
        *((LinkBackend.NCCL, lost, Faults(die_at_bucket=5)) for lost in (1, 2, 3)),
        *((backend, 2, Faults(stop_at_bucket=5)) for backend in LinkBackend),
    ],
)
def test_an_engine_that_is_lost_in_mid_transfer_is_named(
    fleet: Fleet, backend: LinkBackend, lost: int, fault: Faults
) -> None:
    """Messages that one sends after it stood still harm nothing."""
    engines, sender = fleet.start(3, {lost: fault}), new_sender(stall_timeout_s=3.0, backend=backend)
    engines[lost - 1].answer_timeout_s = 6.0
    sync(sender, engines, 0, OLD)
    with pytest.raises(WeightSyncFailed, check=blames(f"engine-{lost}")):
        sync(sender, engines, 1, NEW)
    others = living(engines, f"engine-{lost}")
    assert [engine.active_weights() for engine in others] == [(0, digests(OLD))] * 2
    sync(sender, others, 1, NEW)
    if fault.stop_at_bucket:
        os.kill(engines[lost - 1].process.pid or 0, signal.SIGCONT)
    assert [engine.active_weights() for engine in others] == [(1, digests(NEW))] * 2


@pytest.mark.parametrize("fault", [Faults(die_after_receipt=True), Faults(die_before_commit=True)])
def test_an_engine_that_dies_after_its_receipt_is_lost_and_has_nothing_in_force(fleet: Fleet, fault: Faults) -> None:
    engines, sender = fleet.start(3, {2: fault}), new_sender()
    sync(sender, engines, 0, OLD)
    report = sync(sender, engines, 1, NEW)
    assert set(report.lost) == {"engine-2"}
    assert set(report.applied) == {"engine-1", "engine-3"}
    assert [engine.active_weights() for engine in living(engines, "engine-2")] == [(1, digests(NEW))] * 2
    engines[1].restart()
    sync(sender, engines, 2, OLD)
    assert [engine.active_weights() for engine in engines] == [(2, digests(OLD))] * 3


def test_an_engine_is_told_if_its_predecessor_has_only_the_link_between_them(fleet: Fleet) -> None:
    """It already waits for its first bucket, up to the stall timeout."""
    engines, sender = fleet.start(3, {2: Faults(fails_upstream=True)}), new_sender()
    with pytest.raises(WeightSyncFailed, match="engine-3: engine-2 gave up version 0"):
        sync(sender, engines, 0, OLD)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_engine_that_refuses_before_there_are_links_is_not_waited_for(fleet: Fleet, number: int) -> None:
    """Neither the sender nor an engine beside it waits for its link."""
    engines, sender = fleet.start(3, {number: Faults(refuses=True)}), new_sender()
    began = time.monotonic()
    with pytest.raises(WeightSyncFailed, match=f"engine-{number} has no room", check=blames(f"engine-{number}")):
        sync(sender, engines, 1, NEW)
    assert time.monotonic() - began < CONNECT_TIMEOUT_S
    others = living(engines, f"engine-{number}")
    sync(sender, others, 1, NEW)
    assert [engine.active_weights() for engine in others] == [(1, digests(NEW))] * 2


def test_a_sender_that_dies_in_mid_transfer_leaves_the_old_version_everywhere(fleet: Fleet) -> None:
    engines, sender = fleet.start(2), new_sender()
    sync(sender, engines, 0, OLD)
    context = fork_server()
    ours, theirs = context.Pipe()
    trainer = context.Process(target=_trainer_that_dies, args=(theirs,), daemon=True)
    trainer.start()
    offers = ours.recv()
    for engine, offer in zip(engines, offers, strict=True):
        engine.begin("receive", offer)
    ours.send("go")
    for engine, peer in zip(engines, ["trainer", "engine-1"], strict=True):
        with pytest.raises(WeightSyncFailed, check=blames(peer)):
            engine.finish()
    trainer.join()
    assert [engine.active_weights() for engine in engines] == [(0, digests(OLD))] * 2
    sender.reset()
    sync(sender, engines, 1, NEW)
    assert [engine.active_weights() for engine in engines] == [(1, digests(NEW))] * 2


def _trainer_that_dies(pipe: object) -> None:
    sender = new_sender(stall_timeout_s=15.0)
    send, sent = GlooLink.send, 0

    def die_at_fourth_bucket(self: GlooLink, message: Tensor, tag: int) -> Pending:
        nonlocal sent
        sent += tag == 1
        if sent == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, message, tag)

    GlooLink.send = die_at_fourth_bucket  # type: ignore[method-assign]
    transfer = sender.offer(1, layout_of(NEW), streamed(NEW), ["engine-1", "engine-2"], beat)
    pipe.send([offer.model_dump_json() for offer in transfer.offers])  # type: ignore[attr-defined]
    pipe.recv()  # type: ignore[attr-defined]
    transfer.send(beat)


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def _damage_one_bucket(monkeypatch: pytest.MonkeyPatch, tag: int, after: int) -> None:
    """Flip a bit on the wire in the sender's message number ``after`` with this tag."""
    send, sent = GlooLink.send, 0

    def damaged(self: GlooLink, message: Tensor, message_tag: int) -> Pending:
        nonlocal sent
        if message_tag == tag:
            sent += 1
            if sent == after:
                message = message.clone()
                message[5] ^= 1
        return send(self, message, message_tag)

    monkeypatch.setattr(GlooLink, "send", damaged)


def test_a_damaged_bucket_is_caught(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, sender = fleet.start(2), new_sender()
    sync(sender, engines, 0, OLD)
    _damage_one_bucket(monkeypatch, tag=1, after=4)
    with pytest.raises(WeightSyncFailed, match="bucket 3 of version 1 was damaged on the way from trainer"):
        sync(sender, engines, 1, NEW)
    assert [engine.active_weights() for engine in engines] == [(0, digests(OLD))] * 2
    sync(sender, engines, 1, NEW)
    assert [engine.active_weights() for engine in engines] == [(1, digests(NEW))] * 2


def test_without_checksums_a_damaged_bucket_comes_into_force(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    engines, sender = fleet.start(1, {1: Faults(trusts_heads=True)}), new_sender()
    _damage_one_bucket(monkeypatch, tag=1, after=4)
    sync(sender, engines, 1, NEW)
    version, found = engines[0].active_weights()
    assert version == 1
    assert found != digests(NEW)


def test_a_bucket_that_is_left_out_is_caught(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one of another version: its header names the version."""
    engines, sender = fleet.start(2), new_sender(stall_timeout_s=5.0)
    head = broadcast.head
    monkeypatch.setattr(broadcast, "head", lambda version, index, found: head(version, index + (index > 3), found))
    with pytest.raises(WeightSyncFailed, match="sent bucket 5 of version 0, expected bucket 4"):
        sync(sender, engines, 0, OLD)


def test_an_engine_that_has_staged_other_weights_stops_the_commit(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, sender = fleet.start(2), new_sender()
    sync(sender, engines, 0, OLD)
    receive = EngineProcess.receive
    monkeypatch.setattr(
        EngineProcess, "receive", lambda self, offer: receive(self, offer).model_copy(update={"digest": "other"})
    )
    with pytest.raises(WeightSyncFailed, match="engine-1 has staged version 1 with digest other"):
        sync(sender, engines, 1, NEW)
    assert [engine.active_weights() for engine in engines] == [(0, digests(OLD))] * 2


def test_an_engine_that_skipped_a_version_is_caught(fleet: Fleet) -> None:
    (engine,), sender = fleet.start(1), new_sender()
    sync(sender, [engine], 0, OLD)
    with pytest.raises(WeightSyncFailed, match="has none staged, expected version 1"):
        engine.commit(1)
    assert engine.active_weights() == (0, digests(OLD))


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: dict(reversed(weights.items())), "expected embed bfloat16"),
        (lambda weights: {name: one for name, one in weights.items() if name != "mask"}, "end before mask"),
        (lambda weights: weights | {"more": weights["odd"]}, "expected no further tensor"),
        (lambda weights: weights | {"large": weights["large"].double()}, "found large float64"),
    ],
)
@pytest.mark.parametrize("has_deltas", [False, True])
def test_weights_that_are_not_those_offered_are_refused(
    fleet: Fleet, change: object, message: str, has_deltas: bool
) -> None:
    """They are read to the end all the same: other ranks take part in gathering them."""
    engines, sender = fleet.start(1), new_sender(delta=DeltaEncoder(full_every=50) if has_deltas else None)
    weights = change(NEW)  # type: ignore[operator]
    read: list[str] = []
    with pytest.raises(WeightSyncFailed, match=message):
        synchronize(sender, engines, 1, layout_of(NEW), streamed(weights, read), beat)
    assert read == list(weights)
    assert engines[0].active_weights() == (None, {})


def test_a_version_that_cannot_be_offered_is_read_to_the_end_and_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, read = new_sender(), list[str]()
    monkeypatch.setattr(Offer, "for_all", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        sender.offer(0, layout_of(OLD), streamed(OLD, read), ["engine-1"], beat)
    assert read == list(OLD)
    assert sender._alone.is_cancelled


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("backend", LinkBackend)
def test_an_error_of_gathering_is_raised_as_it_is_and_engines_give_up(fleet: Fleet, backend: LinkBackend) -> None:
    """No message is left waiting."""
    engines, sender = fleet.start(2), new_sender(backend=backend)
    sync(sender, engines, 0, OLD)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        yield from list(NEW.items())[:4]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        synchronize(sender, engines, 1, layout_of(NEW), gathered(), beat)
    assert [engine.active_weights() for engine in engines] == [(0, digests(OLD))] * 2
    sync(sender, engines, 1, NEW)
    assert [engine.active_weights() for engine in engines] == [(1, digests(NEW))] * 2
