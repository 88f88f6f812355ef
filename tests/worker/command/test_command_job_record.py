"""Metrics and checkpoints of a restarted program: none is lost, and none is recorded twice."""

import dataclasses
import errno
import json
import os
import time
from pathlib import Path

import pytest
from made_reports import stored_spec
from process_tools import until
from program_contexts import context_of, trainer_of

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.command_trainer import CommandTrainer, ProgressSource
from rlhf_core.schemas.data import DataSpec
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import MetricsLine, TrainerWarning
from rlhf_core.worker.command import published
from rlhf_core.worker.command.job_record import JobRecord
from rlhf_core.worker.command.launch import OWN_NAME
from rlhf_core.worker.command.observation import Reading, StepFigures
from rlhf_core.worker.command.sources.trainer_log import history_of
from rlhf_core.worker.command.step_metrics_file import StepMetricsFile

TRL = CommandTrainer(argv=("x",), num_steps=20, framework="trl", algorithm="cpo")


def state(folder: Path, steps: int) -> Path:
    """A checkpoint with the state file of transformers."""
    folder.mkdir()
    history = [{"step": step, "epoch": 0.1, "loss": step / 10} for step in range(1, steps + 1)]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": steps, "log_history": history}))
    return folder


def test_unrecorded_steps_are_recovered_from_the_checkpoint(tmp_path: Path) -> None:
    """Unrecorded steps are recovered from the checkpoint after a restart.

    The step of a checkpoint waits for more of its metrics while the checkpoint is being published; a program that is
    ended in between leaves the checkpoint without the metrics.
    """
    file = StepMetricsFile(tmp_path / "metrics.jsonl", TRL, first_step=8)
    file.recover(history_of(state(tmp_path / "checkpoint-8", 8)), recorded=set(range(1, 7)))
    file.add(
        ProgressSource.TENSORBOARD, [StepFigures(8, {"train/loss": 9.0}), StepFigures(9, {"train/loss": 0.9})], 1.0
    )
    file.write(1.0, all_of_them=True)
    lines = read_models(tmp_path / "metrics.jsonl", MetricsLine)
    assert [(line.step, line.metrics["train/loss"]) for line in lines] == [(7, 0.7), (8, 0.8), (9, 0.9)]


def test_recorded_and_later_steps_are_not_recovered(tmp_path: Path) -> None:
    file = StepMetricsFile(tmp_path / "metrics.jsonl", TRL, first_step=4)
    file.recover(history_of(state(tmp_path / "checkpoint-8", 8)), recorded=set(range(1, 5)))
    assert file.write(1.0, all_of_them=True) == []


def test_a_checkpoint_without_a_state_has_no_history(tmp_path: Path) -> None:
    assert history_of(tmp_path) == []
    (tmp_path / "trainer_state.json").write_text("[1, 2")
    assert history_of(tmp_path) == []


def test_a_start_considers_the_records_of_all_earlier_starts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    first, second = (run.attempt(1).restart(number) for number in (0, 1))
    for one in (first, second):
        one.root.mkdir(parents=True)
    lines = [MetricsLine(step=step, time=utc_now(), loop="cpo", metrics={"train/loss": 1.0}) for step in range(1, 7)]
    first.metrics.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
    saved = run.checkpoint(8).root
    saved.mkdir(parents=True)
    (saved / OWN_NAME).write_text("checkpoint-8\n")
    state(saved / "checkpoint-8", 8)
    context = dataclasses.replace(context_of(tmp_path, restart=1), run_dir=run)
    record = JobRecord(context, TRL, tmp_path / "output", first_step=8)
    record.recover(saved)
    record.take([], 1.0, ended=False)
    assert [line.step for line in read_models(second.metrics, MetricsLine)] == [7, 8]


def test_a_problem_of_a_source_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = JobRecord(context_of(tmp_path), TRL, tmp_path / "output", first_step=0)
    for problem in ("it cannot be read", "", "it is damaged", "it cannot be read"):
        record.take([(ProgressSource.STDOUT, Reading(problem=problem))], 1.0, ended=False)
    assert capsys.readouterr().out == "it cannot be read\nit is damaged\n"


def test_metrics_of_trl_come_with_every_step_and_not_with_every_checkpoint(tmp_path: Path) -> None:
    """TRL writes no log of its own, and its state file is written only with a checkpoint; TensorBoard is immediate."""
    file = StepMetricsFile(tmp_path / "metrics.jsonl", TRL, first_step=0)
    file.add(ProgressSource.TENSORBOARD, [StepFigures(1, {"train/loss": 0.1})], 1.0)
    file.add(ProgressSource.TRAINER_LOG, [StepFigures(1, {"loss": 0.1}), StepFigures(2, {"loss": 0.2})], 2.0)
    file.add(
        ProgressSource.TENSORBOARD, [StepFigures(2, {"train/loss": 0.2}), StepFigures(3, {"train/loss": 0.3})], 2.0
    )
    assert [line.step for line in file.write(2.0, all_of_them=True)] == [1, 2, 3]


