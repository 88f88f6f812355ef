"""Transports besides the broadcast: the same versions through shared memory and through files."""

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from fork_server import fork_server
from small_disk import small_disk
from sync_processes import Faults, Fleet, beat, blames, digests, layout_of, new_sender, odd_weights, streamed, sync
from torch import Tensor

from rlhf_core.errors import DiskFull, WeightSyncFailed
from rlhf_core.weight_sync import files, shared_memory
from rlhf_core.weight_sync.base import Outgoing
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.files import FilesOutgoing
from rlhf_core.weight_sync.receiver import Receiver
from rlhf_core.weight_sync.session import synchronize
from rlhf_core.weight_sync.shared_memory import SharedMemoryOutgoing

pytestmark = pytest.mark.training

OLD, NEW = odd_weights(0), odd_weights(1)

WAYS: dict[str, Callable[[Path], Outgoing]] = {
    "shared memory": lambda folder: SharedMemoryOutgoing("trainer", folder=folder),
    "files": lambda folder: FilesOutgoing("trainer", folder / "versions"),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Outgoing]:
    """Sending end of each transport."""
    outgoing = WAYS[request.param](tmp_path)
    yield outgoing
    outgoing.close()


def test_every_engine_has_the_weights_bit_by_bit(fleet: Fleet, way: Outgoing) -> None:
    fleet.start(2)
    sender = new_sender(way, delta=DeltaEncoder(full_every=2))
    for version, is_delta in ((0, False), (1, True), (4, False)):
        weights = odd_weights(seed=version)
        assert sync(sender, fleet.engines, version, weights).sent.is_delta is is_delta
        assert [engine.active_weights() for engine in fleet.engines] == [(version, digests(weights))] * 2


def test_an_engine_that_dies_leaves_the_old_version_everywhere(fleet: Fleet, way: Outgoing) -> None:
    engines = fleet.start(2, {2: Faults(die_at_bucket=1)})
    sender = new_sender(way)
    sync(sender, fleet.engines, 0, OLD)
    with pytest.raises(WeightSyncFailed, check=blames("engine-2")):
        sync(sender, fleet.engines, 1, NEW)
    assert engines[0].active_weights() == (0, digests(OLD))
    engines[1].restart()
    sync(sender, fleet.engines, 2, NEW)
    assert [engine.active_weights() for engine in engines] == [(2, digests(NEW))] * 2


def test_a_damaged_bucket_is_caught(fleet: Fleet, way: Outgoing, monkeypatch: pytest.MonkeyPatch) -> None:
    module = shared_memory if isinstance(way, SharedMemoryOutgoing) else files
    real = module.checksum
    engines, sender = fleet.start(2), new_sender(way)
    sync(sender, fleet.engines, 0, OLD)
    monkeypatch.setattr(module, "checksum", lambda data: real(data ^ 1))
    with pytest.raises(WeightSyncFailed, match="damaged"):
        sync(sender, fleet.engines, 1, NEW)
    assert [engine.active_weights() for engine in engines] == [(0, digests(OLD))] * 2


def test_weights_that_are_not_those_offered_are_given_up(fleet: Fleet, way: Outgoing) -> None:
    engines, sender = fleet.start(1), new_sender(way)
    wrong = {name: one for name, one in NEW.items() if name != "mask"}
    with pytest.raises(WeightSyncFailed, match="end before mask"):
        synchronize(sender, engines, 1, layout_of(NEW), streamed(wrong), beat)
    assert engines[0].active_weights() == (None, {})


