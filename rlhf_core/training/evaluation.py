"""Measuring a model on held-out data: greedy and sampled, with a confidence interval and a table of samples."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from rlhf_core.errors import WorkerError
from rlhf_core.run_dir import CheckpointDir, RunDir, write_model
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.reports import EvaluationReport, EvaluationSample, Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoint_soundness import agree, verify_checkpoint
from rlhf_core.training.checkpoints import newest_checkpoint
from rlhf_core.training.data import EncodedPrompts, encode_prompts, load_rows
from rlhf_core.training.distributed import Ranks, init_process_group, leave_process_group
from rlhf_core.training.intervals import mean_interval
from rlhf_core.training.models import load_causal_lm
from rlhf_core.training.rewards import load_rewards, score
from rlhf_core.training.rollouts.transformers_engine import generate
from rlhf_core.training.seeds import sample_seed
from rlhf_core.training.tokenizers import load_tokenizer
from rlhf_core.training.types import Completion, RoleResult, Row, WorkerContext

When = Literal["before", "after"]
How = Literal["greedy", "sampled"]

SEED_STEP = 0
"""Step in the sampling seeds of evaluations: training counts from 1, and before and after meet the same noise."""


@dataclass(frozen=True)
class Evaluator:
    """Held-out prompts and how completions of them are made and scored."""

    spec: RunSpec
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    data: EncodedPrompts
    """Held-out prompts; the same on every rank, each rank works on its part."""

    def run(
        self, model: PreTrainedModel, when: When, checkpoint_step: int, beat: Callable[[], None]
    ) -> list[EvaluationReport]:
        """Evaluate greedily and sampled.

        Collective: all ranks call it, and all get the whole reports, whose samples are in prompt order.

        Args:
            checkpoint_step: optimizer steps that the weights have seen.
            beat: called after every generated token position and around the scorer.
        """
        return [self._report(model, how, when, checkpoint_step, beat) for how in ("greedy", "sampled")]

    def greedy_score(self, model: PreTrainedModel, beat: Callable[[], None]) -> tuple[float, int]:
        """Sum of the scores of this rank's part, and their number: both can ride in a metric reduction."""
        scores = [sample.score for samples in self._samples(model, "greedy", beat) for sample in samples]
        return sum(scores), len(scores)

    def _report(
        self, model: PreTrainedModel, how: How, when: When, checkpoint_step: int, beat: Callable[[], None]
    ) -> EvaluationReport:
        started = time.monotonic()
        own = self._samples(model, how, beat)
        keep = self.spec.evaluate.keep_samples
        kept = [sample for samples in own for sample in samples][:keep]
        scores = [[sample.score for sample in samples] for samples in own]
        own_part: dict[str, list[Any]] = {"scores": scores, "kept": [sample.model_dump() for sample in kept]}
        parts = self.ranks.gather(own_part)
        all_scores = [samples for part in parts for samples in part["scores"]]
        table = [EvaluationSample(**sample) for part in parts for sample in part["kept"]]
        num_samples = sum(len(samples) for samples in all_scores)
        low, high = mean_interval(all_scores, self.spec.evaluate.confidence)
        return EvaluationReport(
            name=how,
            when=when,
            metric=self.spec.evaluate.scorer.partition(":")[2],
            value=sum(value for samples in all_scores for value in samples) / num_samples,
            ci_low=low,
            ci_high=high,
            num_prompts=len(all_scores),
            num_samples=num_samples,
            checkpoint_step=checkpoint_step,
            seconds=time.monotonic() - started,
            time=utc_now(),
            samples=tuple(table[:keep]),
        )

    def _samples(self, model: PreTrainedModel, how: How, beat: Callable[[], None]) -> list[list[EvaluationSample]]:
        """Scored completions of this rank's prompts."""
        rows, prompts = self.ranks.deal(self.data.rows), self.ranks.deal(self.data.token_ids)
        if not rows:
            return []
        num_samples = 1 if how == "greedy" else self.spec.evaluate.samples_per_prompt
        seeds = [[sample_seed(self.spec.seed, SEED_STEP, row.uid, i) for i in range(num_samples)] for row in rows]
        completions = generate(
            model,
            self.tokenizer,
            prompts,
            seeds,
            max_new_tokens=self.spec.rollout.max_new_tokens,
            temperature=0.0 if how == "greedy" else self.spec.evaluate.temperature,
            batch_size=self.spec.rollout.batch_size,
            beat=beat,
        )
        return self._scored(rows, completions, beat)

    def _scored(
        self, rows: Sequence[Row], completions: Sequence[Sequence[Completion]], beat: Callable[[], None]
    ) -> list[list[EvaluationSample]]:
        flat_rows = [row for row, made in zip(rows, completions, strict=True) for _ in made]
        texts = [completion.text for made in completions for completion in made]
        scorer = load_rewards([self.spec.evaluate.scorer])
        values = iter(score(scorer, (), flat_rows, texts, beat)[0])
        return [
            [
                EvaluationSample(
                    prompt_uid=row.uid,
                    sample_index=index,
                    prompt=row.prompt,
                    completion=completion.text,
                    answer=row.answer,
                    score=next(values),
                )
                for index, completion in enumerate(made)
            ]
            for row, made in zip(rows, completions, strict=True)
        ]


