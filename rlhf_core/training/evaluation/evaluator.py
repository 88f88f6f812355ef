"""Evaluation of a model on held-out data: greedy and sampled completions, the ranking of pairs and the loss, each with
a confidence interval and a table of samples."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import BadData
from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.evaluation import (
    CROSS_ENTROPY,
    PASS,
    EvaluationName,
    EvaluationReport,
    EvaluationSample,
    When,
)
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.data.chat import template_arguments, with_tools
from rlhf_core.training.data.examples import Scorer
from rlhf_core.training.data.loading import EncodedPrompts, encode_prompts, load_data
from rlhf_core.training.data.same_rows import require_same_rows
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.environments.conversations import Conversations
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.environments.rollout_steps import RolloutSteps
from rlhf_core.training.evaluation.held_out import ScoredRow, scored_rows
from rlhf_core.training.evaluation.intervals import mean_interval, mean_score, weighted_interval, weighted_mean
from rlhf_core.training.evaluation.pass_at_k import mean_pass_at_k
from rlhf_core.training.evaluation.ranking import desirable_sample, loss_sample, pair_sample, row_sample
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.models.embeddings import require_embeddings
from rlhf_core.training.models.reward_model import RewardModel
from rlhf_core.training.rewards.scoring import RewardScorer
from rlhf_core.training.rollouts.base import PromptList, PromptSource, RolloutEngine, Sampling
from rlhf_core.training.rollouts.seeds import sample_seed
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.types import Completion, Row

How = Literal["greedy", "sampled"]

PREFERENCE_METRIC = "accuracy"
"""Share of held-out pairs whose chosen completion has the higher reward; for labelled completions, every desirable one
forms a pair with every undesirable one."""

MeasuredRow = tuple[list[EvaluationSample], float]
"""Samples of one held-out row, and its weight in the mean."""

SEED_STEP = 0
"""Step in the sampling seeds of evaluations: training counts from 1, and all evaluations use the same noise."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluator of models on held-out prompts."""

    spec: RunSpec
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    data: EncodedPrompts
    """Held-out prompts; the same on every rank, and each rank processes its part."""
    scorer: RewardScorer
    rollouts: RolloutEngine
    conversations: Conversations | None = None
    """Sampling of several turns, in a run with tools or an environment."""

    @property
    def names(self) -> tuple[EvaluationName, ...]:
        """Names of the evaluations: completions are scored if the held-out rows have answers."""
        made: tuple[EvaluationName, ...] = ("greedy", "sampled") if completes(self.spec, self.data) else ()
        return (*made, *self.spec.row_evaluations)

    def scores_rows_for(self, algorithm: AlgorithmSpec) -> bool:
        """True if held-out rows are scored while this algorithm trains: only for the main loop's, which judges them."""
        return bool(self.spec.row_evaluations) and algorithm == self.spec.main_loop.algorithm

    def run(
        self,
        model: PreTrainedModel,
        when: When,
        checkpoint_step: int,
        beat: Callable[[], None],
        reference: PreTrainedModel | None = None,
    ) -> list[EvaluationReport]:
        """Run all evaluations.

        Collective: all ranks call it, and all get the full reports, with samples in prompt order.

        Args:
            checkpoint_step: optimizer steps that the weights have seen.
            beat: called before sampling, after every generated token position and around the scorer.
            reference: reference of the main loop; None if it is ``model`` itself.

        Raises:
            BadConfig: a token of the held-out rows has no embedding.
        """
        require_embeddings(model, self.tokenizer, self.data, completions=bool(self.spec.row_evaluations))
        # Ranking and loss come from the same passes, whose time counts for the first of them.
        scored = functools.cache(lambda: self._scored_by(model, reference, beat))

        def measure(name: EvaluationName) -> list[MeasuredRow]:
            if name == "preference":
                return [([sample], 1.0) for sample in self._ranked(scored())]
            if name == "loss":
                return [([loss_sample(found.row, found.loss)], found.weight) for found in scored()]
            return [(samples, 1.0) for samples in self._samples(model, checkpoint_step, name, beat)]

        return [
            report
            for name in self.names
            for report in self._reports(name, when, checkpoint_step, functools.partial(measure, name))
        ]

    def sample(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample completions, of several turns in a run with tools or an environment. Collective.

        Args: as for ``RolloutEngine.sample``.
            rows: row of each prompt.
        """
        if self.conversations is None:
            return self.rollouts.sample(prompts, seeds, sampling, version, beat)
        return self.conversations.sample(self.rollouts, rows, prompts, seeds, sampling, version, beat)

    def source(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
    ) -> PromptSource:
        """The same completions for an engine that samples in parallel to training.

        Args: as for :meth:`sample`.
        """
        if self.conversations is None:
            return PromptList(prompts, seeds, sampling)
        return self.conversations.source(rows, prompts, seeds, sampling)

    def greedy_scores(
        self, model: PreTrainedModel, step: int, beat: Callable[[], None]
    ) -> dict[str, tuple[float, float]]:
        """Sum and number of the scores of this rank's part, which can travel in a metric reduction: ``greedy``, and
        ``greedy/NAME`` for each source of a mixture.

        Args:
            step: optimizer steps that the weights have seen.
        """
        samples = [sample for samples in self._samples(model, step, "greedy", beat) for sample in samples]
        return self._by_source("greedy", [(sample.prompt_uid, sample.score, 1.0) for sample in samples])

    def row_scores(
        self, policy: PolicyModel | RewardModel, reference: Scorer | None, beat: Callable[[], None]
    ) -> dict[str, tuple[float, float]]:
        """Sum and total weight of the scores of this rank's rows, for each evaluation of them, and for each source of a
        mixture."""
        rows = self._scored_rows(policy, reference, beat)
        found = self._by_source("loss", [(row.row.uid, row.loss, row.weight) for row in rows])
        if "preference" in self.spec.row_evaluations:
            ranked = [(sample.prompt_uid, sample.score, 1.0) for sample in self._ranked(rows)]
            found |= self._by_source("preference", ranked)
        return found

    @functools.cached_property
    def _sources(self) -> dict[str, str]:
        """Source of each held-out row by uid; empty without a mixture."""
        return {row.uid: row.source for row in self.data.rows if row.source}

    def _by_source(self, name: str, scores: Sequence[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
        """Sum and total weight of scores, over all rows and over those of each source.

        Args:
            scores: uid, score and weight of this rank's rows.
        """
        found = {name: (sum(score * weight for _, score, weight in scores), sum(weight for *_, weight in scores))}
        sums = _sums((self._sources.get(uid, ""), score, weight) for uid, score, weight in scores)
        # Also those without rows on this rank: all ranks have the same metrics.
        names = sorted(set(self._sources.values()))
        return found | {f"{name}/{source}": sums.get(source, (0.0, 0.0)) for source in names}

    def _reports(
        self, name: EvaluationName, when: When, checkpoint_step: int, measure: Callable[[], list[MeasuredRow]]
    ) -> Iterator[EvaluationReport]:
        """Report one evaluation; after sampled completions also their pass@k, unless a reward model scores them."""
        started, evaluate = time.monotonic(), self.spec.evaluate
        own = measure()
        own_part: dict[str, list[Any]] = {
            "scores": [[sample.score for sample in samples] for samples, _ in own],
            "weights": [weight for _, weight in own],
            "sources": [self._sources.get(samples[0].prompt_uid, "") if samples else "" for samples, _ in own],
            "kept": [sample.model_dump() for samples, _ in own for sample in samples][: evaluate.keep_samples],
        }
        parts = self.ranks.gather(own_part)
        all_scores = [samples for part in parts for samples in part["scores"]]
        table = [EvaluationSample(**sample) for part in parts for sample in part["kept"]]
        if name == "loss":
            losses, weights = [loss for (loss,) in all_scores], [weight for part in parts for weight in part["weights"]]
            value, (low, high) = weighted_mean(losses, weights), weighted_interval(losses, weights, evaluate.confidence)
        else:
            weights = [1.0] * len(all_scores)
            value, (low, high) = mean_score(all_scores), mean_interval(all_scores, evaluate.confidence)
        report = EvaluationReport(
            name=name,
            when=when,
            metric=self._metric(name),
            value=value,
            ci_low=low,
            ci_high=high,
            num_prompts=len(all_scores),
            num_samples=sum(len(samples) for samples in all_scores),
            checkpoint_step=checkpoint_step,
            seconds=time.monotonic() - started,
            time=utc_now(),
            by_source=_means([source for part in parts for source in part["sources"]], all_scores, weights),
            samples=tuple(table[: evaluate.keep_samples]),
        )
        yield report
        if name == "sampled" and not evaluate.scorer_model:
            for k, (value, (low, high)) in mean_pass_at_k(all_scores, evaluate.confidence).items():
                content = {"name": f"{PASS}{k}", "value": value, "ci_low": low, "ci_high": high}
                yield report.model_copy(update={**content, "seconds": 0.0, "by_source": {}, "samples": ()})

    def _metric(self, name: EvaluationName) -> str:
        if name == "preference":
            return PREFERENCE_METRIC
        if name == "loss":
            algorithm = self.spec.main_loop.algorithm.name
            return CROSS_ENTROPY if algorithm == "sft" else f"{algorithm}_loss"
        return self.spec.evaluate.scorer_model or self.spec.evaluate.scorer.partition(":")[2]

    def _scored_rows(
        self, policy: PolicyModel | RewardModel, reference: Scorer | None, beat: Callable[[], None]
    ) -> list[ScoredRow]:
        return scored_rows(self.spec, self.ranks, self.tokenizer, self.data, policy, reference, beat)

    def _scored_by(
        self, model: PreTrainedModel, reference: PreTrainedModel | None, beat: Callable[[], None]
    ) -> list[ScoredRow]:
        """This rank's rows, scored by a model of the main loop."""
        if self.rollouts.version is not None:  # sampling has woken the engine, whose memory the passes need
            self.rollouts.sleep()
        if self.spec.makes_reward_model:
            ranker = RewardModel(model, self.ranks.sequence)
            ranker.try_passes()
            return self._scored_rows(ranker, None, beat)
        policy = PolicyModel(model, sequence=self.ranks.sequence)
        start = PolicyModel(reference, sequence=self.ranks.sequence) if reference else policy
        return self._scored_rows(policy, start if self.spec.main_loop.algorithm.reference else None, beat)

    def _ranked(self, rows: Sequence[ScoredRow]) -> list[EvaluationSample]:
        """This rank's pairs, or desirable completions among all undesirable ones, with their scores."""
        if self.spec.main_loop.algorithm.pairs:
            return [pair_sample(found.row, *found.rewards) for found in rows]
        own = [found.rewards[0] for found in rows if not found.row.desirable]
        undesirable = [reward for part in self.ranks.gather(own) for reward in part]
        return [desirable_sample(found.row, found.rewards[0], undesirable) for found in rows if found.row.desirable]

    def _samples(
        self, model: PreTrainedModel, step: int, how: How, beat: Callable[[], None]
    ) -> list[list[EvaluationSample]]:
        """Scored completions of this rank's prompts."""
        beat()  # a failure from here on is not one of setup: the first pass comes before the first token
        rows = self.ranks.deal(self.data.rows)
        prompts = [tokens.tolist() for tokens in self.ranks.deal(self.data.token_ids)]
        evaluate, rollout = self.spec.evaluate, self.spec.rollout
        num_samples = 1 if how == "greedy" else evaluate.samples_per_prompt
        seeds = [[sample_seed(self.spec.seed, SEED_STEP, row.uid, i) for i in range(num_samples)] for row in rows]
        sampling = Sampling(
            max_new_tokens=evaluate.max_new_tokens or rollout.max_new_tokens,
            temperature=0.0,
            batch_size=rollout.batch_size,
            end_ids=self.data.end_ids,
            stop=rollout.stop_strings,
        )
        if how == "sampled":
            sampling = dataclasses.replace(
                sampling,
                temperature=evaluate.temperature,
                top_p=evaluate.top_p,
                top_k=evaluate.top_k,
                min_p=evaluate.min_p,
            )
        self.rollouts.load(model, step, beat)
        completions = self.sample(rows, prompts, seeds, sampling, step, beat)
        if self.conversations is not None:
            self.conversations.take_seconds()  # the metric is of training
            for warning in self.conversations.take_warnings():
                print(f"warning: {warning}", flush=True)
        return self._scored(rows, completions, beat) if rows else []

    def _scored(
        self, rows: Sequence[Row], completions: Sequence[Sequence[Completion]], beat: Callable[[], None]
    ) -> list[list[EvaluationSample]]:
        flat_rows = [row for row, made in zip(rows, completions, strict=True) for _ in made]
        flat = [completion for made in completions for completion in made]
        values = iter(self.scorer.evaluate(flat_rows, flat, beat))
        return [
            [row_sample(row, one.shown, row.answer, next(values), index) for index, one in enumerate(made)]
            for row, made in zip(rows, completions, strict=True)
        ]


def _means(sources: Sequence[str], scores: Sequence[Sequence[float]], weights: Sequence[float]) -> dict[str, float]:
    """Mean score of each source of a mixture."""
    rows = zip(sources, scores, weights, strict=True)
    sums = _sums((source, sum(of_row) / len(of_row), weight) for source, of_row, weight in rows if source)
    return {source: total / weight if weight else 0.0 for source, (total, weight) in sorted(sums.items())}


def _sums(scores: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    """Weighted sum and total weight of each source, from the source, score and weight of each row."""
    sums: dict[str, tuple[float, float]] = {}
    for source, score, weight in scores:
        total, weights = sums.get(source, (0.0, 0.0))
        sums[source] = total + score * weight, weights + weight
    return sums


def completes(spec: RunSpec, data: EncodedPrompts) -> bool:
    """True if completions of held-out prompts are sampled and scored."""
    has_answers = all(spec.data.source(row.source).answer_column in row.columns for row in data.rows)
    return spec.completes_held_out(pairs_have_answers=has_answers)


def load_evaluator(
    spec: RunSpec,
    ranks: Ranks,
    tokenizer: PreTrainedTokenizerBase,
    scorer: RewardScorer,
    start: Callable[[], RolloutEngine],
    *,
    trains_on_samples: bool,
    pool: EnvironmentPool | None = None,
    now: datetime | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Evaluator:
    """Read the held-out data; the first ``evaluate.num_prompts`` rows whose prompts fit are used. Collective.

    Args:
        start: starts the rollout engine of the run; called only if something is sampled.
        trains_on_samples: whether training samples even if no evaluation does.
        pool: tools and environments of the run, if it has any.
        now: time given to chat templates that write the date into prompts; None for the clock.
        beat: called every few rows.
    """
    rows, loaded = load_data(spec, "eval", beat=beat)
    require_same_rows(ranks, loaded.source, rows)
    limit = spec.evaluate.num_prompts or len(rows)
    encoded = encode_prompts(with_tools(rows, pool.tools if pool else ()), tokenizer, spec.data, now, beat)
    data = dataclasses.replace(encoded, rows=encoded.rows[:limit], token_ids=encoded.token_ids[:limit])
    if spec.ranks_held_out and spec.main_loop.algorithm.labelled and len({row.desirable for row in data.rows}) < 2:
        raise BadData(
            f"found held-out rows of one label only (data.{spec.data.label_column} of {len(data.rows)} rows), expected "
            "desirable and undesirable ones: the evaluation measures their ranking"
        )
    if trains_on_samples or completes(spec, data):
        conversations = None
        if pool is not None and spec.rollout.turns.are_used:
            arguments = template_arguments(spec.data.template_args, now)
            steps = RolloutSteps(spec.rollout.turns, pool, tokenizer, arguments, data.end_ids)
            conversations = Conversations(spec.rollout.turns, ranks, steps)
        return Evaluator(spec, ranks, tokenizer, data, scorer, start(), conversations)
    if spec.rollout.engine != "transformers":
        ranks.log(f"nothing is sampled in this run: rollout.engine = {spec.rollout.engine!r} is not started")
    return Evaluator(spec, ranks, tokenizer, data, scorer, TransformersEngine(tokenizer))
