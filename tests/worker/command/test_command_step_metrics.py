"""Metrics of other programs as lines of the run directory."""

from pathlib import Path

from program_contexts import context_of, trainer_of

from rlhf_core.files.appended import read_models
from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.worker.command.observation import StepFigures
from rlhf_core.worker.command.step_metrics_file import HOLD_S, StepMetricsFile

LOG, EVENTS = ProgressSource.TRAINER_LOG, ProgressSource.TENSORBOARD


def file_of(tmp_path: Path, first_step: int = 0) -> tuple[StepMetricsFile, Path]:
    path = tmp_path / "metrics.jsonl"
    return StepMetricsFile(path, trainer_of(context_of(tmp_path, framework="trl", algorithm="cpo")), first_step), path


def test_metrics_of_a_step_that_arrive_one_by_one_make_one_line(tmp_path: Path) -> None:
    metrics, path = file_of(tmp_path)
    metrics.add(EVENTS, [StepFigures(1, {"loss": 2.0})], 0.0)
    assert metrics.write(0.1) == [], "the newest step waits for more"
    metrics.add(EVENTS, [StepFigures(1, {"grad_norm": 1.0})], 0.2)
    metrics.add(EVENTS, [StepFigures(2, {"loss": 1.0})], 0.3)
    metrics.write(0.4)
    (line,) = read_models(path, MetricsLine)
    assert (line.step, line.loop, line.metrics) == (1, "cpo", {"train/loss": 2.0, "train/grad_norm": 1.0})
    metrics.write(0.4 + HOLD_S)
    assert [line.step for line in read_models(path, MetricsLine)] == [1, 2]


def test_the_first_source_of_the_trainer_counts(tmp_path: Path) -> None:
    metrics, path = file_of(tmp_path)
    metrics.add(EVENTS, [StepFigures(1, {"loss": 2.0})], 0.0)
    metrics.add(LOG, [StepFigures(1, {"loss": 2.00001})], 0.0)
    metrics.write(0.0, all_of_them=True)
    (line,) = read_models(path, MetricsLine)
    assert line.metrics == {"train/loss": 2.0}


def test_steps_before_the_resumed_one_are_left_out(tmp_path: Path) -> None:
    """A history that is rewritten at every checkpoint includes the steps before the resumed one."""
    metrics, path = file_of(tmp_path, first_step=10)
    metrics.add(LOG, [StepFigures(step, {"loss": 1.0}) for step in (9, 10, 11)], 0.0)
    metrics.write(0.0, all_of_them=True)
    metrics.add(LOG, [StepFigures(11, {"loss": 3.0})], 1.0)
    metrics.write(1.0, all_of_them=True)
    assert [(line.step, line.metrics["train/loss"]) for line in read_models(path, MetricsLine)] == [(11, 1.0)]


def test_an_evaluation_longer_than_the_hold_time_gets_its_own_line(tmp_path: Path) -> None:
    """transformers logs the loss, evaluates, and logs the results at the same step."""
    metrics, path = file_of(tmp_path)
    metrics.add(EVENTS, [StepFigures(4, {"loss": 2.0})], 0.0)
    metrics.write(1.0 + HOLD_S)
    metrics.add(EVENTS, [StepFigures(4, {"loss": 2.5, "eval_loss": 3.0})], 60.0)
    metrics.add(EVENTS, [StepFigures(5, {"loss": 1.0}), StepFigures(4, {"eval_runtime": 55.0})], 61.0)
    metrics.write(61.0)
    metrics.write(61.0, all_of_them=True)
    assert [(line.step, line.metrics) for line in read_models(path, MetricsLine)] == [
        (4, {"train/loss": 2.0}),
        (4, {"eval/loss": 3.0, "time/evaluate_s": 55.0}),
        (5, {"train/loss": 1.0}),
    ]
