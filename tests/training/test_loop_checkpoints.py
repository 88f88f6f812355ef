"""Saving and loading on one rank in this process; several ranks are in test_loop_runs.py."""

import copy
import dataclasses
import errno
import json
import math
import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from made_reports import checkpoint_manifest
from rank_launcher import flip_last_bit, make_context, tiny_spec
from small_disk import small_disk

from rlhf_core.diagnosis.health.state import HealthState, Repetition
from rlhf_core.diagnosis.retention import best_until, kept_steps
from rlhf_core.errors import CheckpointCorrupt, DiskFull, FileSystemStalled, ResumeMismatch, WorkerError
from rlhf_core.files.whole import write_model
from rlhf_core.run_dir import checkpoint as checkpoint_dir
from rlhf_core.run_dir.checkpoint import CheckpointDir, checksum
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.resources import Placement
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoints import background_save, direct_save, host_buffers
from rlhf_core.training.checkpoints import writer as checkpoints
from rlhf_core.training.checkpoints.resume import resume_point
from rlhf_core.training.checkpoints.soundness import (
    hash_of_settings,
    reference_folder,
    spec_hash,
    training_part,
    verify_checkpoint,
)
from rlhf_core.training.checkpoints.state import (
    Progress,
    kept_random_state,
    load_trainer_state,
    random_state,
    restore_random_state,
    state_file,
)
from rlhf_core.training.checkpoints.writer import CheckpointWriter
from rlhf_core.training.data.tokenizers import build_tokenizer, load_tokenizer
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.evaluation.run import checkpoint_to_evaluate
from rlhf_core.training.models import tensor_files
from rlhf_core.training.models.causal_lm import build_causal_lm, load_causal_lm

pytestmark = [pytest.mark.training]

STATE = {"engine": {"step": 4.0, "parts": {"embedding": {"start": 0, "weight": torch.ones(10)}}}}


@pytest.fixture(scope="module")
def model() -> Any:
    return build_causal_lm(tiny_spec()["model"]["config"], build_tokenizer("char", [], 0), 0)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    folder = tmp_path / "run"
    folder.mkdir()
    return RunDir(folder)


def spec_with(**sections: Any) -> RunSpec:
    return RunSpec.model_validate(tiny_spec(**sections))


def writer(run_dir: RunDir, ranks: Ranks, spec: RunSpec | None = None) -> CheckpointWriter:
    return CheckpointWriter(run_dir, spec or spec_with(), build_tokenizer("char", [], 0), ranks, lambda: None, 1)


def save_whole(saver: CheckpointWriter, *part: Any) -> CheckpointDir:
    """Save, and wait until the checkpoint is complete."""
    saved = saver.begin(*part)
    saver.finish()
    return saved


def progress(step: int, loop_finished: bool = False) -> Progress:
    return Progress(step=step, loop="grpo", loop_finished=loop_finished, position=8 * step)


@pytest.fixture
def saved(run_dir: RunDir, ranks: Ranks, model: Any) -> CheckpointDir:
    """A whole checkpoint, of step 4."""
    return save_whole(writer(run_dir, ranks), progress(4), model, STATE)


def manifest_of(checkpoint: CheckpointDir) -> CheckpointManifest:
    manifest = checkpoint.manifest()
    assert manifest is not None
    return manifest


