"""The training loop of algorithms that learn from the data alone: from reference answers or completion pairs."""

import functools

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.data.examples import RowPasses, Scorer, make_examples
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.models.reward_model import RewardModel
from rlhf_core.training.trainers.context import Loop, TrainingContext
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.trainers.source_metrics import SourceTotals
from rlhf_core.training.trainers.step import Totals


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
    algorithm, tokenizer, trainer = loop.algorithm, training.tokenizer, training.spec.native_trainer
    objective = ALGORITHMS[algorithm.name]
    beat = functools.partial(training.beat, Phase.TRAIN)
    for number in training.steps_left(loop):
        step = training.begin_step(number)
        beat()
        if training.rollouts.version is not None:  # an evaluation has woken the engine, whose memory training needs
            training.rollouts.sleep()
        before = training.rows_before(algorithm.rows_per_step) if algorithm.mismatches else []
        rows, prompts = training.take_rows(algorithm.rows_per_step, by_length=True)
        examples = make_examples(rows, prompts, tokenizer, algorithm)

        with step.timed("train"):
            passes = RowPasses(examples, before, tokenizer, training.ranks, trainer, algorithm, packed=policy.packs)
            sums = passes.sums(policy, reference, beat)
            totals, of_sources = Totals(), SourceTotals(training.source_names, algorithm)
            for part, batch, output in passes.run(engine, reference, beat):
                loss, stats = objective.loss(output, batch, sums, algorithm)
                engine.backward(loss if part else loss * 0)
                if part:
                    totals.add(stats)
                    of_sources.add([rows[index] for index in part], output, batch, sums)
            training.apply(step, loop, engine, sum(example.num_tokens for example in examples))
            training.measure_updates(step, engine)

        step.add(objective.metrics, totals)
        of_sources.write(step.metrics, rows)
        step.metrics.total("speed/tokens_per_s", step.num_tokens / step.seconds())
        if training.is_evaluated(number) and training.evaluator.scores_rows_for(algorithm):
            with step.timed("evaluate"):
                scores = training.evaluator.row_scores(policy, reference, training.beating(Phase.EVALUATE))
                for name, found in scores.items():
                    step.metrics.mean(f"eval/{name}", *found)
        if training.end_step(step, loop, policy.pretrained, engine):
            return True
    return False
