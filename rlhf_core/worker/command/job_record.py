"""Records that rank 0's worker keeps of an external trainer: metrics, checkpoints, warnings, extra files."""

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_core.diagnosis.health.metric_judge import MetricJudge
from rlhf_core.files.appended import read_models
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.command_trainer import CommandTrainer, ProgressSource
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import MetricsLine, TrainerWarning
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command.launch import own_name
from rlhf_core.worker.command.observation import Reading
from rlhf_core.worker.command.published import CheckpointPublisher
from rlhf_core.worker.command.sources.trainer_log import history_of
from rlhf_core.worker.command.step_metrics_file import StepMetricsFile

POLL_INTERVAL_S = 1.0
"""Interval of the search for checkpoints, in seconds."""
LAST_RETRIES = 3
"""Maximum number of retries to publish the last checkpoint once the program has exited."""


class JobRecord:
    """The files in the run directory that record the program's progress."""

    def __init__(self, context: WorkerContext, trainer: CommandTrainer, output_dir: Path, first_step: int) -> None:
        self._context = context
        self._trainer = trainer
        self._output_dir = output_dir
        self._metrics = StepMetricsFile(context.restart_dir.metrics, trainer, first_step)
        self._health = MetricJudge(context.spec.health, first_step)
        self._publisher = CheckpointPublisher(context, trainer, output_dir, first_step)
        self._first_step = first_step
        self._has_judged_model = first_step > 0
        self._next_poll_s = 0.0
        self._reported: set[str] = set()

    def recover(self, published: Path) -> None:
        """Record the steps up to a checkpoint that no earlier start managed to record.

        Args:
            published: The checkpoint that the program resumes from, in the run directory.
        """
        try:
            found = history_of(published / own_name(published))
            metrics = (read_models(one.metrics, MetricsLine) for one in self._context.run_dir.restarts())
            self._metrics.recover(found, {line.step for lines in metrics for line in lines})
        except OSError as error:
            self._print_once(f"could not search for metrics of steps before {published.name}: {error}")

    @property
    def newest_step(self) -> int:
        """Step of the newest published checkpoint."""
        return self._publisher.newest_step

    def take(self, readings: Sequence[tuple[ProgressSource, Reading]], now_s: float, *, ended: bool) -> None:
        """Record new readings.

        Args:
            readings: Readings of all sources.
            now_s: Monotonic time in seconds.
            ended: The program has exited, so no more readings will follow.
        """
        for kind, one in readings:
            self._metrics.add(kind, one.metrics, now_s)
            self._print_once(one.problem)
        lines: list[MetricsLine] = []
        try:
            lines = self._metrics.write(now_s, all_of_them=ended)
        except OSError as error:
            self._print_once(f"failed to write metrics: {error}")
        for line in lines:
            for found in self._health.judge(line.step, line.metrics):
                self._warn(found.kind, f"{found.message}.", found.step, found.rule)
        if ended or now_s >= self._next_poll_s:
            self._next_poll_s = now_s + POLL_INTERVAL_S
            self._publisher.consider(now_s)
            self._print_once(self._publisher.problem)
            self._require_model()

    def publish_last(self) -> None:
        """Begin to publish what a program that has exited by itself has left: nothing of it is cut off."""
        self._publisher.consider(time.monotonic(), ended=True)

    def close(self, beat: Callable[[], None]) -> None:
        """Publish what the program has left and keep extra files, calling ``beat`` in the meantime.

        The program has exited by itself.
        """
        for _ in range(1 + LAST_RETRIES):
            self.publish_last()
            self._await_publisher(beat)
            if not self._publisher.has_unpublished:
                break
            time.sleep(POLL_INTERVAL_S)
        self._require_model()
        for pattern in self._trainer.artifacts:
            for path in sorted(self._output_dir.glob(pattern)):
                beat()
                self._keep(path)

    def require_last_checkpoint(self) -> None:
        """Raise if the program's last checkpoint is not published: an older one would be evaluated and promoted.

        Raises:
            OSError: it could not be read or written.
            WorkerError: the run has moved on to another attempt.
            TrainerIncomplete: the program has left it incomplete.
        """
        self._publisher.require_newest()
        step, wanted = self.newest_step, self._trainer.num_steps
        if 0 < step < wanted:
            message = (
                f"The last checkpoint is of step {step}, but training ended at step {wanted}: the model of step {step} "
                "is evaluated and promoted. Have the trainer save at its end."
            )
            self._warn(FailureKind.INCOMPLETE, message, wanted)

    def _require_model(self) -> None:
        """Warn if the first checkpoint has no model: the evaluation would fail, but only after the training."""
        spec, step = self._context.spec, self.newest_step
        if self._has_judged_model or step == self._first_step or not spec.is_evaluated:
            return
        self._has_judged_model = True
        if not self._context.run_dir.checkpoint(step).model.is_dir():
            message = (
                f"The checkpoint of step {step} has no weights in the format of Hugging Face: the evaluation after "
                "training will fail. Have the trainer save them (with ZeRO-3 of DeepSpeed, set "
                "stage3_gather_16bit_weights_on_model_save), or leave data.eval out and evaluate the model elsewhere."
            )
            self._warn(FailureKind.CONFIG, message, step)

    def _await_publisher(self, beat: Callable[[], None]) -> None:
        while self._publisher.is_busy:
            beat()
            time.sleep(0.1)
        self._print_once(self._publisher.problem)

    def _keep(self, path: Path) -> None:
        target = self._context.restart_dir.artifacts / path.relative_to(self._output_dir)
        if path.is_file():
            with contextlib.suppress(OSError):  # a full disk: these files are optional
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    def _warn(self, kind: FailureKind, message: str, step: int, rule: str = "") -> None:
        warning = TrainerWarning(time=utc_now(), failure_kind=kind, message=message, step=step, health_rule=rule)
        with contextlib.suppress(OSError), self._context.restart_dir.warnings.open("a", encoding="utf-8") as file:
            file.write(f"{warning.model_dump_json()}\n")

    def _print_once(self, problem: str) -> None:
        if problem and problem not in self._reported:
            self._reported.add(problem)
            with contextlib.suppress(OSError):  # the log may be on the disk that is full
                print(problem, flush=True)
