"""Common parts of the training loops: the rows of a step, its end (metrics, votes, checkpoint), heartbeats, timing."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.diagnosis.health.judge import Judge
from rlhf_core.diagnosis.health.state import Batch
from rlhf_core.diagnosis.retention import best_until
from rlhf_core.errors import BadConfig, DegenerateRl
from rlhf_core.files.appended import LineWriter
from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checkpoint_files import BestCheckpoint
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.loops import LoopSpec
from rlhf_core.schemas.reports import MetricsLine, Phase, SampleLine, TrainerWarning
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoints.state import Progress
from rlhf_core.training.data.loading import DataReport, EncodedPrompts
from rlhf_core.training.data.micro_batches import balanced
from rlhf_core.training.data.order import RowOrder, occurrences_before, repeated
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.evaluation.evaluator import Evaluator
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.trainers.engine import Engine, learning_rate
from rlhf_core.training.trainers.saving import Saving
from rlhf_core.training.trainers.step import TrainingStep, refuse_non_finite, summary
from rlhf_core.training.trainers.time_limit import TimeLimit
from rlhf_core.training.types import Row, WorkerContext
from rlhf_core.training.worker_events import write_event


@dataclass(frozen=True)
class Loop:
    """One training loop of a run. Steps are counted over the whole run, from 1."""

    spec: LoopSpec
    first_step: int
    last_step: int

    @property
    def algorithm(self) -> AlgorithmSpec:
        """Settings and properties of its algorithm."""
        return self.spec.algorithm

    def policy_rate(self, step: int) -> float:
        """Learning rate of the policy in step ``step`` of the run; its schedule begins with its first update."""
        skipped = self.algorithm.steps_before_policy
        number = step - self.first_step + 1 - skipped
        return learning_rate(number, self.spec.optimizer, self.spec.num_steps - skipped)


def loops(spec: RunSpec) -> list[Loop]:
    """The loops of a run in order: the warm start, if there is one, and the main loop."""
    found, done = [], 0
    for loop in spec.loops.named.values():
        found.append(Loop(loop, done + 1, done + loop.num_steps))
        done += loop.num_steps
    return found


class TrainingContext:
    """One start of a trainer rank, over all loops."""

    def __init__(
        self,
        context: WorkerContext,
        ranks: Ranks,
        tokenizer: PreTrainedTokenizerBase,
        report: DataReport,
        data: EncodedPrompts,
        evaluator: Evaluator,
        progress: Progress | None,
        reference: str = "",
    ) -> None:
        """Open the files that rank 0 appends to.

        Args:
            report: report on the loaded training data.
            data: training rows and the tokens of their prompts; the same on every rank.
            progress: position of the checkpoint being resumed from; None for a fresh start.
            reference: ``Progress.reference`` of the checkpoints to write.
        """
        self.spec = context.spec
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.evaluator = evaluator
        self.scorer = evaluator.scorer
        self.rollouts = evaluator.rollouts
        self._data = data
        self._order = RowOrder(data.rows, self.spec.data.weights, self.spec.seed)
        self.source_names = [name for name in self.spec.data.weights if name]  # of a mixture
        self.end_ids = data.end_ids
        self._rows_digest = report.digest
        self._reference = reference
        self._data_counts = {
            "data/num_rows": len(data.rows),
            "data/num_overlong": data.num_overlong,
            "data/num_malformed": report.num_malformed + data.num_malformed,
        }
        self._reporter = context.reporter
        self.steps_done = progress.step if progress else 0
        self.position = progress.position if progress else 0
        self._step = self.steps_done
        self._judge = _judge(context, ranks, progress)
        self._saving = Saving(context, ranks, tokenizer, self.beat, self._sync_files)
        self._time_limit = TimeLimit(self.spec.slurm.save_lead_s)
        self._best = progress.best if progress and self.spec.checkpoint.keep_best else None
        self._context = context
        self._metrics_file = LineWriter(context.restart_dir.metrics, self._record_loss) if ranks.is_first else None
        self._samples_file = LineWriter(context.restart_dir.samples, self._record_loss) if ranks.is_first else None

    @property
    def has_conversations(self) -> bool:
        """True if any training row is a conversation."""
        return any(row.chat is not None for row in self._data.rows)

    def close(self) -> None:
        """Wait for the last checkpoint, and close the files and the rollout engine.

        Raises:
            DiskFull, WorkerError: the checkpoint could not be written; raised by every rank.
        """
        self._saving.writer.close()
        self.rollouts.close()
        for file in (self._metrics_file, self._samples_file):
            if file is not None:
                file.close()

    def leave(self) -> None:
        """Let a checkpoint in progress finish, if it can, after an error that ends this process, and stop sampling
        ahead before what it uses is closed."""
        self._saving.writer.leave()
        if self.rollouts.continuous is not None:
            self.rollouts.continuous.stop()

    def _sync_files(self) -> None:
        for file in (self._metrics_file, self._samples_file):
            if file is not None:
                file.sync()

    def beat(self, phase: Phase) -> None:
        """Send a heartbeat."""
        self._reporter.beat(phase, self._step)

    def beating(self, phase: Phase) -> Callable[[], None]:
        """Heartbeat function to pass to long-running operations."""
        return functools.partial(self._reporter.beat, phase, self._step)

    def steps_left(self, loop: Loop) -> range:
        """Yield the numbers of the remaining steps."""
        return range(self.steps_done + 1, loop.last_step + 1)

    def take_rows(self, count: int, *, by_length: bool = False) -> tuple[list[Row], list[list[int]]]:
        """Take the next ``count`` rows of the run and return this rank's part, with the tokens of its prompts: for
        sampling one part per rank, for training without sampling one per replica.

        A row that is taken again (the data has fewer rows, or an epoch ends in between) gets a uid of its own: sampling
        seeds and in-flight completions are identified by uid.

        Args:
            by_length: distribute rows over replicas so that they have about the same total text length; contiguous
                parts for the ranks otherwise.

        Raises:
            BadConfig: the rows do not divide evenly among these.
        """
        parts = self.ranks.num_replicas if by_length else self.ranks.num_ranks
        if count % parts:
            sharing = " (trainer.sequence_parallel of them share each)" if parts < self.ranks.num_ranks else ""
            raise BadConfig(
                f"found {count} rows per step for {self.ranks.num_ranks} ranks{sharing}; expected a multiple of "
                f"{parts}: change the rows per step of the algorithm, or resources.ranks_per_node"
            )
        upcoming = self._upcoming(count)
        places = self._by_length(upcoming) if by_length else self.ranks.deal(range(count))
        self.position += count
        earlier = occurrences_before(upcoming)
        rows = [repeated(self._data.rows[upcoming[place]], earlier[place]) for place in places]
        return rows, [self._data.token_ids[upcoming[place]].tolist() for place in places]

    def rows_before(self, count: int) -> list[Row]:
        """Return the row that precedes each of this rank's next ``count`` rows in the order of the step over all ranks;
        the last row precedes the first. Rows are distributed by length, and none is consumed."""
        upcoming = self._upcoming(count)
        return [self._data.rows[upcoming[place - 1]] for place in self._by_length(upcoming)]

    def _upcoming(self, count: int) -> list[int]:
        return self._order.indices(self.position, count)

    def _by_length(self, indices: Sequence[int]) -> list[int]:
        """Positions of this replica's rows among ``indices``. Length is measured in characters, since each rank
        tokenizes only its own rows."""
        lengths = [_characters(self._data.rows[index]) for index in indices]
        return balanced(lengths, self.ranks.num_replicas)[self.ranks.replica]

    def begin_step(self, number: int) -> TrainingStep:
        """Begin step ``number``: heartbeats and metrics belong to it from here on."""
        self._step = number
        return TrainingStep(number, StepMetrics(number, self.ranks))

    def apply(self, step: TrainingStep, loop: Loop, engine: Engine, num_tokens: int) -> None:
        """Update the weights with the gradients accumulated in the engine.

        Args:
            num_tokens: number of tokens in the loss of this rank's rows.
        """
        rate = loop.policy_rate(step.number)
        step.grad_norms.append(engine.step(rate))
        step.num_tokens += num_tokens if self.ranks.is_first_of_replica else 0
        step.metrics.shared("train/learning_rate", rate)

    def measure_updates(self, step: TrainingStep, engine: Engine) -> None:
        """Add the metrics of all updates of a step; the gradient norm is the mean over them."""
        step.metrics.shared("train/grad_norm", sum(step.grad_norms) / len(step.grad_norms))
        step.metrics.mean("train/changed_share", engine.changed_share(), 1)  # of the tensors that each rank holds
        step.metrics.total("train/num_tokens", step.num_tokens)

    def end_step(
        self,
        step: TrainingStep,
        loop: Loop,
        model: PreTrainedModel,
        engine: Engine,
        critic: Engine | None = None,
        position: int | None = None,
        in_flight: Callable[[bool], list[dict[str, Any]]] | None = None,
    ) -> bool:
        """Evaluate if due, reduce and write the metrics, and save if due or requested.

        Args:
            critic: the engine of a value model, saved with the policy.
            position: position in the data of the first row taken for a later step; None if none was.
            in_flight: returns the completions already sampled for later steps (``Saving.save``).

        Returns:
            Whether to stop here because an agent requested it or the job has no time for another step; the state is
            then saved.

        Raises:
            NonFiniteLoss: the loss or the gradient norm is not finite; the metrics of the step are already written.
            DegenerateRl: training no longer learns, and health.actions requires more than a warning; metrics as above.
            MetricsMismatch, DiskFull, WorkerError: raised by every rank; the last two also for an earlier step's
                checkpoint.
        """
        self._evaluate(step, model)
        self._add_times(step)
        position = self.position if position is None else position
        step.metrics.shared("data/epochs", position / len(self._data.rows))
        if step.number == 1:
            for name, count in self._data_counts.items():
                step.metrics.shared(name, count)
        reduced = step.metrics.reduced(self._saving.request() or self._vote_on_time(step, loop))
        if self._metrics_file is not None:
            self._metrics_file.write(
                MetricsLine(step=step.number, time=utc_now(), loop=loop.algorithm.name, metrics=reduced.values)
            )
        self.ranks.log(summary(step.number, self.spec.total_steps, loop.algorithm.name, reduced.values))
        if reduced.save_failed:
            self._saving.writer.finish()
        refuse_non_finite(step.number, reduced.values)
        found = self._judge.observe(
            step.number,
            loop.algorithm.samples,
            reduced.values,
            reduced.by_rank,
            loop.spec.optimizer.learning_rate,
        )
        verdict = self._judge.verdict(found, step.number)
        if self.ranks.is_first:
            for rule, warning in verdict.warnings:
                self.warn(FailureKind.DEGENERATE_RL, [warning], rule)
        if verdict.ends_by:
            raise DegenerateRl(verdict.message, verdict.ends_by)
        self.steps_done = step.number
        finished = step.number == loop.last_step
        if self._is_saved(step.number, loop) or reduced.stop:
            progress = Progress(
                step=step.number,
                loop=loop.algorithm.name,
                loop_finished=finished,
                position=position,
                rows=self._rows_digest,
                reference=self._reference,
                health=self._judge.state,
                reward_models=self.scorer.model_states,
                best=self._best_until(step.number, reduced.values),
            )
            self._saving.save(progress, model, engine, critic, in_flight, is_last=finished or reduced.stop)
        return reduced.stop

    def is_evaluated(self, number: int) -> bool:
        """True if the model is evaluated mid-training, after this step."""
        every, is_last = self.spec.evaluate.every_num_steps, number == self.spec.total_steps
        return bool(every) and (number % every == 0 or (is_last and self.spec.checkpoint.keep_best))

    def write_samples(self, lines: Sequence[SampleLine]) -> None:
        """Write completions for inspection; only those of rank 0 are written."""
        if self._samples_file is not None:
            for line in lines:
                self._samples_file.write(line)

    def warn(self, kind: FailureKind, messages: Sequence[str], health_rule: str = "") -> None:
        """Have agent 0 record incidents for findings that do not stop the run.

        Args:
            kind: failure kind that each finding would have.
            messages: one sentence per finding.
            health_rule: health rule that made the findings, if any.
        """
        path = self._context.restart_dir.warnings_of(self.ranks.rank)
        for message in messages:
            self.ranks.log(f"warning: {message}")
            warning = TrainerWarning(
                time=utc_now(), failure_kind=kind, message=message, step=self._step, health_rule=health_rule
            )
            # The disk is full: the log has the message, and training continues.
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(f"{warning.model_dump_json()}\n")

    def _record_loss(self, what: str) -> None:
        """Write a timeline event: a file being written was removed."""
        self.ranks.log(what)
        write_event(self._context, "file", what)

    def _evaluate(self, step: TrainingStep, model: PreTrainedModel) -> None:
        # After a gradient that is not finite, neither are the weights: engines would refuse them, which would end the
        # run before the metrics of the step are written.
        is_sound = all(map(math.isfinite, step.grad_norms))
        if is_sound and self.is_evaluated(step.number) and "greedy" in self.evaluator.names:
            with step.timed("evaluate"):
                scores = self.evaluator.greedy_scores(model, step.number, self.beating(Phase.EVALUATE))
                for name, found in scores.items():
                    step.metrics.mean(f"eval/{name}", *found)

    def _best_until(self, step: int, values: Mapping[str, float]) -> BestCheckpoint | None:
        """The best checkpoint of the main loop once that of this step is saved; None without
        ``checkpoint.keep_best``."""
        wanted = self.spec.promote.metric
        metric = f"eval/{'greedy' if wanted == 'sampled' else wanted}"
        if self.spec.checkpoint.keep_best and step > self.spec.warm_start_steps and metric in values:
            self._best = best_until(self._best, step, metric, values[metric])
        return self._best

    def _is_saved(self, number: int, loop: Loop) -> bool:
        """True if a checkpoint is due after this step."""
        return number == loop.last_step or number % self.spec.checkpoint.every_num_steps == 0

    def _vote_on_time(self, step: TrainingStep, loop: Loop) -> str:
        """Vote of rank 0 to save and stop, if the time limit of the job leaves no time for the next step."""
        self._time_limit.add_step(step.seconds(), step.times_s.get("evaluate", 0.0))
        if not self.ranks.is_first or step.number == self.spec.total_steps:
            return ""
        shortage = self._time_limit.shortage(
            self._saving.save_s(),
            with_evaluation=self.is_evaluated(step.number + 1),
            saves_now=self._is_saved(step.number, loop),
        )
        if not shortage:
            return ""
        self.ranks.log(f"saving and ending: {shortage}")
        write_event(self._context, "checkpoint", f"saving and ending: {shortage}")
        return "stop"

    def _add_times(self, step: TrainingStep) -> None:
        """Add the times, in seconds, as means over the ranks. The checkpoint time is that of the previous step."""
        seconds = {**self._saving.times(), "evaluate": 0.0, **step.times_s, "step": step.seconds()}
        for name, value in seconds.items():
            step.metrics.mean(f"time/{name}_s", value, 1)


def _characters(row: Row) -> int:
    return sum(map(len, (row.prompt, row.target, row.chosen, row.rejected)))


def _judge(context: WorkerContext, ranks: Ranks, progress: Progress | None) -> Judge:
    # A sampling warm start is judged as if its steps were as large as those of the main loop.
    main = context.spec.main_loop.algorithm
    nodes = tuple(ranks.gather(context.node))
    batch = Batch(main.rows_per_step, main.group, nodes, learns_from_rewards=not main.distils)
    return Judge(context.spec.health, batch, progress.health if progress else None)