def content(checkpoint: CheckpointDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(checkpoint.root.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def test_memory_is_unpinned_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on a GPU: the second run in a process wrote checkpoints of zeros, because its memory was where that of the
    first one had been, which still counted as pinned."""
    driver = Mock()
    driver.cuMemHostRegister_v2.return_value = 0
    monkeypatch.setattr(host_buffers, "_driver", lambda: driver)
    buffers = host_buffers.HostBuffers(None, torch.device("cuda"))
    assert buffers.reserve({"first": 4096, "second": 4096})
    view = torch.frombuffer(buffers["first"], dtype=torch.uint8)
    first, second = (call.args[0] for call in driver.cuMemHostRegister_v2.call_args_list)
    assert buffers.num_missing({"first": 4096}) == 0, "it releases the second"
    assert [call.args for call in driver.cuMemHostUnregister.call_args_list] == [(second,)]
    del buffers
    assert driver.cuMemHostUnregister.call_count == 1, "a tensor is there still"
    del view
    assert [call.args for call in driver.cuMemHostUnregister.call_args_list] == [(second,), (first,)]


def test_a_checkpoint_is_a_model_folder_and_a_state(saved: CheckpointDir, ranks: Ranks, model: Any) -> None:
    verify_checkpoint(saved, spec_with(), ranks)
    manifest = manifest_of(saved)
    assert (manifest.step, manifest.loop, manifest.loop_finished, manifest.num_ranks) == (4, "grpo", False, 1)
    listed = {saved.root / name for name in manifest.files}
    assert listed == {path for path in saved.root.rglob("*") if path.is_file()} - {saved.complete}
    loaded = load_causal_lm(saved.model, "float32")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert load_tokenizer(saved.model).encode("31>") == build_tokenizer("char", [], 0).encode("31>")
    state = load_trainer_state(saved, ranks)
    assert state.progress == progress(4)
    (share,) = state.engine
    assert torch.equal(share["parts"]["embedding"]["weight"], torch.ones(10))


def test_newest_warm_start_and_last_are_kept(run_dir: RunDir, ranks: Ranks, model: Any) -> None:
    saver = writer(run_dir, ranks, spec_with(checkpoint={"keep_last": 2}, health={"window_steps": 1}))
    kept = []
    for step in (1, 2, 3, 4, 5):
        save_whole(saver, progress(step), model, STATE)
        kept.append([checkpoint.step for checkpoint in run_dir.checkpoints()])
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]  # the warm start ends at step 2
    assert not list(run_dir.checkpoints_dir.glob(".*"))


def test_the_best_checkpoint_is_kept_and_evaluated(run_dir: RunDir, ranks: Ranks, model: Any) -> None:
    sections: dict[str, Any] = {"checkpoint": {"keep_last": 1, "keep_best": True}, "health": {"window_steps": 1}}
    saver, best = writer(run_dir, ranks, spec_with(**sections)), None
    for step, value in ((4, 0.4), (6, 0.9), (8, 0.9), (10, math.nan), (12, 0.8)):
        best = best_until(best, step, "eval/greedy", value)
        save_whole(saver, progress(step).model_copy(update={"best": best}), model, STATE)
    assert best is not None
    assert best.step == 8, "of two equal ones, the later"
    assert 8 in [checkpoint.step for checkpoint in run_dir.checkpoints()]

    def evaluated(**changes: Any) -> int:
        context = make_context(str(run_dir.root), tiny_spec(**{**sections, **changes}), 0, 1)
        return checkpoint_to_evaluate(context, ranks, run_dir.initial_model).step

    assert evaluated() == 8
    assert evaluated(checkpoint={"keep_best": False}) == 12, "control: without the setting"
    flip_last_bit(run_dir.checkpoint(8).model / "model.safetensors")
    assert evaluated() == 12, "the best one is damaged"
    shutil.rmtree(run_dir.checkpoint(8).root)
    assert evaluated() == 12
    other = best_until(best, 14, "eval/preference", 0.1)
    assert other is not None
    assert other.step == 14, "values of two metrics are not compared"


@pytest.mark.parametrize(
    ("every", "window", "keep_last"), [(1, 20, 1), (5, 20, 2), (10, 20, 2), (20, 20, 2), (7, 3, 1)]
)
def test_one_from_before_the_window_that_is_judged_is_always_there(every: int, window: int, keep_last: int) -> None:
    sections = {"sft": {"num_steps": 0}, "checkpoint": {"keep_last": keep_last}, "health": {"window_steps": window}}
    spec = RunSpec.model_validate({**tiny_spec(), **sections})
    steps: list[int] = []
    for newest in range(every, 200, every):
        steps.append(newest)
        kept = kept_steps(steps, newest, spec)
        steps = [step for step in steps if step in kept]
        assert len(steps) <= keep_last + 2
        assert steps[-keep_last:] == [*range(every, newest + 1, every)][-keep_last:]
        if newest - window >= every:
            assert any(newest - 2 * window - every < step <= newest - window for step in steps), (newest, steps)


def test_a_checkpoint_that_cannot_be_read_for_a_moment_stays(
    run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = writer(run_dir, ranks, spec_with(checkpoint={"keep_last": 3}))
    for step in (3, 4):
        save_whole(saver, progress(step), model, STATE)
    unreadable, manifest = [3], CheckpointDir.manifest

    def manifest_or_none(checkpoint: CheckpointDir) -> Any:
        if checkpoint.step in unreadable:
            unreadable.remove(checkpoint.step)
            return None
        return manifest(checkpoint)

    monkeypatch.setattr(CheckpointDir, "manifest", manifest_or_none)
    save_whole(saver, progress(5), model, STATE)
    assert unreadable == []
    assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == [3, 4, 5]


def test_going_back_replaces_a_checkpoint_of_the_same_step(run_dir: RunDir, ranks: Ranks, model: Any) -> None:
    saver = writer(run_dir, ranks)
    save_whole(saver, progress(4), model, STATE)
    save_whole(saver, progress(4, loop_finished=True), model, STATE)
    (found,) = run_dir.checkpoints()
    assert manifest_of(found).loop_finished
    verify_checkpoint(found, spec_with(), ranks)


def test_a_rank_that_wakes_up_after_a_newer_attempt_began_replaces_no_checkpoint(
    run_dir: RunDir, ranks: Ranks, model: Any
) -> None:
    """Its node was frozen between writing and publishing; the control is the test above."""
    kept = save_whole(writer(run_dir, ranks), progress(4, loop_finished=True), model, STATE)
    before = content(kept)
    spec, tokenizer = spec_with(), build_tokenizer("char", [], 0)
    woken = CheckpointWriter(run_dir, spec, tokenizer, ranks, lambda: None, 1)
    write_model(run_dir.attempt(2).placement, Placement(attempt=2, num_nodes=1, phases=()))
    with pytest.raises(WorkerError, match="a newer attempt has begun"):
        save_whole(woken, progress(4), model, STATE)
    assert content(kept) == before
    verify_checkpoint(kept, spec, ranks)


def test_what_an_interrupted_save_left_is_cleared_away(run_dir: RunDir, ranks: Ranks, model: Any) -> None:
    for name in (".step-000004.partial", ".step-000002.1234.gone", "..step-000006.partial.5678.gone"):
        (run_dir.checkpoints_dir / name / "model").mkdir(parents=True)
    (run_dir.checkpoints_dir / "step-000004").mkdir()  # without COMPLETE it does not count
    assert run_dir.checkpoints() == []
    saved = save_whole(writer(run_dir, ranks), progress(4), model, STATE)
    assert [path.name for path in run_dir.checkpoints_dir.iterdir()] == ["step-000004"]
    verify_checkpoint(saved, spec_with(), ranks)


MOMENTS: dict[bool, list[tuple[Any, str]]] = {
    False: [
        (direct_save, "write_tensors"),
        (checkpoint_dir, "checksum"),
        (checkpoint_dir, "write_model"),
        (checkpoint_dir, "remove_tree"),
    ],
    True: [
        (tensor_files.TensorImage, "fill"),
        (background_save, "checksums_of"),
        (background_save, "write_files"),
        (tensor_files, "bring_to_disk"),
        (background_save, "awaited"),
        (checkpoint_dir, "write_model"),
        (checkpoint_dir, "remove_tree"),
    ],
}
"""Moments of a save in their order: while the step waits, and in the background."""


class Killed(BaseException):
    """Like SIGKILL: nothing may catch it."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("background", "place", "name"), [(how, *moment) for how, moments in MOMENTS.items() for moment in moments]
)
def test_a_checkpoint_counts_whole_or_not_at_all(
    run_dir: RunDir,
    ranks: Ranks,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
    place: Any,
    name: str,
) -> None:
    """Killed at any point of a save, what was complete before is there as it was, and the new one does not count."""
    spec = spec_with(checkpoint={"background": background})
    first = save_whole(writer(run_dir, ranks, spec), progress(4), model, STATE)
    before = content(first)
    killed = threading.Event()

    def die(*_: object, **__: object) -> None:
        killed.set()
        raise Killed

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(place, name, die)
        writer(run_dir, ranks, spec).begin(progress(6), model, STATE)
        for thread in threading.enumerate():
            if thread.name == "checkpoint-6":
                thread.join()
    assert killed.is_set()
    assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == [4]
    assert content(first) == before
    again = save_whole(writer(run_dir, ranks, spec), progress(6), model, STATE)
    verify_checkpoint(again, spec, ranks)
    assert sorted(path.name for path in run_dir.checkpoints_dir.iterdir()) == ["step-000004", "step-000006"]


def test_a_checkpoint_in_the_background_is_the_snapshot_and_has_the_same_files(
    run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on with the weights while they are written; the control is a save that copies nothing."""
    straight = writer(run_dir, ranks, spec_with(checkpoint={"background": False}))
    expected = manifest_of(save_whole(straight, progress(4), model, STATE))
    go_on = threading.Event()
    write = background_save.write_files

    def held(*arguments: Any) -> None:
        go_on.wait()
        write(*arguments)

    monkeypatch.setattr(background_save, "write_files", held)
    saver = writer(run_dir, ranks)
    trained = copy.deepcopy(model)
    state = copy.deepcopy(STATE)
    saver.begin(progress(6), trained, state)
    assert saver.is_writing
    assert not saver.has_failed()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1.0)
        state["engine"]["parts"]["embedding"]["weight"].add_(1.0)
    go_on.set()
    saver.finish()
    saved = run_dir.checkpoint(6)
    verify_checkpoint(saved, spec_with(), ranks)
    assert manifest_of(saved).files.keys() == expected.files.keys()
    loaded = load_causal_lm(saved.model, "float32")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    (share,) = load_trainer_state(saved, ranks).engine
    assert torch.equal(share["parts"]["embedding"]["weight"], torch.ones(10))
    assert not torch.equal(next(trained.parameters()), next(loaded.parameters())), "without a copy it would be these"


def test_memory_of_a_snapshot_is_used_again(run_dir: RunDir, ranks: Ranks, model: Any) -> None:
    saver = writer(run_dir, ranks)
    save_whole(saver, progress(4), model, STATE)
    before = dict(saver._buffers._buffers)
    save_whole(saver, progress(6), model, STATE)
    assert len(before) == 2
    assert saver._buffers._buffers == before
    assert all(saver._buffers[name] is memory for name, memory in before.items())
    verify_checkpoint(run_dir.checkpoint(6), spec_with(), ranks)


def test_memory_is_used_again_with_completions_in_flight_of_another_size(
    run_dir: RunDir, ranks: Ranks, model: Any
) -> None:
    saver = writer(run_dir, ranks)
    memories: list[set[Any]] = []
    num_tokens = [50_000, 60_000, 20, 100_000, 70_000]
    for step, count in enumerate(num_tokens):
        in_flight = {"step": step, "uids": ["a"] * (count // 10), "tokens": torch.arange(count)}
        saved = save_whole(saver, progress(step), model, {**STATE, "in_flight": [in_flight]})
        verify_checkpoint(saved, spec_with(), ranks)
        (found,) = load_trainer_state(saved, ranks).in_flight
        assert torch.equal(found.pop("tokens"), in_flight.pop("tokens"))
        assert found == in_flight
        memories.append(set(saver._buffers._buffers.values()))
    assert memories[0] == memories[1] == memories[2]
    assert memories[3] == memories[4]
    assert len(memories[2] & memories[3]) == 1, "that of the weights"


@pytest.mark.parametrize(("num_ranks", "found"), [(2, [1]), (4, [1, 0])])
def test_with_as_many_ranks_each_reads_its_own_completions_in_flight(
    num_ranks: int, found: list[int], tmp_path: Path, ranks: Ranks
) -> None:
    """A node's memory has no others."""
    checkpoint = CheckpointDir(tmp_path, 4)
    checkpoint.trainer_state.mkdir()
    for rank in range(2):
        state = {"progress": progress(4).model_dump(mode="json"), "random": None, "in_flight": [{"step": rank}]}
        tensors, metadata = tensor_files.flattened(state)
        tensor_files.write_tensors(state_file(checkpoint, rank), tensors, metadata, lambda: None)
    write_model(checkpoint.complete, checkpoint_manifest(4, num_ranks=2))
    loaded = load_trainer_state(checkpoint, dataclasses.replace(ranks, rank=1, num_ranks=num_ranks))
    assert [share["step"] for share in loaded.in_flight] == found


def test_a_save_leaves_no_list_of_its_files_in_the_store(run_dir: RunDir, ranks: Ranks, model: Any) -> None:
    """The store is the agent's memory, and lists of hundreds of ranks would add up over thousands of checkpoints."""
    store = Mock(wraps=ranks.store)
    save_whole(writer(run_dir, dataclasses.replace(ranks, store=store)), progress(4), model, STATE)
    left = {call.args[0]: call.args[1] for call in store.set.call_args_list}
    for call in store.delete_key.call_args_list:
        del left[call.args[0]]
    assert 0 < sum(map(len, left.values())) < 100, left


def test_without_room_in_memory_the_step_waits_for_the_disk(
    run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_buffers, "free_memory", lambda folder: 1000)
    saver = writer(run_dir, ranks)
    saver.begin(progress(4), model, STATE)
    assert not saver.is_writing
    verify_checkpoint(run_dir.checkpoint(4), spec_with(), ranks)
    assert "1 ranks lack main memory for a snapshot" in capsys.readouterr().out


@pytest.mark.parametrize(("num_ranks", "has_room"), [(1, True), (3, False)])
def test_ranks_of_a_node_share_its_memory(
    num_ranks: int, has_room: bool, run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for two snapshots: each of three ranks alone would find that there is enough."""
    saver = writer(run_dir, ranks)
    sizes = {"model": 1000, "state": 500}
    monkeypatch.setattr(host_buffers, "free_memory", lambda folder: 3400)
    monkeypatch.setattr(saver, "_hosts", ["here", *["here"] * (num_ranks - 1), "elsewhere"])
    monkeypatch.setattr(Ranks, "gather_numbers", lambda self, own: [own] * (num_ranks + 1))
    assert saver._reserve(sizes) is has_room


def test_a_large_file_is_synced_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing shows progress while the disk takes the whole file."""
    calls: list[str] = []
    chunk = 16 << 20
    monkeypatch.setattr(tensor_files, "SYNC_BYTES", 2 * chunk)
    monkeypatch.setattr("os.fdatasync", lambda descriptor: calls.append("sync"))
    memory = mmap.mmap(-1, 5 * chunk)
    background_save.write_files(tmp_path, {"state": memory}, lambda: calls.append("advance"))
    assert calls == ["advance", "sync", "advance", "advance", "sync", "advance", "advance", "advance"]
    assert (tmp_path / "state").stat().st_size == 5 * chunk


def test_each_piece_of_a_file_is_a_sign_of_life_while_the_step_waits(
    run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow file system looks like one that hangs."""
    calls: list[str] = []
    chunk = 16 << 20
    monkeypatch.setattr(tensor_files, "SYNC_BYTES", 2 * chunk)
    monkeypatch.setattr("os.fdatasync", lambda descriptor: calls.append("sync"))
    monkeypatch.setattr(tensor_files, "bring_to_disk", lambda path: calls.append(path.name))
    spec, tokenizer = spec_with(checkpoint={"background": False}), build_tokenizer("char", [], 0)
    saver = CheckpointWriter(run_dir, spec, tokenizer, ranks, lambda: calls.append("beat"), 1)
    saver.begin(progress(4), model, {"engine": {"weight": torch.ones(3 * chunk // 4)}})
    written = calls.index("rank-00000.safetensors")
    assert calls[:written].count("beat") >= 3
    assert calls[:written].count("sync") == 1
    weights = calls.index("model.safetensors")
    assert calls[written:weights].count("beat") > len(list(model.parameters()))
    assert calls[weights:].count("beat") >= 48, "checksums"


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_reports_a_copy_in_memory_that_failed(
    run_dir: RunDir, ranks: Ranks, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = Mock(folder=None)
    memory.keep.side_effect = OSError(errno.ENOSPC, "No space left on device")
    saver = CheckpointWriter(run_dir, spec_with(), build_tokenizer("char", [], 0), ranks, lambda: None, 1, memory)
    saver._ranks = dataclasses.replace(ranks, rank=rank)
    saver._keep_in_memory(Mock(checkpoint=run_dir.checkpoint(4), progress=progress(4)), Mock(), {})
    assert "no copy of step-000004 in memory: [Errno 28] No space left on device" in capsys.readouterr().out


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an error nor a call about it stays for the next kernel."""
    driver = Mock()
    driver.cuMemHostRegister_v2.return_value = 2
    monkeypatch.setattr(host_buffers, "_driver", lambda: driver)
    buffers = host_buffers.HostBuffers(None, torch.device("cuda"))
    assert buffers.reserve({"model": 4096})
    assert buffers.num_missing({}) == 0
    assert driver.cuMemHostRegister_v2.call_count == 1
    assert not driver.cuMemHostUnregister.called


def test_a_file_system_that_takes_nothing_is_found(
    run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the step, and never by one that waits for others or is slow; a wait for it gives no sign of life."""
    stuck = threading.Event()
    monkeypatch.setattr(background_save, "write_files", lambda *_: stuck.wait())
    spec = spec_with(supervise={"checkpoint_floor_s": 0.05})
    saver = writer(run_dir, ranks, spec)
    saver.begin(progress(4), model, STATE)
    assert not saver.has_failed()
    time.sleep(0.1)
    with pytest.raises(FileSystemStalled, match=r"nothing of it was written for 0 s .*0\.05 s.* does not respond"):
        saver.has_failed()
    stuck.set()
    saver.finish()
    assert not saver.is_writing


# ---------------------------------------------------------------------------------------------------------------------
# Disks that are full


def test_no_room_is_noticed_before_anything_is_written(
    run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save_whole(writer(run_dir, ranks), progress(4), model, STATE)
    before = content(first)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))  # type: ignore[attr-defined]
    with pytest.raises(DiskFull, match=r"step 6: it needs about [12]\.\d MiB, .* has 1000 B free\. Older checkpoints"):
        save_whole(writer(run_dir, ranks), progress(6), model, STATE)
    assert content(first) == before
    assert [path.name for path in run_dir.checkpoints_dir.iterdir()] == ["step-000004"]


def test_room_is_needed_where_the_checkpoints_are(
    run_dir: RunDir, ranks: Ranks, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    run_dir.checkpoints_dir.symlink_to(tmp_path / "elsewhere")

    def usage(path: Path) -> Any:
        free = 1000 if path.resolve() == tmp_path / "elsewhere" else 10**9
        return shutil._ntuple_diskusage(10**9, 10**9 - free, free)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(DiskFull, match=r"run/checkpoints has 1000 B free"):
        save_whole(writer(run_dir, ranks), progress(4), model, STATE)


WRITERS: dict[bool, tuple[Any, str]] = {False: (direct_save, "write_tensors"), True: (background_save, "write_files")}
"""Functions that write, while the step waits and in the background."""


@pytest.mark.parametrize("background", WRITERS)
def test_a_disk_that_fills_up_while_writing_leaves_older_checkpoints(
    run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    spec = spec_with(checkpoint={"background": background})
    saver = writer(run_dir, ranks, spec)
    first = save_whole(saver, progress(4), model, STATE)
    before = content(first)

    def hidden(*_: object, **__: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 576 vs 534")  # noqa: B904 - torch reports a full disk like this

    with monkeypatch.context() as patch:
        patch.setattr(*WRITERS[background], hidden)
        with pytest.raises(DiskFull, match="became full while checkpoint 6 was written"):
            save_whole(saver, progress(6), model, STATE)
    assert content(first) == before
    assert [path.name for path in run_dir.checkpoints_dir.iterdir()] == ["step-000004"]
    verify_checkpoint(save_whole(saver, progress(6), model, STATE), spec, ranks)


@pytest.mark.parametrize("background", WRITERS)
def test_another_failure_to_write_is_not_called_a_full_disk(
    run_dir: RunDir, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(*WRITERS[background], refuse)
    saver = writer(run_dir, ranks, spec_with(checkpoint={"background": background}))
    with pytest.raises(WorkerError, match="could not be written: rank 0: PermissionError") as caught:
        save_whole(saver, progress(6), model, STATE)
    assert not isinstance(caught.value, DiskFull)


def test_a_really_full_disk(tmp_path: Path, ranks: Ranks, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SMALL_FILES_BYTES", -(1 << 40))  # the estimate lets everything pass
    with small_disk(tmp_path / "disk", "1500k") as disk:
        run_dir = RunDir(disk)
        saver = writer(run_dir, ranks, spec_with(checkpoint={"keep_last": 100}))

        def fill() -> None:
            for step in range(1, 100):
                save_whole(saver, progress(step), model, STATE)

        with pytest.raises(DiskFull, match=r"became full while checkpoint .*(No space left on device|unexpected pos)"):
            fill()
        complete = run_dir.checkpoints()
        assert len(complete) >= 2
        for checkpoint in complete:
            checkpoint.verify()
        assert not list(run_dir.checkpoints_dir.glob(".*"))


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def test_every_file_that_is_verified_is_a_sign_of_life(saved: CheckpointDir, ranks: Ranks) -> None:
    reporter = Mock(wraps=ranks.reporter)
    verify_checkpoint(saved, spec_with(), dataclasses.replace(ranks, reporter=reporter))
    assert reporter.beat.call_args_list == [((Phase.SETUP, 4),)] * len(manifest_of(saved).files)


def make_unreadable(path: Path) -> None:
    """It cannot be read, by root neither: it is no file of the checkpoint any more."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def flip_in_manifest(saved: CheckpointDir, before: str, after: str) -> None:
    text = saved.complete.read_text(encoding="utf-8")
    assert before in text
    saved.complete.write_text(text.replace(before, after), encoding="utf-8")


DAMAGE: dict[str, tuple[Callable[[CheckpointDir], Any], str]] = {
    "a byte of the weights": (lambda saved: flip_last_bit(saved.model / "model.safetensors"), "safetensors: found"),
    "a byte of the state": (
        lambda saved: flip_last_bit(saved.trainer_state / "rank-00000.safetensors", 100),
        "00000.safetensors: found",
    ),
    "a file is missing": (lambda saved: (saved.model / "config.json").unlink(), "config.json: No such file"),
    "a file is emptied": (lambda saved: os.truncate(saved.model / "config.json", 0), "config.json: found 0 bytes"),
    "a file cannot be read": (
        lambda saved: make_unreadable(saved.trainer_state / "rank-00000.safetensors"),
        "00000.safetensors: found a symbolic link, expected a regular file",
    ),
    "the manifest is truncated": (lambda saved: os.truncate(saved.complete, 50), "COMPLETE is not a valid manifest"),
    "the manifest is emptied": (lambda saved: os.truncate(saved.complete, 0), "COMPLETE is not a valid manifest (0"),
    "the manifest is gone": (lambda saved: saved.complete.unlink(), "COMPLETE is missing"),
    "the manifest cannot be read": (
        lambda saved: make_unreadable(saved.complete),
        "COMPLETE is unreadable: found a",
    ),
    "a byte of the manifest: settings": (
        lambda saved: flip_in_manifest(saved, spec_hash(spec_with())[:8], "0" * 8),
        "COMPLETE does not match the settings beside it",
    ),
    "a byte of the manifest: ranks": (
        lambda saved: flip_in_manifest(saved, '"num_ranks": 1', '"num_ranks": 3'),
        "COMPLETE lists 3 ranks but the state of 1",
    ),
    "a byte of the manifest: step": (
        lambda saved: flip_in_manifest(saved, '"step": 6', '"step": 7'),
        "COMPLETE is of step 7",
    ),
    "its folder is gone": (lambda saved: shutil.rmtree(saved.root), "which is not in"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_whatever_is_damaged_is_named_and_the_one_before_is_used(
    run_dir: RunDir, ranks: Ranks, model: Any, how: str
) -> None:
    """Both ways: the placement names it (a new attempt), and it is the newest (a restart in place)."""
    saver = writer(run_dir, ranks)
    for step in (4, 6):
        save_whole(saver, progress(step), model, STATE)
    damage, words = DAMAGE[how]
    damage(run_dir.checkpoint(6))

    def use(restart: int, damaged: frozenset[str] = frozenset()) -> int:
        context = make_context(str(run_dir.root), tiny_spec(), 0, 1, restart, resume_checkpoint="step-000006")
        found = resume_point(dataclasses.replace(context, damaged=damaged))
        assert found is not None
        verify_checkpoint(found, spec_with(), ranks)
        return found.step

    for restart in (0, 1) if run_dir.checkpoint(6).root.exists() else (0,):
        with pytest.raises(CheckpointCorrupt) as caught:
            use(restart)
        assert words in str(caught.value)
        assert caught.value.checkpoint == "step-000006"
    assert use(1, frozenset({"step-000006"})) == 4
    if run_dir.checkpoint(6).root.exists():
        run_dir.put_damaged_aside("step-000006", 1, 0)
        assert [path.name for path in run_dir.put_aside_folders()] == ["damaged-1.0"]
    assert use(2) == 4
    assert run_dir.newest_checkpoint() == run_dir.checkpoint(4), "the control plane goes on from the same one"


def test_a_checkpoint_is_read_again_before_it_is_given_up(
    saved: CheckpointDir, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EIO, "Input/output error")]

    def read(path: Path, beat: Any) -> Any:
        if failures and path.name == "model.safetensors":
            raise failures.pop()
        return checksum(path, beat)

    monkeypatch.setattr("rlhf_core.run_dir.checkpoint.checksum", read)
    verify_checkpoint(saved, spec_with(), ranks)
    assert not failures


class ThreadRanks(Ranks):
    """A rank in a thread of this process: its collectives wait for the other threads."""

    meeting: ClassVar[threading.Barrier]
    values: ClassVar[dict[int, Any]]

    def gather(self, value: Any) -> Any:
        self.values[self.rank] = json.loads(json.dumps(value))
        self.meeting.wait(10)
        found = [self.values[rank] for rank in range(self.num_ranks)]
        self.meeting.wait(10)
        return found

    def from_first(self, value: Any) -> Any:
        return self.gather(value)[0]


def verified_by(
    num_ranks: int,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    fault: tuple[int, str],
    verify: Callable[[Ranks], Any],
    num_faults: int = 1,
) -> tuple[list[tuple[int, str]], list[str]]:
    """Files read by each rank, and the error of each rank.

    Args:
        fault: a rank that cannot read a file, and the name of the file.
        num_faults: how many times it cannot.
    """
    read: list[tuple[int, str]] = []

    def count(path: Path, beat: Any) -> Any:
        rank = int(threading.current_thread().name)
        read.append((rank, path.name))
        if (rank, path.name) == fault and read.count(fault) <= num_faults:
            raise OSError(errno.EIO, "Input/output error")
        return checksum(path, beat)

    errors = [""] * num_ranks

    def run(rank: int) -> None:
        try:
            verify(ThreadRanks(rank, num_ranks, ranks.device, ranks.reporter, ranks.store))
        except (CheckpointCorrupt, OSError) as error:
            errors[rank] = str(error)

    monkeypatch.setattr("rlhf_core.run_dir.checkpoint.checksum", count)
    monkeypatch.setattr(ThreadRanks, "meeting", threading.Barrier(num_ranks), raising=False)
    monkeypatch.setattr(ThreadRanks, "values", {}, raising=False)
    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return sorted(read), errors


def test_each_file_is_verified_by_one_rank(saved: CheckpointDir, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(saved)
    names = sorted(Path(name).name for name in manifest.files)

    def verify(own: Ranks) -> None:
        verify_checkpoint(saved, spec_with(), own)

    read, errors = verified_by(3, ranks, monkeypatch, (-1, ""), verify)
    assert (sorted(name for _, name in read), errors) == (names, [""] * 3)
    (weights,) = (rank for rank, name in read if name == "model.safetensors")
    (state,) = (rank for rank, name in read if name == "rank-00000.safetensors")
    assert {rank for rank, _ in read} == {0, 1, 2}, "none is idle"
    assert weights != state, "the two largest are read at the same time"
    others, errors = verified_by(20, ranks, monkeypatch, (-1, ""), verify)  # more ranks than files
    assert (sorted(name for _, name in others), errors) == (names, [""] * 20)

    # What only one node cannot read is no damage: the first rank reads it again, and so does the one that could not.
    late = read[-1]
    again, errors = verified_by(3, ranks, monkeypatch, late, verify)
    assert ({*again} - {*read}, errors) == ({(0, late[1])}, [""] * 3)
    _, errors = verified_by(3, ranks, monkeypatch, late, verify, num_faults=2)
    assert errors[:2] == ["", ""], "a sound checkpoint is not put aside"
    assert "this node reads it wrongly and rank 0 correctly" in errors[2], "it would train on what it reads"
    flip_last_bit(saved.model / "model.safetensors")
    _, errors = verified_by(3, ranks, monkeypatch, (-1, ""), verify)
    assert len({*errors}) == 1
    assert "step-000004 is damaged: model/model.safetensors: found" in errors[0]


def test_who_reads_the_model_alone_verifies_no_optimizer(
    run_dir: RunDir, saved: CheckpointDir, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluator, and a loop that begins from another one's model: a damaged optimizer must not cost an attempt."""
    flip_last_bit(saved.trainer_state / "rank-00000.safetensors", 100)
    context = make_context(str(run_dir.root), tiny_spec(), 0, 1)

    def begin(own: Ranks) -> None:
        reference_folder(context, own, 4, run_dir.initial_model)

    read, errors = verified_by(1, ranks, monkeypatch, (-1, ""), begin)
    assert errors == [""]
    assert {name for _, name in read} == {path.name for path in saved.model.iterdir()} | {"settings.json"}
    flip_last_bit(saved.model / "model.safetensors")
    _, errors = verified_by(1, ranks, monkeypatch, (-1, ""), begin)
    assert "model.safetensors: found" in errors[0]
    assert "restore its files from a copy" in errors[0]


def test_a_restart_goes_on_after_the_checkpoint_that_the_attempt_began_from_was_removed(
    run_dir: RunDir, ranks: Ranks, model: Any
) -> None:
    saver = writer(run_dir, ranks, spec_with(sft={"num_steps": 0}, checkpoint={"keep_last": 1}))
    for step in (4, 30, 60, 90):  # more than a window of training's health apart, for which older ones are kept
        save_whole(saver, progress(step), model, STATE)
    assert 4 not in [one.step for one in run_dir.checkpoints()]
    found = resume_point(make_context(str(run_dir.root), tiny_spec(), 0, 1, 1, resume_checkpoint="step-000004"))
    assert found == run_dir.checkpoint(90)


def test_other_settings_are_named(saved: CheckpointDir, ranks: Ranks) -> None:
    changed = spec_with(seed=4, train={"learning_rate": 0.5})
    with pytest.raises(ResumeMismatch, match=r"optimizer\.learning_rate was 0\.003 and is 0\.5; seed was 3"):
        verify_checkpoint(saved, changed, ranks)


def as_of_0_1(saved: CheckpointDir) -> None:
    """Write the settings and the manifest of a checkpoint as rlhf-flows 0.1 did."""
    part = json.loads((saved.trainer_state / "settings.json").read_bytes())
    loops = part.pop("loops")
    supervised, main = loops["warm_start"], loops["main"]
    for loop in (supervised, main):
        del loop["optimizer"]["min_learning_rate_ratio"]  # which 0.1 lacked
    part["sft"] = {**supervised["optimizer"], "num_steps": supervised["num_steps"]}
    part["sft"]["batch_size"] = supervised["algorithm"]["batch_size"]
    part["grpo"] = main["algorithm"]
    part["train"] = {**main["optimizer"], "algorithm": part["grpo"].pop("name")}
    del part["reward"]["models"]
    with_settings(saved, part)
    manifest = json.loads(saved.complete.read_bytes())
    manifest["stage"], manifest["stage_finished"] = manifest.pop("loop"), manifest.pop("loop_finished")
    saved.complete.write_text(json.dumps(manifest))


def with_settings(saved: CheckpointDir, part: dict[str, Any]) -> None:
    """Write other settings into a checkpoint, as if it had been saved with them."""
    path = saved.trainer_state / "settings.json"
    path.write_text(json.dumps(part))
    manifest = json.loads(saved.complete.read_bytes())
    manifest["spec_hash"] = hash_of_settings(part)
    manifest["files"]["trainer_state/settings.json"] = checksum(path).model_dump()
    saved.complete.write_text(json.dumps(manifest))


def test_a_checkpoint_of_0_1_is_gone_on_from_under_the_same_settings_only(saved: CheckpointDir, ranks: Ranks) -> None:
    as_of_0_1(saved)
    verify_checkpoint(saved, spec_with(), ranks)
    assert spec_hash(spec_with()) not in saved.complete.read_text(), "the hash alone would refuse it"
    with pytest.raises(ResumeMismatch, match=r"loops\.main\.algorithm\.samples_per_prompt was 4 and is 8"):
        verify_checkpoint(saved, spec_with(grpo={"samples_per_prompt": 8}), ranks)


WITHOUT_ANSWERS: dict[str, Any] = {
    "data": {"answer_column": ""},
    "sft": None,
    "evaluate": {"scorer": "rank_launcher:noisy_reward"},
}


@pytest.mark.parametrize(
    "changes", [{"rollout": {"engines": 1, "nodes": 1}, "resources": {"num_nodes": 2}}, WITHOUT_ANSWERS]
)
def test_a_setting_that_came_later_has_its_default_whatever_is_not_saved(
    changes: dict[str, Any], run_dir: RunDir, ranks: Ranks, model: Any
) -> None:
    """The number of nodes is not, and neither is the scorer, of which the default needs answers."""
    spec = spec_with(**changes)
    saved = save_whole(writer(run_dir, ranks, spec), progress(4), model, STATE)
    part = training_part(spec)
    del part["reward"]["models"]
    with_settings(saved, part)
    verify_checkpoint(saved, spec, ranks)
    with pytest.raises(ResumeMismatch, match=r"settings: seed was 3 and is 4\. Resume"):
        verify_checkpoint(saved, spec_with(**changes, seed=4), ranks)


def test_another_number_of_ranks_takes_all_shares_and_forgets_what_single_ranks_did(
    run_dir: RunDir, ranks: Ranks, model: Any
) -> None:
    health = HealthState(fingerprints=(1.0, 2.0), same_ranks=Repetition(ranks=(0, 1)), num_steps=4)
    saved = save_whole(writer(run_dir, ranks), progress(4).model_copy(update={"health": health}), model, STATE)
    assert load_trainer_state(saved, ranks).progress.health == health
    manifest = manifest_of(saved)
    state = saved.trainer_state / "rank-00000.safetensors"
    files = {**manifest.files, "trainer_state/rank-00001.safetensors": checksum(state)}
    shutil.copy(state, saved.trainer_state / "rank-00001.safetensors")
    write_model(saved.complete, manifest.model_copy(update={"num_ranks": 2, "files": files}))
    verify_checkpoint(saved, spec_with(), ranks)
    found = load_trainer_state(saved, ranks)
    assert len(list(found.engine)) == 2
    assert found.random is not None
    assert found.progress.health == HealthState(num_steps=4)
    new = load_trainer_state(saved, dataclasses.replace(ranks, rank=2, num_ranks=3))
    assert new.random is None, "no such rank has drawn yet"


def test_a_loaded_state_keeps_no_file_mapped(saved: CheckpointDir, ranks: Ranks) -> None:
    """A mapped file takes its disk or memory until the process ends, even once the checkpoint is removed."""
    state = load_trainer_state(saved, ranks)
    share = next(iter(state.engine))  # an engine stops reading once it has everything
    assert str(saved.trainer_state) in Path("/proc/self/maps").read_text(), "tensors are mapped while they are used"
    del share
    assert str(saved.trainer_state) not in Path("/proc/self/maps").read_text()
    assert state.random is not None
    restore_random_state(state.random, ranks.device)


def test_a_state_file_cannot_run_code(saved: CheckpointDir, ranks: Ranks) -> None:
    """One of an earlier version, either: those were pickled."""
    state = saved.trainer_state / "rank-00000.safetensors"
    state.unlink()
    torch.save({"progress": progress(4).model_dump(), "engine": Path("x")}, state.with_suffix(".pt"))
    with pytest.raises(Exception, match="Weights only load failed"):
        load_trainer_state(saved, ranks)
    torch.save({"progress": progress(4).model_dump(), "engine": {}, "random": None}, state.with_suffix(".pt"))
    assert load_trainer_state(saved, ranks).progress == progress(4)


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"num_steps": 100}},
        {"train": {"micro_batch_size": 1, "gradient_checkpointing": True, "log_samples_every": 0}},
        {"trainer": {"zero_stage": 3, "offload": "parameters", "sequence_parallel": 2}},
        {"rollout": {"batch_size": 7}},
        {"grpo": {"measure_kl": False}},
        {"evaluate": {"num_prompts": 3}},
        {"checkpoint": {"every_num_steps": 7}},
        {"name": "other", "supervise": {"max_restarts": 9}, "resources": {"cpus_per_rank": 2}},
    ],
)
def test_what_does_not_change_training_may_change(sections: dict[str, Any]) -> None:
    base = tiny_spec()
    merged = {**base, **{k: {**base.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}
    assert spec_hash(RunSpec.model_validate(merged)) == spec_hash(spec_with())


@pytest.mark.parametrize(
    "sections",
    [
        {"seed": 9},
        {"sft": {"num_steps": 3}},
        {"sft": {"batch_size": 4}},
        {"train": {"learning_rate": 1.0}},
        {"grpo": {"samples_per_prompt": 8}},
        {"rollout": {"temperature": 0.5}},
        {"data": {"prompt_template": "Sort {prompt}"}},
        {"reward": {"functions": ["rlhf_core.training.rewards:exact_match"]}},
    ],
)
def test_what_changes_training_changes_the_hash(sections: dict[str, Any]) -> None:
    assert spec_hash(spec_with(**sections)) != spec_hash(spec_with())


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    cpu = torch.device("cpu")

    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(())),
        ]

    draw()
    np.random.randn()  # leaves a second number waiting
    tensor_files.write_tensors(tmp_path / "state", *tensor_files.flattened(random_state(cpu)), lambda: None)
    expected = draw()
    draw()
    restore_random_state(tensor_files.read_content(tmp_path / "state"), cpu)
    assert draw() == expected

    before = random_state(cpu)
    with kept_random_state(cpu):
        draw()
    again = draw()
    restore_random_state(before, cpu)
    assert draw() == again


# ---------------------------------------------------------------------------------------------------------------------
# Which checkpoint is gone on from


def test_where_a_start_goes_on_from(run_dir: RunDir, ranks: Ranks, model: Any) -> None:
    saver = writer(run_dir, ranks, spec_with(checkpoint={"keep_last": 9}))

    def point(restart: int, named: str) -> int | None:
        found = resume_point(make_context(str(run_dir.root), tiny_spec(), 0, 1, restart, resume_checkpoint=named))
        return found.step if found else None

    assert point(0, "") is None
    assert point(3, "") is None
    for step in (2, 4, 6):
        save_whole(saver, progress(step), model, STATE)
    shutil.rmtree(run_dir.checkpoint(6).root)
    assert point(0, "") is None  # the control plane says where an attempt begins
    assert point(1, "") == 4
    assert point(0, "step-000002") == 2
    assert point(1, "step-000002") == 4
    assert point(1, "step-000004") == 4
    with pytest.raises(
        CheckpointCorrupt, match=r"step-000006, which is not in .*it contains \['step-000002', 'step-00"
    ):
        point(0, "step-000006")