def load_evaluator(spec: RunSpec, ranks: Ranks, tokenizer: PreTrainedTokenizerBase) -> Evaluator:
    """Read the held-out data; the first ``evaluate.num_prompts`` rows whose prompts fit are used."""
    rows = load_rows(spec, "eval")
    limit = spec.evaluate.num_prompts or len(rows)
    encoded = encode_prompts(rows, tokenizer, spec.data)
    data = EncodedPrompts(encoded.rows[:limit], encoded.token_ids[:limit], encoded.num_overlong)
    return Evaluator(spec, ranks, tokenizer, data)


def write_reports(run_dir: RunDir, reports: Sequence[EvaluationReport], ranks: Ranks) -> None:
    """Write the report files; rank 0 does."""
    for report in reports:
        if ranks.is_first:
            write_model(run_dir.evaluation(report.when, report.name), report)
        ranks.log(
            f"evaluation {report.when} training, {report.name}: {report.metric} {report.value:.3f} "
            f"[{report.ci_low:.3f}, {report.ci_high:.3f}] over {report.num_samples} samples"
        )


def are_written(run_dir: RunDir, when: When) -> bool:
    """Whether the evaluations of that moment have been made already."""
    return all(run_dir.evaluation(when, how).is_file() for how in ("greedy", "sampled"))


def run_evaluator(context: WorkerContext) -> RoleResult:
    """Role ``evaluator``: measure the model of the last complete checkpoint.

    Raises:
        WorkerError: there is no complete checkpoint.
        CheckpointCorrupt: it is damaged.
    """
    spec, reporter = context.spec, context.reporter
    reporter.beat(Phase.SETUP, 0)
    ranks = init_process_group(context)
    checkpoint = _last_checkpoint(context, ranks)
    verify_checkpoint(checkpoint, spec, ranks, any_ranks=True)
    reporter.beat(Phase.SETUP, checkpoint.step)
    disable_progress_bar()
    model = load_causal_lm(checkpoint.model, spec.model.dtype)
    model.to(ranks.device)  # type: ignore[arg-type]  # transformers hides the types of Module.to
    evaluator = load_evaluator(spec, ranks, load_tokenizer(checkpoint.model))
    _evaluate_start(context, ranks, evaluator)
    reports = evaluator.run(
        model, "after", checkpoint.step, functools.partial(reporter.beat, Phase.EVALUATE, checkpoint.step)
    )
    write_reports(context.run_dir, reports, ranks)
    leave_process_group(ranks)
    return RoleResult.DONE


def _evaluate_start(context: WorkerContext, ranks: Ranks, evaluator: Evaluator) -> None:
    """Measure the model that another program began with, which does not do so itself; once in the life of a run."""
    spec, run_dir = context.spec, context.run_dir
    wanted = isinstance(spec.trainer, CommandTrainer) and spec.model.path and not are_written(run_dir, "before")
    if ranks.from_first("missing" if wanted else "") != "missing":
        return
    model = load_causal_lm(Path(spec.model.path), spec.model.dtype)
    model.to(ranks.device)  # type: ignore[arg-type]  # as below
    reports = evaluator.run(model, "before", 0, functools.partial(context.reporter.beat, Phase.EVALUATE, 0))
    write_reports(run_dir, reports, ranks)


def _last_checkpoint(context: WorkerContext, ranks: Ranks) -> CheckpointDir:
    """The newest checkpoint as rank 0 sees it."""
    step = agree(ranks, lambda: newest_checkpoint(context))
    if step is None:
        raise WorkerError(
            f"found no complete checkpoint in {context.run_dir.checkpoints_dir} to evaluate; training must run first"
        )
    return context.run_dir.checkpoint(step)
