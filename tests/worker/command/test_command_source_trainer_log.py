"""The trainer's log as a source of progress: logs written by ms-swift 4.6.0 and TRL 1.16.0, and torn ones."""

import json
from pathlib import Path

import pytest
from watched_programs import FIXTURES, Polls, append, make_old, watched

from rlhf_core.worker.command.observation import StepFigures
from rlhf_core.worker.command.sources import trainer_log
from rlhf_core.worker.command.sources.trainer_log import TrainerLog

SWIFT = (FIXTURES / "swift-grpo-logging.jsonl").read_text().splitlines(keepends=True)
VERSION = "v0-20261122-172526"


def line(step: int, **values: float) -> str:
    return json.dumps({"loss": step / 10, **values, "global_step/max_steps": f"{step}/100"}) + "\n"


def test_steps_of_a_swift_run_come_with_their_metrics(tmp_path: Path) -> None:
    polls = Polls(TrainerLog(watched(tmp_path)))
    assert not polls.poll().moved
    append(tmp_path / VERSION / "logging.jsonl", SWIFT[0])
    first = polls.poll()
    append(tmp_path / VERSION / "logging.jsonl", "".join(SWIFT[1:]))
    rest = polls.poll()
    assert (first.moved, first.step, [one.step for one in first.metrics]) == (True, 1, [1])
    assert first.metrics[0].values["completions/clipped_ratio"] == 1.0
    assert "global_step/max_steps" not in first.metrics[0].values
    assert "elapsed_time" not in first.metrics[0].values
    assert (rest.step, [one.step for one in rest.metrics]) == (6, [2, 3, 4, 5, 6])
    # The last line summarizes the run: the run time belongs to the last step, the history to none.
    assert rest.metrics[-1].values["train_runtime"] == 0.5672
    assert "log_history" not in rest.metrics[-1].values
    assert not polls.poll().moved


def test_lines_of_llama_factory(tmp_path: Path) -> None:
    polls = Polls(TrainerLog(watched(tmp_path)))
    log = {
        "current_steps": 5,
        "total_steps": 100,
        "loss": 0.7,
        "lr": 1e-5,
        "percentage": 5.0,
        "elapsed_time": "0:00:09",
    }
    append(tmp_path / "trainer_log.jsonl", json.dumps(log) + "\n")
    assert polls.poll().metrics == [StepFigures(5, {"loss": 0.7, "lr": 1e-5, "percentage": 5.0})]


def test_numbers_too_large_for_a_step_are_none(tmp_path: Path) -> None:
    polls = Polls(TrainerLog(watched(tmp_path)))
    append(tmp_path / "logging.jsonl", line(4) + line(2**31))
    reading = polls.poll()
    assert (reading.step, [one.step for one in reading.metrics]) == (4, [4])


def test_existing_lines_are_no_progress(tmp_path: Path) -> None:
    log = tmp_path / "logging.jsonl"
    append(log, line(1) + line(2))
    make_old(log)
    polls = Polls(TrainerLog(watched(tmp_path, first_step=1)))
    before = polls.poll()
    append(log, line(2, reward=1.0))
    after = polls.poll()
    assert (before.moved, before.step, before.metrics) == (False, None, [])
    assert (after.moved, after.metrics) == (True, [StepFigures(2, {"loss": 0.2, "reward": 1.0})])


def test_old_lines_of_a_file_server_with_an_early_clock_are_no_progress(tmp_path: Path) -> None:
    """By this node's clock they were written after the start; their steps would say that the trainer started over."""
    log = tmp_path / "logging.jsonl"
    append(log, line(1) + line(2))
    make_old(log, -100.0)
    polls = Polls(TrainerLog(watched(tmp_path, first_step=10, ahead_s=110.0)))
    assert (polls.poll().moved, polls.poll().step) == (False, None)
    append(log, line(11))
    assert polls.poll().step == 11


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    polls = Polls(TrainerLog(watched(tmp_path)))
    append(tmp_path / "logging.jsonl", line(1) + line(2)[:20])
    assert polls.poll().step == 1
    append(tmp_path / "logging.jsonl", line(2)[20:])
    assert polls.poll().metrics == [StepFigures(2, {"loss": 0.2})]