def test_checkpoints_of_the_previous_start_are_not_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may still be in the program's folder; publishing one again briefly removes the existing one."""
    begun: list[int] = []
    monkeypatch.setattr(published, "publish", lambda context, trainer, folder, found: begun.append(found.step))
    for steps in (4, 8, 12):
        state(tmp_path / f"checkpoint-{steps}", steps)
    of_restart = published.CheckpointPublisher(context_of(tmp_path), TRL, tmp_path, first_step=8)
    of_restart.consider(0.0, ended=True)
    of_restart.consider(10.0, ended=True)
    while of_restart.is_busy:
        time.sleep(0.01)
    assert (begun, of_restart.newest_step) == ([12], 12)


def closed_record(tmp_path: Path, last_step: int) -> tuple[JobRecord, RunDir]:
    context = context_of(tmp_path, framework="trl", algorithm="cpo", num_steps=20)
    context.restart_dir.root.mkdir(parents=True)
    output = tmp_path / "output"
    output.mkdir()
    for step in (8, last_step):
        state(output / f"checkpoint-{step}", step)
    record = JobRecord(context, trainer_of(context), output, first_step=0)
    record.take([], 0.0, ended=True)
    return record, context.run_dir


def test_the_last_checkpoint_is_published_when_the_disk_responds_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, failures = os.link, iter([True])

    def fail_once(source: Path, target: Path) -> None:
        if "checkpoint-20" in str(source) and next(failures, False):
            raise OSError(errno.EIO, "Input/output error")
        link(source, target)

    monkeypatch.setattr(os, "link", fail_once)
    record, run_dir = closed_record(tmp_path, last_step=20)
    record.close(lambda: None)
    record.require_last_checkpoint()
    assert [one.step for one in run_dir.checkpoints()] == [8, 20]


def test_the_last_checkpoint_is_published_when_metrics_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(file: StepMetricsFile, now_s: float, *, all_of_them: bool) -> list[MetricsLine]:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(StepMetricsFile, "write", fail)
    record, run_dir = closed_record(tmp_path, last_step=20)
    record.close(lambda: None)
    assert [one.step for one in run_dir.checkpoints()] == [8, 20]
    assert "failed to write metrics: [Errno 122] Disk quota exceeded" in capsys.readouterr().out


def test_a_log_on_a_full_disk_does_not_end_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.print", fail)
    record = JobRecord(context_of(tmp_path), TRL, tmp_path / "output", first_step=0)
    record.take([(ProgressSource.STDOUT, Reading(problem="it cannot be read"))], 1.0, ended=False)


def test_a_torn_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "ti')
    file = StepMetricsFile(path, TRL, first_step=1)
    file.add(ProgressSource.TENSORBOARD, [StepFigures(2, {"train/loss": 0.2})], 1.0)
    file.write(1.0, all_of_them=True)
    assert [line.step for line in read_models(path, MetricsLine)] == [2]


def test_a_file_that_a_killed_program_was_writing_is_not_published(tmp_path: Path) -> None:
    """A single file has no last file that would show that it is complete."""
    context = context_of(tmp_path, checkpoint_name="state-{step}.pt")
    output = tmp_path / "output"
    output.mkdir()
    record = JobRecord(context, trainer_of(context), output, first_step=0)
    (output / "state-10.pt").write_text("half of it")
    record.take([], time.monotonic(), ended=True)
    until(lambda: not record._publisher.is_busy)
    assert record.newest_step == 0
    record.publish_last()  # as after exit code 0
    until(lambda: record.newest_step == 10)


def test_a_model_older_than_the_training_is_an_incident(tmp_path: Path) -> None:
    record, run_dir = closed_record(tmp_path, last_step=16)
    record.close(lambda: None)
    record.require_last_checkpoint()
    (warning,) = read_models(run_dir.attempt(1).restart(0).warnings, TrainerWarning)
    assert warning.failure_kind is FailureKind.INCOMPLETE
    assert "of step 16, but training ended at step 20" in warning.message


@pytest.mark.parametrize(("files", "is_evaluated", "num_warnings"), [
    (("config.json",), True, 1),
    (("config.json", "model.safetensors"), True, 0),
    (("config.json",), False, 0),
])  # fmt: skip
def test_a_checkpoint_that_cannot_be_evaluated_is_an_incident_during_training(
    tmp_path: Path, files: tuple[str, ...], is_evaluated: bool, num_warnings: int
) -> None:
    context = context_of(tmp_path, framework="trl", num_steps=20)
    data = DataSpec(eval="eval.jsonl" if is_evaluated else "")
    spec = context.spec.model_copy(update={"data": data})
    context = dataclasses.replace(context, stored=stored_spec(context.run_dir.run_id, spec))
    context.restart_dir.root.mkdir(parents=True)
    output = tmp_path / "output"
    output.mkdir()
    record = JobRecord(context, trainer_of(context), output, first_step=0)
    for step in (4, 8):
        folder = state(output / f"checkpoint-{step}", step)
        for file in files:
            (folder / file).write_text("{}")
        record._publisher.consider(0.0, ended=True)
        until(lambda: not record._publisher.is_busy)
        record.take([], time.monotonic(), ended=True)
    warnings = read_models(context.restart_dir.warnings, TrainerWarning)
    assert [(one.failure_kind, one.step) for one in warnings] == [(FailureKind.CONFIG, 4)] * num_warnings
