"""The loop of algorithms that train on the rows of the data: supervised fine-tuning."""

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import MicroBatch, StepSums
from rlhf_core.training.data import encode_targets
from rlhf_core.training.models import PolicyModel
from rlhf_core.training.trainers.context import Loop, Totals, TrainingContext
from rlhf_core.training.trainers.engine import Engine


def train(
    training: TrainingContext, loop: Loop, policy: PolicyModel, engine: Engine, reference: PolicyModel | None
) -> bool:
    """Make the steps of ``loop`` that are left.

    Args:
        reference: the policy as it was at the start of the loop, if the algorithm needs it.

    Returns:
        Whether it ended early because an agent asked for it.
    """
    ranks, algorithm = training.ranks, loop.algorithm
    objective = ALGORITHMS[algorithm.name]
    for number in training.steps_left(loop):
        step = training.begin_step(number)
        training.beat(Phase.TRAIN)
        rows, prompts = training.take_rows(algorithm.rows_per_step)
        targets = encode_targets(rows, training.tokenizer)

        with step.watch.part("train"):
            own_tokens = sum(len(target) for target in targets)
            num_tokens, num_sequences = ranks.sum([own_tokens, len(targets)])
            sums = StepSums(num_tokens, num_sequences)
            totals = Totals()
            lengths = [len(prompt) + len(target) for prompt, target in zip(prompts, targets, strict=True)]
            for part in training.micro_batches(lengths):
                batch, output, _ = training.forward(
                    engine, reference, [prompts[i] for i in part], [targets[i] for i in part]
                )
                loss, stats = objective.loss(output, MicroBatch(batch.target_mask), sums, algorithm)
                engine.backward(loss)
                totals.add(stats)
            training.update(step, loop, engine, policy, own_tokens)

        step.add(objective.metrics, totals)
        step.metrics.total("speed/tokens_per_s", own_tokens / step.watch.seconds())
        if training.end_step(step, loop, policy.causal_lm, engine):
            return True
    return False