def test_a_torn_line_of_a_killed_trainer_is_skipped(tmp_path: Path) -> None:
    polls = Polls(TrainerLog(watched(tmp_path)))
    append(tmp_path / "logging.jsonl", '{"loss": 0.' + line(7) + "[1, 2]\n" + line(8))
    found = polls.poll()
    assert (found.moved, found.step, found.problem) == (True, 8, "")


@pytest.mark.parametrize("first", [line(1), line(1, reward=0.5)], ids=["the same first line", "another"])
def test_a_rewritten_log_is_read_from_its_beginning(tmp_path: Path, first: str) -> None:
    log = tmp_path / "trainer_log.jsonl"
    polls = Polls(TrainerLog(watched(tmp_path)))
    append(log, "".join(line(step) for step in range(1, 9)))
    assert polls.poll().step == 8
    log.unlink()
    append(log, first)
    found = polls.poll()
    assert (found.moved, found.step) == (True, 1)


def test_non_finite_values_are_kept(tmp_path: Path) -> None:
    polls = Polls(TrainerLog(watched(tmp_path)))
    append(tmp_path / "logging.jsonl", '{"loss": NaN, "grad_norm": Infinity, "ok": true, "step": 3}\n')
    values = polls.poll().metrics[0].values
    assert str(values) == "{'loss': nan, 'grad_norm': inf}"


def test_the_state_in_checkpoints_is_used_without_a_log(tmp_path: Path) -> None:
    polls = Polls(TrainerLog(watched(tmp_path, first_step=0)))
    whole = (FIXTURES / "trl-grpo-trainer_state.json").read_text()
    append(
        tmp_path / "checkpoint-3" / "trainer_state.json", (FIXTURES / "trl-grpo-step-3-trainer_state.json").read_text()
    )
    first = polls.poll()
    append(tmp_path / "checkpoint-6" / "trainer_state.json", whole[:500])
    torn = polls.poll()
    append(tmp_path / "checkpoint-6" / "trainer_state.json", whole[500:])
    append(tmp_path / "trainer_state.json", whole)
    second = polls.poll()
    assert [one.step for one in first.metrics] == [1, 2, 3]
    assert (torn.moved, torn.step) == (False, 3)
    assert (second.moved, [one.step for one in second.metrics]) == (True, [4, 5, 6])
    assert second.metrics[0].values["kl"] > 0


def test_evaluations_belong_to_their_step(tmp_path: Path) -> None:
    polls = Polls(TrainerLog(watched(tmp_path, first_step=2)))
    append(tmp_path / "checkpoint-4" / "trainer_state.json", (FIXTURES / "trl-cpo-trainer_state.json").read_text())
    found = polls.poll()
    assert [one.step for one in found.metrics] == [3, 4]  # steps 1 and 2 were made by the previous start
    assert {"loss", "eval_loss", "nll_loss"} <= set(found.metrics[1].values)


def test_a_trainer_that_started_over_is_detected_by_its_steps(tmp_path: Path) -> None:
    """Resumed at step 100, with the instruction to continue from there, the trainer makes steps 1 to 3."""
    polls = Polls(TrainerLog(watched(tmp_path, first_step=100)))
    append(
        tmp_path / "checkpoint-3" / "trainer_state.json", (FIXTURES / "trl-grpo-step-3-trainer_state.json").read_text()
    )
    assert polls.poll().step == 3


def test_it_reads_once_a_second(tmp_path: Path) -> None:
    source = TrainerLog(watched(tmp_path))
    source.poll(0.0)
    append(tmp_path / "logging.jsonl", line(1))
    assert not source.poll(trainer_log.POLL_S / 2).moved
    assert source.poll(trainer_log.POLL_S).moved
