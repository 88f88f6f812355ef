"""What the training loops share: the rows of a step, its end (metrics, votes, checkpoint), signs of life, time."""

import contextlib
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import BadConfig, DegenerateRl, NonFiniteLoss
from rlhf_core.run_dir import LineWriter
from rlhf_core.schemas.algorithms import AlgorithmSpec, LoopSpec
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import AgentEvent, MetricsLine, Phase, SampleLine
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef, PolicyOutput
from rlhf_core.training.batches import SequenceBatch, collate
from rlhf_core.training.checkpoints import CheckpointWriter, Progress
from rlhf_core.training.data import DataReport, EncodedPrompts, row_indices
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.evaluation import Evaluator
from rlhf_core.training.health import Judge, in_words
from rlhf_core.training.health_state import Batch
from rlhf_core.training.metrics import StepMetrics, reduce_metrics
from rlhf_core.training.models import PolicyModel
from rlhf_core.training.trainers.engine import Engine, learning_rate
from rlhf_core.training.types import Row, WorkerContext

_MUST_BE_FINITE = ("train/loss", "train/grad_norm")


@dataclass(frozen=True)
class Loop:
    """One training loop of a run. Steps are counted over the whole run, from 1."""

    spec: LoopSpec
    first_step: int
    last_step: int

    @property
    def algorithm(self) -> AlgorithmSpec:
        """Settings and traits of its algorithm."""
        return self.spec.algorithm

    @property
    def num_steps(self) -> int:
        """Steps of this loop."""
        return self.last_step - self.first_step + 1


def loops(spec: RunSpec) -> list[Loop]:
    """The loops of a run in their order: the warm start, if there is one, and the main one."""
    found, done = [], 0
    for loop in spec.loops.named.values():
        found.append(Loop(loop, done + 1, done + loop.num_steps))
        done += loop.num_steps
    return found


class Stopwatch:
    """Seconds of a step, in all and by part."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.parts: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block under ``name``."""
        started = time.monotonic()
        yield
        self.parts[name] += time.monotonic() - started

    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._started


class Totals:
    """Sums and weights by name, added up over micro-batches on the device, and read at the end of the step."""

    def __init__(self) -> None:
        self._entries: Stats = {}

    def add(self, stats: Stats) -> None:
        """Add the statistics of one micro-batch."""
        for name, (total, weight) in stats.items():
            before = self._entries.get(name)
            self._entries[name] = (total, weight) if before is None else (before[0] + total, before[1] + weight)

    def __contains__(self, name: str) -> bool:
        """True if there is a sum of that name."""
        return name in self._entries

    def read(self, name: str) -> tuple[float, float]:
        """Sum and weight of one name."""
        total, weight = self._entries[name]
        return float(total), float(weight)


