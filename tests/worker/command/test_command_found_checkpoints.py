"""Checkpoints of another program: names, files, and completeness."""

import time
from pathlib import Path
from typing import Any

import pytest
from watched_programs import append, make_old, trainer

from rlhf_core.worker.command import found_checkpoints
from rlhf_core.worker.command.found_checkpoints import QUIET_S, REREAD_S, FoundCheckpoint, WatchedCheckpoints


def after_end(output_dir: Path, **settings: Any) -> list[FoundCheckpoint]:
    """The checkpoints of a program that has ended."""
    return WatchedCheckpoints(trainer(**settings), output_dir).find(0.0, has_ended=True)


def save(folder: Path, *names: str) -> Path:
    for name in names or ("model.safetensors", "rng_state_1.pth", "trainer_state.json"):
        append(folder / name, "x")
    return folder


@pytest.mark.parametrize(
    ("name", "folder", "step"),
    [
        ("checkpoint-{step}", "checkpoint-12", 12),
        ("checkpoint-{step}", "v1-20261122-172526/checkpoint-12", 12),
        ("checkpoint-{step}", "tmp-checkpoint-12", None),
        ("checkpoint-{step}", "checkpoint-12-merged", None),
        ("checkpoint-{step}", "checkpoint-last", None),
        ("checkpoint-{step}", "checkpoint-20261122170333", None),
        ("checkpoint-{step}", "other/checkpoint-12", None),
        ("actor/global_step{step}", "actor/global_step7", 7),
        ("*/step_{step}.d", "a b/step_00040.d", 40),
        ("*/step_{step}.d", "a b/step_00040xd", None),
        ("{step}/model-{step}", "8/model-8", 8),
        ("{step}/model-{step}", "8/model-9", None),
        ("s{step}-{step}", "s8-8", 8),
        ("s{step}-{step}", "s8-9", None),
    ],
)
def test_names(tmp_path: Path, name: str, folder: str, step: int | None) -> None:
    save(tmp_path / folder)
    found = after_end(tmp_path, checkpoint_name=name)
    assert [(one.step, one.path, one.complete) for one in found] == (
        [] if step is None else [(step, tmp_path / folder, True)]
    )


def test_a_file_may_be_a_checkpoint_and_a_link_may_not(tmp_path: Path) -> None:
    append(tmp_path / "checkpoint-1", "a file")
    (tmp_path / "checkpoint-2").symlink_to(save(tmp_path / "elsewhere"))
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "checkpoint-1")
    (found,) = after_end(tmp_path)
    assert (found.step, found.complete) == (1, True), "it has no files in it to wait for"
    assert after_end(tmp_path / "missing") == []


def test_in_the_order_of_steps_the_newest_of_the_same_step_last(tmp_path: Path) -> None:
    names = ["checkpoint-10", "checkpoint-9", "v1-a/checkpoint-9", "v0-a/checkpoint-9"]
    for age, name in enumerate(names):
        folder = save(tmp_path / name, "trainer_state.json")
        make_old(folder / "trainer_state.json", 1000 - age)
        make_old(folder, 1000 - age)
    found = after_end(tmp_path)
    assert [str(one.path.relative_to(tmp_path)) for one in found] == [*names[1:], names[0]]


@pytest.mark.parametrize(
    ("patterns", "lacks"),
    [
        (["trainer_state.json"], []),
        (["rng_state_*.pth", "trainer_state.json"], []),
        (["global_step{step}/*_model_states.pt"], []),
        (["*_model_states.pt", "optimizer.pt"], ["*_model_states.pt", "optimizer.pt"]),
        ([], []),
    ],
)
def test_a_file_for_every_pattern(tmp_path: Path, patterns: list[str], lacks: list[str]) -> None:
    """A star does not match a slash: a file of the same name deeper in the tree is a different one."""
    save(tmp_path / "checkpoint-8")
    save(tmp_path / "checkpoint-8" / "global_step8", "mp_rank_00_model_states.pt")
    (found,) = after_end(tmp_path, checkpoint_complete=patterns)
    assert (found.complete, found.lacks) == (not lacks, tuple(lacks))


def test_an_actor_is_complete_with_its_critic(tmp_path: Path) -> None:
    """OpenRLHF saves both at once; DeepSpeed writes `latest` last."""
    settings = {"framework": "openrlhf", "checkpoint_name": "_actor/global_step{step}"}
    save(tmp_path / "_actor" / "global_step7")
    (found,) = after_end(tmp_path, **settings)
    assert (found.complete, found.lacks) == (False, ("../latest",))
    (tmp_path / "_actor" / "latest").write_text("global_step7")
    assert [one.complete for one in after_end(tmp_path, **settings)] == [True]
    save(tmp_path / "_critic" / "global_step7", "model_states.pt")
    (tmp_path / "_critic" / "latest").write_text("global_step6")
    (found,) = after_end(tmp_path, **settings)
    assert (found.complete, found.lacks) == (False, ("_critic/global_step7",))
    (tmp_path / "_critic" / "latest").write_text("global_step7")
    (found,) = after_end(tmp_path, **settings)
    assert (found.complete, found.content.num_files) == (True, 4)