def _trainer_that_dies(folder: Path, pipe: Connection) -> None:
    sender = new_sender(SharedMemoryOutgoing("trainer", folder=folder))
    transfer = sender.offer(1, layout_of(NEW), streamed(NEW), ["engine-1"], beat)
    pipe.send(transfer.offers[0].model_dump_json())
    transfer.send(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_trainer_that_dies_is_noticed_by_its_lock(fleet: Fleet, tmp_path: Path) -> None:
    (engine,) = fleet.start(1)
    context = fork_server()
    ours, theirs = context.Pipe()
    trainer = context.Process(target=_trainer_that_dies, args=(tmp_path, theirs), daemon=True)
    trainer.start()
    engine.begin("receive", ours.recv())
    with pytest.raises(WeightSyncFailed, match="trainer died after 1 buckets"):
        engine.finish()
    trainer.join()
    successor = new_sender(SharedMemoryOutgoing("trainer", folder=tmp_path))
    sync(successor, fleet.engines, 1, NEW)
    assert engine.active_weights() == (1, digests(NEW))
    successor.close()


def test_an_engine_follows_a_trainer_to_its_new_file_and_a_longer_version(fleet: Fleet, tmp_path: Path) -> None:
    """The mapping is kept from one version to the next; that of a deleted file must not be."""
    (engine,) = fleet.start(1)
    first = SharedMemoryOutgoing("trainer", folder=tmp_path)
    sync(new_sender(first), fleet.engines, 0, OLD)
    first.close()
    second = SharedMemoryOutgoing("trainer", folder=tmp_path)
    sender, longer = new_sender(second), NEW | {"more": torch.arange(5_000)}
    for version, weights in ((1, NEW), (2, longer)):
        sync(sender, fleet.engines, version, weights)
        assert engine.active_weights() == (version, digests(weights))
    second.close()


def test_a_version_that_memory_has_no_room_for_is_refused(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before anything is written: later, a missing page would end the trainer with SIGBUS."""
    (engine,) = fleet.start(1)
    outgoing = SharedMemoryOutgoing("trainer", folder=tmp_path)
    sender = new_sender(outgoing)

    def refuse(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(WeightSyncFailed, match=r"has no room for .* No space left on device"):
            sync(sender, fleet.engines, 0, OLD)
    sync(sender, fleet.engines, 1, NEW)
    assert engine.active_weights() == (1, digests(NEW))
    outgoing.close()


def test_an_engine_does_not_enlarge_the_file_of_the_trainer(fleet: Fleet, tmp_path: Path) -> None:
    (engine,) = fleet.start(1)
    outgoing = SharedMemoryOutgoing("trainer", folder=tmp_path)
    (offer,) = new_sender(outgoing).offer(1, layout_of(NEW), streamed(NEW), ["engine-1"], beat).offers
    os.truncate(offer.path, 64)
    engine.begin("receive", offer.model_dump_json())
    with pytest.raises(WeightSyncFailed, match="is shorter than its version"):
        engine.finish()
    assert Path(offer.path).stat().st_size == 64
    outgoing.close()


def test_two_trainers_of_one_name_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    first = SharedMemoryOutgoing("trainer", folder=tmp_path)
    context = fork_server()
    ours, theirs = context.Pipe()
    second = context.Process(target=_second_trainer, args=(tmp_path, theirs), daemon=True)
    second.start()
    assert "another process sends weights as trainer" in ours.recv()
    second.join()
    first.close()


def _second_trainer(folder: Path, pipe: Connection) -> None:
    try:
        SharedMemoryOutgoing("trainer", folder=folder)
    except WeightSyncFailed as error:
        pipe.send(str(error))


def test_a_version_without_complete_is_not_read(fleet: Fleet, tmp_path: Path) -> None:
    """``COMPLETE`` is the last file: without it a version may be incomplete."""
    (engine,) = fleet.start(1)
    sender = new_sender(FilesOutgoing("trainer", tmp_path, stall_timeout_s=1.0))
    transfer = sender.offer(1, layout_of(NEW), streamed(NEW), ["engine-1"], beat)
    transfer.send(beat)
    (offer,) = transfer.offers
    (Path(offer.path) / files.COMPLETE).unlink()
    engine.begin("receive", offer.model_dump_json())
    with pytest.raises(WeightSyncFailed, match="wrote nothing"):
        engine.finish()


def test_a_file_that_is_too_short_is_damaged(tmp_path: Path) -> None:
    sender, engine = new_sender(FilesOutgoing("trainer", tmp_path)), Receiver("engine-1")
    transfer = sender.offer(1, layout_of(NEW), streamed(NEW), ["engine-1"], beat)
    transfer.send(beat)
    (offer,) = transfer.offers
    file = Path(offer.path) / files.WEIGHTS
    whole = file.read_bytes()
    os.truncate(file, len(whole) - 100_000)
    with pytest.raises(WeightSyncFailed, match=r"version 1 in .* is damaged"):
        engine.receive(offer, beat)
    row = torch.frombuffer(bytearray(whole), dtype=torch.uint8)  # memory that happens to have what is missing
    with pytest.raises(WeightSyncFailed, match=r"version 1 in .* is damaged"):
        files.FilesIncoming().fill(offer, row, beat)
    file.write_bytes(whole)  # the control
    assert digests(dict(engine.receive(offer, beat).tensors())) == digests(NEW)


def test_a_folder_that_is_gone_fails_the_sync_alone(tmp_path: Path) -> None:
    """Not even the mark that the version is abandoned can be written; the error is the one before that."""
    sender = new_sender(FilesOutgoing("trainer", tmp_path))

    def lost() -> Iterator[tuple[str, Tensor]]:
        yield from streamed(OLD)
        shutil.rmtree(tmp_path / "00000001")

    transfer = sender.offer(1, layout_of(OLD), lost(), ["engine-1"], beat)
    with pytest.raises(WeightSyncFailed, match=r"00000001 cannot be written: .*No such file", check=blames("trainer")):
        transfer.send(beat)


def test_a_full_disk_is_named_as_such_and_the_old_version_stays_active(fleet: Fleet, tmp_path: Path) -> None:
    """Unlike other failures of a sync, it ends the run: the disk remains full."""
    (engine,) = fleet.start(1)
    sync(new_sender(FilesOutgoing("trainer", tmp_path / "versions")), fleet.engines, 0, OLD)
    with small_disk(tmp_path / "small", "64k") as disk:
        sender = new_sender(FilesOutgoing("trainer", disk / "versions"))
        with pytest.raises(DiskFull, match=r"00000001 cannot be written: .*No space left on device"):
            sync(sender, fleet.engines, 1, NEW)
    assert engine.active_weights() == (0, digests(OLD))


def test_a_folder_that_cannot_be_made_fails_the_sync_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps files that a process has open, so the folder of an earlier attempt stays in place."""
    sender = new_sender(FilesOutgoing("trainer", tmp_path))
    (tmp_path / "00000001").mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(WeightSyncFailed, match=r"cannot be made: .*File exists", check=blames("trainer")):
        sender.offer(1, layout_of(NEW), streamed(NEW), ["engine-1"], beat)