@dataclass
class TrainingStep:
    """One optimizer step while it is made."""

    number: int
    """Over the whole run, from 1."""
    metrics: StepMetrics
    watch: Stopwatch = field(default_factory=Stopwatch)

    def add(self, definitions: Sequence[MetricDef], totals: Totals) -> None:
        """Add the metrics of an objective, as far as the step has their statistics."""
        for definition in definitions:
            if all(name in totals for name in definition.stats):
                sums, weights = zip(*(totals.read(name) for name in definition.stats), strict=True)
                self.metrics.mean(definition.name, sum(sums), weights[0])


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
    ) -> None:
        """Open the files that rank 0 appends to.

        Args:
            report: what was read of the training data.
            data: training rows and the tokens of their prompts; the same on every rank.
            progress: where the checkpoint stands that is gone on from; None from the beginning.
        """
        self.spec = context.spec
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.evaluator = evaluator
        self._data = data
        self._data_counts = {
            "data/num_rows": len(data.rows),
            "data/num_overlong": data.num_overlong,
            "data/num_malformed": report.num_malformed,
        }
        self._reporter = context.reporter
        self.steps_done = progress.step if progress else 0
        self.position = progress.position if progress else 0
        self._step = self.steps_done
        self._judge = _judge(context, ranks, progress)
        self._checkpoint_s = 0.0
        self._checkpoints = CheckpointWriter(
            context.run_dir,
            self.spec,
            tokenizer,
            ranks,
            lambda: self.beat(Phase.CHECKPOINT),
            lambda: context.run_dir.is_superseded(context.attempt),
        )
        self._context = context
        self._metrics_file = LineWriter(context.restart_dir.metrics, self._note_loss) if ranks.is_first else None
        self._samples_file = LineWriter(context.restart_dir.samples, self._note_loss) if ranks.is_first else None

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics_file, self._samples_file):
            if file is not None:
                file.close()

    def beat(self, phase: Phase) -> None:
        """Sign of life."""
        self._reporter.beat(phase, self._step)

    def beating(self, phase: Phase) -> Callable[[], None]:
        """A sign of life to hand on to what takes long."""
        return functools.partial(self._reporter.beat, phase, self._step)

    def steps_left(self, loop: Loop) -> range:
        """The numbers of the steps that are to be made."""
        return range(self.steps_done + 1, loop.last_step + 1)

    def take_rows(self, count: int) -> tuple[list[Row], list[list[int]]]:
        """The next ``count`` rows of the run: this rank's contiguous part, and the tokens of its prompts.

        Raises:
            BadConfig: the rows do not divide evenly among the ranks.
        """
        if count % self.ranks.num_ranks:
            raise BadConfig(
                f"found {count} rows per step for {self.ranks.num_ranks} ranks; expected a multiple of the ranks: "
                f"change the rows per step of the algorithm, or resources.ranks_per_node"
            )
        indices = self.ranks.deal(row_indices(len(self._data.rows), self.spec.seed, self.position, count))
        self.position += count
        return [self._data.rows[index] for index in indices], [self._data.token_ids[index] for index in indices]

    def micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Cut this rank's sequences into micro-batches; those of like length go together, so that little is padded.

        Args:
            lengths: tokens of each sequence.

        Returns:
            The indices of the sequences of each micro-batch.
        """
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        size = self.spec.native_trainer.micro_batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def forward(
        self,
        engine: Engine,
        reference: PolicyModel | None,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> tuple[SequenceBatch, PolicyOutput, Tensor]:
        """The forward passes for one micro-batch of ``B`` sequences.

        Args:
            reference: the reference model, of an algorithm that has one.
            prompts: tokens of each.
            completions: tokens of each, the targets.
            temperature: divisor of the logits, that of the sampling.

        Returns:
            The padded batch, the log-probabilities, and the entropy of the policy, ``[B, T]``.
        """
        self.beat(Phase.TRAIN)
        batch = collate(prompts, completions, self.tokenizer.pad_token_id, self.ranks.device)
        inputs = {"target_mask": batch.target_mask, "temperature": temperature}
        logprobs, entropy = engine(batch.input_ids, **inputs)
        ref_logprobs = None
        if reference is not None:
            with torch.no_grad():
                ref_logprobs, _ = reference(batch.input_ids, **inputs)
        return batch, PolicyOutput(logprobs, ref_logprobs), entropy

    def begin_step(self, number: int) -> TrainingStep:
        """From here on, beats and metrics belong to step ``number``."""
        self._step = number
        return TrainingStep(number, StepMetrics(number, self.ranks))

    def update(self, step: TrainingStep, loop: Loop, engine: Engine, policy: PolicyModel, num_tokens: int) -> None:
        """Update the weights with the gradients that the engine has, and measure the update.

        Args:
            num_tokens: tokens of this rank that the loss was taken over.
        """
        rate = learning_rate(step.number - loop.first_step + 1, loop.spec.optimizer, loop.num_steps)
        grad_norm = engine.step(rate)
        step.metrics.shared("train/grad_norm", grad_norm)
        step.metrics.shared("train/changed_share", engine.changed_share(policy))
        step.metrics.shared("train/learning_rate", rate)
        step.metrics.total("train/num_tokens", num_tokens)

    def end_step(self, step: TrainingStep, loop: Loop, model: PreTrainedModel, engine: Engine) -> bool:
        """Evaluate if it is time, reduce and write the metrics, save if it is time or asked for.

        Returns:
            Whether to end here, because an agent asked for it; the state is saved then.

        Raises:
            NonFiniteLoss: the loss or the gradient norm is not finite; the metrics of the step were written.
            DegenerateRl: training learns nothing any more; likewise.
            MetricsMismatch, DiskFull: raised by every rank.
        """
        self._evaluate(step, model)
        self._add_times(step)
        if step.number == 1:
            for name, count in self._data_counts.items():
                step.metrics.shared(name, count)
        reduced = reduce_metrics(step.metrics, self.ranks, self._reporter.request())
        if self._metrics_file is not None:
            self._metrics_file.write(
                MetricsLine(step=step.number, time=utc_now(), loop=loop.algorithm.name, metrics=reduced.values)
            )
        self.ranks.log(_summary(step, loop, self.spec.total_steps, reduced.values))
        _refuse_non_finite(step.number, reduced.values)
        found = self._judge.look(step.number, loop.algorithm.samples, reduced.values, reduced.by_rank)
        if found:
            raise DegenerateRl(in_words(found, step.number))
        self.steps_done = step.number
        finished = step.number == loop.last_step
        is_due = finished or step.number % self.spec.checkpoint.every_num_steps == 0
        self._checkpoint_s = 0.0
        if is_due or reduced.save or reduced.stop:
            progress = Progress(
                step=step.number,
                loop=loop.algorithm.name,
                loop_finished=finished,
                position=self.position,
                health=self._judge.state,
            )
            self._save(progress, model, engine)
        return reduced.stop

    def write_samples(self, lines: Sequence[SampleLine]) -> None:
        """Keep completions for reading; only rank 0's are kept."""
        if self._samples_file is not None:
            for line in lines:
                self._samples_file.write(line)

    def _note_loss(self, what: str) -> None:
        """An event that a person reads: somebody removed a file that is being written."""
        self.ranks.log(what)
        context = self._context
        path = context.restart_dir.worker_events(context.role, context.node, context.local_rank)
        event = AgentEvent(time=utc_now(), kind="file", node=context.node, role=context.role, message=what)
        with contextlib.suppress(OSError):  # the log has it; training goes on
            events = LineWriter(path)
            events.write(event)
            events.close()

    def _evaluate(self, step: TrainingStep, model: PreTrainedModel) -> None:
        every = self.spec.evaluate.every_num_steps
        if every and step.number % every == 0:
            with step.watch.part("evaluate"):
                step.metrics.mean("eval/greedy", *self.evaluator.greedy_score(model, self.beating(Phase.EVALUATE)))

    def _add_times(self, step: TrainingStep) -> None:
        """Seconds are means over the ranks. The checkpoint counted is the one after the step before."""
        seconds = {"checkpoint": self._checkpoint_s, "evaluate": 0.0, **step.watch.parts, "step": step.watch.seconds()}
        for name, value in seconds.items():
            step.metrics.mean(f"time/{name}_s", value, 1)

    def _save(self, progress: Progress, model: PreTrainedModel, engine: Engine) -> None:
        started = time.monotonic()
        self.beat(Phase.CHECKPOINT)
        for file in (self._metrics_file, self._samples_file):
            if file is not None:
                file.sync()  # the steps that the checkpoint makes final must not be lost to a power cut
        saved = self._checkpoints.save(progress, model, engine.state())
        self._checkpoint_s = time.monotonic() - started
        self.ranks.log(f"saved {saved.root.name} in {self._checkpoint_s:.2f} s")


def _judge(context: WorkerContext, ranks: Ranks, progress: Progress | None) -> Judge:
    # A warm start that samples is judged as if its steps were as large as those of the main loop.
    main = context.spec.main_loop.algorithm
    batch = Batch(main.rows_per_step, main.group, tuple(ranks.gather(context.node)))
    return Judge(context.spec.health, batch, progress.health if progress else None)


def _summary(step: TrainingStep, loop: Loop, total_steps: int, values: dict[str, float]) -> str:
    parts = [f"loss {values['train/loss']:.4f}", f"gradient norm {values['train/grad_norm']:.3f}"]
    if "reward/mean" in values:
        parts.insert(0, f"reward {values['reward/mean']:.3f}")
    return f"step {step.number}/{total_steps} {loop.algorithm.name}: {', '.join(parts)}, {values['time/step_s']:.2f} s"


def _refuse_non_finite(step: int, values: dict[str, float]) -> None:
    for name in _MUST_BE_FINITE:
        if not math.isfinite(values[name]):
            raise NonFiniteLoss(
                f"{name} is {values[name]} at step {step}; the weights before it are in the last checkpoint. Try a "
                f"lower learning rate or more warm-up, or float32 weights, and look at the reward function and the data"
            )