def test_a_folder_of_an_actor_is_no_sign_of_deepspeed(tmp_path: Path) -> None:
    """Another program than OpenRLHF may use the name, and writes no `latest`."""
    save(tmp_path / "_actor" / "step7")
    assert [one.complete for one in after_end(tmp_path, checkpoint_name="_actor/step{step}")] == [True]


@pytest.mark.parametrize(
    ("tracker", "before", "named", "later"),
    [
        ("latest", "global_step6", "global_step7", "global_step8"),
        ("latest_checkpointed_iteration.txt", "6", "7", "8"),
    ],
)
def test_a_checkpoint_that_is_half_written_has_no_tracker_that_names_it(
    tmp_path: Path, tracker: str, before: str, named: str, later: str
) -> None:
    """DeepSpeed and Megatron write the tracker after the files of the optimizer, which may take minutes."""
    name, patterns = "global_step{step}", ["*_model_states.pt", f"../{tracker}"]
    checkpoints = WatchedCheckpoints(trainer(checkpoint_name=name, checkpoint_complete=patterns), tmp_path)
    save(tmp_path / "global_step7", "mp_rank_00_model_states.pt")
    checkpoints.find(0.0)
    (found,) = checkpoints.find(600.0)
    assert (found.complete, found.lacks) == (False, (f"../{tracker}",))
    for text, complete in ((before, False), (named, True), (later, True), ("release", False)):
        (tmp_path / tracker).write_text(text)
        assert [one.complete for one in checkpoints.find(700.0)] == [complete], text


def test_another_rank_still_writes(tmp_path: Path) -> None:
    """The last file of the first rank exists, while the optimizer file of the second one is still growing."""
    checkpoints = WatchedCheckpoints(trainer(), tmp_path)
    folder = save(tmp_path / "checkpoint-8")
    completes = []
    for second in range(6):
        if second < 3:
            append(folder / "optimizer-1.pt", "more")
        completes.append(checkpoints.find(float(second))[0].complete)
    assert completes == [False, False, False, False, True, True]


def test_timestamps_of_a_file_server_with_a_late_clock_are_ignored(tmp_path: Path) -> None:
    """Files look old by the server's clock while they are written."""
    checkpoints = WatchedCheckpoints(trainer(), tmp_path)
    folder = save(tmp_path / "checkpoint-8")
    for path in (*folder.iterdir(), folder):
        make_old(path)
    assert [one.complete for one in checkpoints.find(0.0)] == [False]
    assert [one.complete for one in checkpoints.find(QUIET_S)] == [True]
    assert [one.complete for one in checkpoints.find(0.0, has_ended=True)] == [True]


def test_a_checkpoint_is_incomplete_while_it_is_overwritten(tmp_path: Path) -> None:
    checkpoints = WatchedCheckpoints(trainer(), tmp_path)
    folder = save(tmp_path / "checkpoint-8")
    checkpoints.find(0.0)
    assert checkpoints.find(5.0)[0].complete
    time.sleep(0.01)
    (folder / "model.safetensors").write_text("y")  # same length as before
    assert not checkpoints.find(6.0)[0].complete
    assert checkpoints.find(9.0)[0].complete


def test_files_of_older_complete_checkpoints_are_rarely_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reads them, and a shared file system has to serve all of them."""
    checkpoints = WatchedCheckpoints(trainer(), tmp_path)
    for step in (4, 8, 12):
        save(tmp_path / f"checkpoint-{step}")
    assert [one.complete for now_s in (0.0, QUIET_S) for one in checkpoints.find(now_s)] == [False] * 3 + [True] * 3
    read: list[str] = []
    inspect = found_checkpoints._inspect
    monkeypatch.setattr(found_checkpoints, "_inspect", lambda *given: read.append(given[2].name) or inspect(*given))
    assert all(one.complete for one in checkpoints.find(QUIET_S + 1))
    assert read == ["checkpoint-12"], "the newest may be overwritten"
    checkpoints.find(QUIET_S + REREAD_S)
    assert sorted(read[1:]) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    assert len(checkpoints.find(QUIET_S + REREAD_S, has_ended=True)) == 3
    assert len(read) == 7
