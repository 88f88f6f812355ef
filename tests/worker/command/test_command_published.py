"""Checkpoints of other programs in the run directory: links, checksums, resume, and restore."""

import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest
from process_tools import until
from program_contexts import context_of, trainer_of

from rlhf_core.errors import CheckpointCorrupt, TrainerIncomplete, WorkerError
from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command import published
from rlhf_core.worker.command.found_checkpoints import QUIET_OF_NODES_S, QUIET_S, FoundCheckpoint, WatchedCheckpoints
from rlhf_core.worker.command.launch import LaunchOrder, resume_folder
from rlhf_core.worker.command.launch_order import agree
from rlhf_core.worker.command.published import CheckpointPublisher


def save(context: WorkerContext, step: int, name: str = "checkpoint-{step}") -> FoundCheckpoint:
    """Write a checkpoint as transformers does."""
    folder = output_dir(context) / name.replace("{step}", str(step))
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors", "optimizer.pt", "rng_state_0.pth", "trainer_state.json"):
        (folder / file).write_text(f"{file} of {step}")
    return FoundCheckpoint(step, folder, complete=True)


@pytest.fixture
def context(tmp_path: Path) -> WorkerContext:
    return context_of(tmp_path)


def output_dir(context: WorkerContext) -> Path:
    return context.run_dir.root / "trainer" / "output"


def publish(context: WorkerContext, found: FoundCheckpoint) -> CheckpointDir:
    published.publish(context, trainer_of(context), output_dir(context), found)
    return context.run_dir.checkpoint(found.step)


def publish_found(context: WorkerContext) -> CheckpointDir:
    """Publish the only checkpoint that the program has left."""
    (found,) = WatchedCheckpoints(trainer_of(context), output_dir(context)).find(0.0, has_ended=True)
    return publish(context, found)


def restore(context: WorkerContext, checkpoint: CheckpointDir | None, **trainer: str) -> list[str]:
    """Restore a checkpoint; returns the names in the output folder."""
    aside = context.restart_dir.checkpoints_aside
    published.restore(checkpoint, trainer_of(context).model_copy(update=trainer), output_dir(context), aside)
    return sorted(path.name for path in output_dir(context).iterdir())


