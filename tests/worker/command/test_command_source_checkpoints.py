"""New checkpoints as a source of progress."""

import shutil
from pathlib import Path

from watched_programs import STEPS, Polls, Start, append, make_old, watched

from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.command.sources.checkpoints import Checkpoints


def test_a_checkpoint_is_a_phase_while_it_grows_and_a_step_once_it_is_complete(tmp_path: Path) -> None:
    polls = Polls(Checkpoints(watched(tmp_path)))
    assert not polls.poll().moved
    found = []
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        append(tmp_path / "checkpoint-8" / name, "x")
        found.append(polls.poll())
    assert [(one.moved, one.step, one.phase) for one in found] == [(True, None, Phase.CHECKPOINT)] * 3
    done = polls.poll()
    assert (done.moved, done.step, done.phase) == (True, 8, None)
    still = polls.poll()
    assert (still.moved, still.step) == (False, 8)


def test_checkpoints_of_the_previous_start_are_no_progress(tmp_path: Path) -> None:
    """Resumed from step 8, because the checkpoint of step 12 is damaged: 12 is not a step of this start."""
    for step in (8, 12):
        append(tmp_path / f"checkpoint-{step}" / "trainer_state.json", "{}")
        make_old(tmp_path / f"checkpoint-{step}" / "trainer_state.json")
    polls = Polls(Checkpoints(watched(tmp_path, first_step=8)))
    assert [(one.moved, one.step) for one in polls.polls(2, wait_s=0)] == [(False, None)] * 2
    append(tmp_path / "checkpoint-12" / "trainer_state.json", "{}")
    assert polls.poll().moved
    assert polls.poll().step == 12


def test_a_removed_checkpoint_is_no_progress(tmp_path: Path) -> None:
    append(tmp_path / "checkpoint-4" / "trainer_state.json", "{}")
    polls = Polls(Checkpoints(watched(tmp_path, started_at_s=0)))
    append(tmp_path / "checkpoint-8" / "trainer_state.json", "{}")
    polls.polls(2, wait_s=0)
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-8")
    found = polls.poll()
    assert (found.moved, found.step) == (False, 8)


def test_an_earlier_checkpoint_that_is_removed_in_parts_is_no_step(tmp_path: Path) -> None:
    """Some programs keep only the weights of older checkpoints, and large files take seconds to remove."""
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        append(tmp_path / "checkpoint-4" / name, "x")
    polls = Polls(Checkpoints(watched(tmp_path, first_step=8)))
    polls.polls(2, wait_s=0)
    for name in ("optimizer.pt", "model.safetensors"):
        (tmp_path / "checkpoint-4" / name).unlink()
        assert [(one.moved, one.step) for one in polls.polls(4, wait_s=0)] == [(False, None)] * 4
    append(tmp_path / "checkpoint-4" / "model.safetensors", "the program has started over")
    assert [one.step for one in polls.polls(3, wait_s=0)][-1] == 4


def test_a_step_below_earlier_ones_reveals_a_trainer_that_started_over(tmp_path: Path) -> None:
    polls = Polls(Checkpoints(watched(tmp_path, first_step=100)))
    append(tmp_path / "checkpoint-4" / "trainer_state.json", "{}")
    assert [one.step for one in polls.polls(2, wait_s=0)] == [None, 4]


def test_it_is_blind_to_a_program_that_works_between_two_checkpoints(tmp_path: Path, start: Start) -> None:
    polls = Polls(Checkpoints(watched(tmp_path)))
    start(STEPS, tmp_path / "logging.jsonl", "lines", "STEP\n")
    assert not any(reading.moved for reading in polls.polls(3))
