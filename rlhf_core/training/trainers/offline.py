"""The training loop of algorithms that learn from the data alone: from reference answers or completion pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import MicroBatch, StepSums
from rlhf_core.training.data.batches import SequenceBatch
from rlhf_core.training.data.examples import (
    Example,
    Scorer,
    divide_examples,
    make_batch,
    make_examples,
    mismatched,
    score_batch,
    step_sums,
)
from rlhf_core.training.data.micro_batches import evened
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.models.reward_model import RewardModel
from rlhf_core.training.trainers.context import Loop, TrainingContext
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.trainers.source_metrics import SourceTotals
from rlhf_core.training.trainers.step import Totals
from rlhf_core.training.types import Row


def train(
    training: TrainingContext,
    loop: Loop,
    policy: PolicyModel | RewardModel,
    engine: Engine,
    reference: Scorer | None,
) -> bool:
    """Run the remaining steps of ``loop``.

    Args:
        reference: the reference model of the loop, if the algorithm needs one.

    Returns:
        Whether the loop stopped early because an agent requested it.
    """
    algorithm = loop.algorithm
    objective = ALGORITHMS[algorithm.name]
    for number in training.steps_left(loop):
        step = training.begin_step(number)
        training.beat(Phase.TRAIN)
        if training.rollouts.version is not None:  # an evaluation has woken the engine, whose memory training needs
            training.rollouts.sleep()
        before = training.rows_before(algorithm.rows_per_step) if algorithm.mismatches else []
        rows, prompts = training.take_rows(algorithm.rows_per_step, by_length=True)
        examples = make_examples(rows, prompts, training.tokenizer, algorithm)

        with step.timed("train"):
            own_tokens = sum(example.num_tokens for example in examples)
            others = mismatched(examples, before, training.tokenizer) if algorithm.mismatches else []
            sums, parts, other_parts = _exchange(training, loop, examples, others, packed=policy.packs)
            if others:
                measured = _measure(training, loop, policy, reference, others, other_parts)
                sums = replace(sums, measured=measured)
            of_sources = SourceTotals(training.source_names, algorithm)
            totals = _accumulate(training, loop, engine, reference, rows, examples, parts, sums, of_sources)
            training.apply(step, loop, engine, own_tokens)
            training.measure_updates(step, engine, policy)

        step.add(objective.metrics, totals)
        of_sources.write(step.metrics, rows)
        step.metrics.total("speed/tokens_per_s", step.num_tokens / step.seconds())
        if training.is_evaluated(number) and training.evaluator.scores_rows_for(algorithm):
            with step.timed("evaluate"):
                beat = training.beating(Phase.EVALUATE)
                for name, found in training.evaluator.row_scores(policy, reference, beat).items():
                    step.metrics.mean(f"eval/{name}", *found)
        if training.end_step(step, loop, policy.pretrained, engine):
            return True
    return False


def _exchange(
    training: TrainingContext,
    loop: Loop,
    examples: Sequence[Example],
    others: Sequence[Example],
    *,
    packed: bool,
) -> tuple[StepSums, list[list[int]], list[list[int]]]:
    """Exchange the sums of the step over all ranks; also return the micro-batches of matched and mismatched
    examples."""
    cuts = [divide_examples(part, training.spec.native_trainer, packed=packed) for part in (examples, others)]
    own = [*step_sums(examples, loop.algorithm), *map(len, cuts)]
    tokens, sequences, chosen, *numbers = zip(*training.ranks.numbers_of_replicas(own), strict=True)
    parts, other_parts = (evened(cut, int(max(found))) for cut, found in zip(cuts, numbers, strict=True))
    return StepSums(sum(tokens), sum(sequences), num_chosen_tokens=sum(chosen)), parts, other_parts


def _accumulate(
    training: TrainingContext,
    loop: Loop,
    engine: Engine,
    reference: Scorer | None,
    rows: Sequence[Row],
    examples: Sequence[Example],
    parts: Sequence[list[int]],
    sums: StepSums,
    of_sources: SourceTotals,
) -> Totals:
    """Run forward and backward over this rank's examples; the gradients accumulate in the engine."""
    algorithm = loop.algorithm
    objective = ALGORITHMS[algorithm.name]
    totals = Totals()
    for part in parts:
        batch, sequences = _batch(training, loop, examples, part)
        output = score_batch(engine, reference, batch, sequences, algorithm)
        loss, stats = objective.loss(output, sequences, sums, algorithm)
        engine.backward(loss if part else loss * 0)
        if part:
            totals.add(stats)
            of_sources.add([rows[index] for index in part], output, sequences, sums)
    return totals


def _batch(
    training: TrainingContext, loop: Loop, examples: Sequence[Example], part: Sequence[int]
) -> tuple[SequenceBatch, MicroBatch]:
    """Collate one micro-batch on this rank's device, after a heartbeat; an empty one consists of padding."""
    training.beat(Phase.TRAIN)
    pad_id = training.tokenizer.pad_token_id
    padding = Example([pad_id], tuple([pad_id] for _ in examples[0].completions))
    chosen = [examples[index] for index in part] or [padding]
    return make_batch(chosen, loop.algorithm, pad_id, training.ranks.device)


@torch.no_grad()
def _measure(
    training: TrainingContext,
    loop: Loop,
    policy: nn.Module,
    reference: Scorer | None,
    examples: Sequence[Example],
    parts: Sequence[list[int]],
) -> Mapping[str, float]:
    """Measure, over all ranks, the sums over the whole step that the loss needs before its first backward pass."""
    algorithm = loop.algorithm
    found: dict[str, float] = {}
    for part in parts:
        batch, sequences = _batch(training, loop, examples, part)
        output = score_batch(policy, reference, batch, sequences, algorithm)
        for name, value in ALGORITHMS[algorithm.name].measure(output, sequences, algorithm).items():
            found[name] = found.get(name, 0.0) + float(value) * bool(part)
    return dict(zip(found, training.ranks.sum_over_replicas(list(found.values())), strict=True))