def refuse(number: int) -> Callable[..., NoReturn]:
    """A function of `os` that fails with this number."""

    def call(*arguments: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call


def test_a_checkpoint_is_linked_checked_and_outlives_its_original(context: WorkerContext) -> None:
    checkpoint = publish(context, save(context, 10))
    own = output_dir(context) / "checkpoint-10" / "model.safetensors"
    assert (checkpoint.root / "checkpoint-10" / "model.safetensors").samefile(own)
    assert sorted(path.name for path in checkpoint.model.iterdir()) == ["config.json", "model.safetensors"]
    own.unlink()
    assert checkpoint.damage() == []
    manifest = checkpoint.manifest()
    assert manifest is not None
    assert (manifest.step, manifest.loop, manifest.loop_finished) == (10, "other", False)
    assert list(context.run_dir.checkpoints_dir.glob(".*")) == []


def test_a_checkpoint_without_weights_has_no_model(context: WorkerContext) -> None:
    """As that of transformers under ZeRO-3, unless DeepSpeed gathers the weights."""
    saved = save(context, 10)
    (saved.path / "model.safetensors").unlink()
    (saved.path / "global_step10").mkdir()
    (saved.path / "global_step10" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_text("a part")
    checkpoint = publish(context, saved)
    assert (checkpoint.root / "checkpoint-10" / "config.json").exists()
    assert not checkpoint.model.exists()


def test_without_links_it_is_copied(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EXDEV))
    checkpoint = publish(context, save(context, 10))
    assert checkpoint.damage() == []


def test_a_full_disk_leaves_nothing_behind(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(context, save(context, 10))
    monkeypatch.setattr(os, "link", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        publish(context, save(context, 20))
    assert [path.name for path in context.run_dir.checkpoints_dir.iterdir()] == ["step-000010"]


def test_an_abandoned_attempt_publishes_nothing(context: WorkerContext) -> None:
    write_model(context.run_dir.attempt(2).placement, context.placement)
    with pytest.raises(WorkerError, match="newer attempt"):
        publish(context, save(context, 10))
    assert context.run_dir.saved_checkpoints() == []


def test_a_restart_resumes_from_the_newest_and_refuses_a_damaged_one(tmp_path: Path) -> None:
    context = context_of(tmp_path, restart=1)
    assert published.resume_point(context) is None
    publish(context, save(context, 10))
    newest = publish(context, save(context, 20))
    assert published.resume_point(context) == newest
    assert resume_folder(context, trainer_of(context), newest.root.name) == newest.root / "checkpoint-20"
    weights = newest.root / "checkpoint-20" / "model.safetensors"
    weights.unlink()
    weights.write_text("something else")
    with pytest.raises(CheckpointCorrupt, check=lambda error: error.checkpoint == "step-000020"):
        published.resume_point(context)
    without = dataclasses.replace(context, damaged=frozenset({"step-000020"}))
    assert published.resume_point(without) == context.run_dir.checkpoint(10)


def test_ranks_beat_while_rank_0_verifies_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Mock()
    context = dataclasses.replace(context_of(tmp_path, restart=1), reporter=reporter)
    manifest = publish(context, save(context, 10)).manifest()
    assert manifest is not None
    published.resume_point(context)
    assert reporter.beat.call_args_list == [((Phase.SETUP, 10),)] * len(manifest.files)
    reporter.reset_mock()
    waiting = dataclasses.replace(context, rank=1)
    order = LaunchOrder(address="127.0.0.1", port=1, checkpoint="step-000010")
    monkeypatch.setattr(time, "sleep", lambda _: write_model(waiting.restart_dir.launch_order, order))
    assert agree(waiting, trainer_of(waiting)) == order
    assert reporter.beat.call_args_list == [((Phase.SETUP, 0),)]


def test_an_attempt_resumes_from_the_checkpoint_in_its_placement(tmp_path: Path) -> None:
    context = context_of(tmp_path, resume="step-000010")
    with pytest.raises(CheckpointCorrupt, match="not in"):
        published.resume_point(context)
    publish(context, save(context, 10))
    publish(context, save(context, 20))
    assert published.resume_point(context) == context.run_dir.checkpoint(10)


def test_later_checkpoints_are_moved_away_before_the_program_starts(context: WorkerContext) -> None:
    """They belong to an abandoned branch or are torn, and the program would resume from them."""
    checkpoint = publish(context, save(context, 10))
    save(context, 20)
    assert restore(context, checkpoint) == ["checkpoint-10"]
    assert [path.name for path in context.restart_dir.checkpoints_aside.iterdir()] == ["checkpoint-20"]


def test_checkpoints_with_the_same_base_name_are_moved_away_side_by_side(tmp_path: Path) -> None:
    context = context_of(tmp_path, checkpoint_name="global_step_{step}/actor")
    for step in (20, 30):
        save(context, step, "global_step_{step}/actor")
    restore(context, None)
    aside = context.restart_dir.checkpoints_aside
    kept = [(aside / f"global_step_{step}" / "actor" / "config.json").read_text() for step in (20, 30)]
    assert kept == ["config.json of 20", "config.json of 30"]


def test_the_checkpoint_is_restored_for_a_program_that_finds_it_by_itself(context: WorkerContext) -> None:
    checkpoint = publish(context, save(context, 10))
    state = output_dir(context) / "checkpoint-10" / "trainer_state.json"
    state.unlink()
    restore(context, checkpoint, resume="in_place")
    assert state.read_text() == "trainer_state.json of 10"


def test_a_checkpoint_may_be_a_single_file_which_is_put_back_without_a_remainder(tmp_path: Path) -> None:
    context = context_of(tmp_path, checkpoint_name="state-{step}.pt", checkpoint_complete=[])
    output_dir(context).mkdir(parents=True)
    file = output_dir(context) / "state-10.pt"
    file.write_text("state")
    checkpoint = publish(context, FoundCheckpoint(10, file, complete=True))
    assert resume_folder(context, trainer_of(context), checkpoint.root.name) == checkpoint.root / "state-10.pt"
    assert not checkpoint.model.exists()
    assert restore(context, checkpoint, resume="in_place") == ["state-10.pt"]


@pytest.fixture
def publisher(context: WorkerContext) -> CheckpointPublisher:
    return CheckpointPublisher(context, trainer_of(context), output_dir(context), first_step=0)


def consider(publisher: CheckpointPublisher) -> None:
    publisher.consider(0.0, ended=True)
    until(lambda: not publisher.is_busy)


def test_publishing_is_retried_after_a_temporary_failure(
    context: WorkerContext, publisher: CheckpointPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(context, 40)
    with monkeypatch.context() as broken:
        broken.setattr(os, "link", refuse(errno.EIO))
        consider(publisher)
    assert "Input/output error" in publisher.problem
    with pytest.raises(OSError, match="Input/output error"):
        publisher.require_newest()
    consider(publisher)
    publisher.require_newest()
    assert (publisher.newest_step, publisher.problem, publisher.has_unpublished) == (40, "", False)


def test_a_last_checkpoint_that_is_incomplete_is_named(context: WorkerContext, publisher: CheckpointPublisher) -> None:
    save(context, 30)
    (save(context, 40).path / "trainer_state.json").unlink()
    consider(publisher)
    assert publisher.newest_step == 30
    with pytest.raises(TrainerIncomplete, match=r"checkpoint-40 is incomplete: found no file for trainer_state\.json"):
        publisher.require_newest()


def test_the_newest_is_published_first_and_those_that_would_be_removed_never(
    context: WorkerContext, publisher: CheckpointPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the newest published one falls ever further behind if reading takes longer than the time between saves."""
    begun, may_end = list[int](), threading.Event()

    def slow(context: object, trainer: object, folder: object, found: FoundCheckpoint) -> None:
        begun.append(found.step)
        assert may_end.wait(60)

    monkeypatch.setattr(published, "publish", slow)
    for step in (10, 20, 30, 40):
        save(context, step)
        publisher.consider(0.0, ended=True)
        until(lambda: begun == [10])
    save(context, 50)
    save(context, 60)
    publisher.consider(0.0, ended=True)
    may_end.set()
    until(lambda: not publisher.is_busy)
    assert (begun, publisher.newest_step) == ([10, 60, 50, 40], 60), "40 is the one before the window of [health]"


def test_files_of_several_nodes_have_to_be_unchanged_for_longer(tmp_path: Path) -> None:
    """Attributes that NFS keeps for seconds make a file that grows on another node look unchanged."""
    context = context_of(tmp_path, num_nodes=2)
    publisher = CheckpointPublisher(context, trainer_of(context), output_dir(context), first_step=0)
    save(context, 10)
    for now_s in (0.0, QUIET_S, QUIET_OF_NODES_S - 0.1):
        publisher.consider(now_s)
        assert not publisher.is_busy
    publisher.consider(QUIET_OF_NODES_S)
    until(lambda: publisher.newest_step == 10)


def test_a_step_saved_again_is_published_again(context: WorkerContext, publisher: CheckpointPublisher) -> None:
    folder = save(context, 40).path
    consider(publisher)
    time.sleep(0.01)
    (folder / "optimizer.pt").write_text("written over in place")
    assert context.run_dir.checkpoint(40).damage() != []
    consider(publisher)
    assert context.run_dir.checkpoint(40).damage() == []


def test_a_checkpoint_that_the_program_is_removing_is_not_published_again(
    context: WorkerContext, publisher: CheckpointPublisher
) -> None:
    folder = save(context, 40).path
    consider(publisher)
    (folder / "optimizer.pt").unlink()
    consider(publisher)
    checkpoint = context.run_dir.checkpoint(40)
    assert (checkpoint.root / "checkpoint-40" / "optimizer.pt").exists()
    assert checkpoint.damage() == []


def test_later_checkpoints_are_moved_to_another_file_system(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(context, 20)
    for function in ("rename", "replace"):
        monkeypatch.setattr(os, function, refuse(errno.EXDEV))
    beat = Mock()
    published.restore(None, trainer_of(context), output_dir(context), context.restart_dir.checkpoints_aside, beat)
    assert list(output_dir(context).iterdir()) == []
    assert beat.call_count == 5, "one for each file: copying takes minutes"
    moved = context.restart_dir.checkpoints_aside / "checkpoint-20" / "config.json"
    assert moved.read_text() == "config.json of 20"


@pytest.mark.parametrize(
    ("name", "tracker", "before", "after"),
    [
        ("ckpt/_actor/global_step{step}", "ckpt/_actor/latest", "global_step20", "global_step10"),
        ("ckpt/_actor/global_step{step}", "ckpt/_actor/latest", "global_step0", "global_step10"),
        ("global_step_{step}", "latest_checkpointed_iteration.txt", "20", "10"),
        ("global_step_{step}/actor", "latest_checkpointed_iteration.txt", "20\n", "10"),
        ("step-{step}", "latest", "best model: 20", "best model: 20"),
    ],
)
def test_trackers_name_the_restored_checkpoint(
    tmp_path: Path, name: str, tracker: str, before: str, after: str
) -> None:
    """DeepSpeed, Megatron and verl resume from the checkpoint that their tracker names, and fail if it is gone."""
    context = context_of(tmp_path, checkpoint_name=name)
    checkpoint = publish(context, save(context, 10, name))
    save(context, 20, name)
    (output_dir(context) / tracker).write_text(before)
    restore(context, checkpoint, resume="in_place")
    assert (output_dir(context) / tracker).read_text() == after


@pytest.mark.parametrize(("resume", "left"), [("in_place", {"last": "step-10", "all": "step-10"}), ("argument", {})])
def test_links_to_a_checkpoint_that_leaves_are_corrected(tmp_path: Path, resume: str, left: dict[str, str]) -> None:
    context = context_of(tmp_path, checkpoint_name="step-{step}")
    folder = output_dir(context)
    checkpoint = publish(context, save(context, 10, "step-{step}"))
    save(context, 20, "step-{step}")
    (folder / "last").symlink_to("step-20")
    (folder / "all").symlink_to(folder / "step-20")
    (folder / "first").symlink_to("step-10")
    restore(context, checkpoint, resume=resume)
    links = {path.name: path.readlink().name for path in folder.iterdir() if path.is_symlink()}
    assert links == {"first": "step-10", **left}


def test_without_a_checkpoint_neither_a_tracker_nor_an_empty_folder_is_left(tmp_path: Path) -> None:
    """OpenRLHF resumes if ckpt/_actor exists, and fails if it finds no checkpoint in it."""
    name = "ckpt/_actor/global_step{step}"
    context = context_of(tmp_path, checkpoint_name=name)
    save(context, 20, name)
    (output_dir(context) / "ckpt" / "_actor" / "latest").write_text("global_step20")
    assert restore(context, None) == []


def save_both(context: WorkerContext, step: int) -> None:
    """Write a checkpoint as OpenRLHF does with a critic."""
    for part in ("_actor", "_critic"):
        save(context, step, f"ckpt/{part}/global_step{{step}}")
        (output_dir(context) / "ckpt" / part / "latest").write_text(f"global_step{step}")


def test_a_critic_is_published_and_put_back_with_its_actor(tmp_path: Path) -> None:
    """OpenRLHF loads what each `latest` names: one of them alone would be of another step."""
    context = context_of(tmp_path, checkpoint_name="ckpt/_actor/global_step{step}")
    save_both(context, 10)
    checkpoint = publish_found(context)
    save_both(context, 20)
    folder = output_dir(context) / "ckpt"
    shutil.rmtree(folder / "_critic" / "global_step10")  # by the program's own rule
    restore(context, checkpoint, resume="in_place")
    left = {part: sorted(path.name for path in (folder / part).iterdir()) for part in ("_actor", "_critic")}
    assert [*left.values()] == [["global_step10", "latest"]] * 2
    assert {(folder / part / "latest").read_text() for part in left} == {"global_step10"}
    assert (folder / "_critic" / "global_step10" / "optimizer.pt").read_text() == "optimizer.pt of 10"


def test_a_critic_that_was_not_published_stays_the_newest_one(tmp_path: Path) -> None:
    """As with a checkpoint of an earlier version."""
    context = context_of(tmp_path, checkpoint_name="ckpt/_actor/global_step{step}")
    save_both(context, 10)
    checkpoint = publish_found(context)
    shutil.rmtree(checkpoint.root / "ckpt" / "_critic")
    save_both(context, 20)
    restore(context, checkpoint, resume="in_place")
    critics = output_dir(context) / "ckpt" / "_critic"
    assert sorted(path.name for path in critics.iterdir()) == ["global_step10", "latest"]
    assert (critics / "latest").read_text() == "global_step10"


def test_no_critic_is_left_without_a_checkpoint(tmp_path: Path) -> None:
    """Newer versions of OpenRLHF load a critic that they find, whether there is an actor or not."""
    context = context_of(tmp_path, checkpoint_name="ckpt/_actor/global_step{step}")
    save_both(context, 20)
    shutil.rmtree(output_dir(context) / "ckpt" / "_actor")
    assert restore(context, None) == []


def test_a_checkpoint_that_the_program_is_removing_is_not_published_in_part(context: WorkerContext) -> None:
    """It was complete when it was found, but earlier ones had to be published first."""
    folder = save(context, 40).path
    (folder / "link").symlink_to("nowhere")
    (found,) = WatchedCheckpoints(trainer_of(context), output_dir(context)).find(0.0, has_ended=True)
    checkpoint = publish(context, found)
    assert checkpoint.damage() == []
    (folder / "optimizer.pt").unlink()
    with pytest.raises(FileNotFoundError, match="5 of 6 files left"):
        publish(context, found)
    assert (checkpoint.root / "checkpoint-40" / "optimizer.pt").exists()
    assert list(context.run_dir.checkpoints_dir.glob(".*")) == []
