"""The loop of algorithms that sample, strictly on-policy: sample, reward, one update, again.

The policy that samples is the policy that is updated, so the old log-probabilities are the present ones without
gradient, and no second pass computes them. A reference model exists only where the algorithm needs one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.schemas.reports import Phase, SampleLine
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.aggregation import masked_stat
from rlhf_core.training.algorithms.grpo import zero_std_groups
from rlhf_core.training.algorithms.objective import MicroBatch, StepSums
from rlhf_core.training.health_state import FINGERPRINT, NUM_DISTINCT, SAME_GROUPS
from rlhf_core.training.metrics import StepMetrics, fingerprint
from rlhf_core.training.models import PolicyModel
from rlhf_core.training.rewards import RewardFunction, load_rewards, score
from rlhf_core.training.rollouts.transformers_engine import generate
from rlhf_core.training.seeds import sample_seed
from rlhf_core.training.trainers.context import Loop, Totals, TrainingContext, TrainingStep
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.types import Completion, Row


@dataclass(frozen=True)
class Rollout:
    """This rank's completions of one step, ``P`` prompts with ``G`` samples each."""

    rows: list[Row]
    prompts: list[list[int]]
    seeds: list[list[int]]
    completions: list[list[Completion]]
    rewards: Tensor
    """``[P, G]`` float64, summed over the reward functions."""
    by_function: dict[str, list[float]]
    """Unweighted rewards of each function, P*G values."""

    @property
    def flat(self) -> list[Completion]:
        """All completions, group after group."""
        return [completion for group in self.completions for completion in group]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(completion.token_ids) for completion in self.flat)


def train(
    training: TrainingContext, loop: Loop, policy: PolicyModel, engine: Engine, reference: PolicyModel | None
) -> bool:
    """Make the steps of ``loop`` that are left.

    Args:
        reference: the policy as it was at the start of the loop, if the algorithm needs it.

    Returns:
        Whether it ended early because an agent asked for it.
    """
    spec, objective = training.spec, ALGORITHMS[loop.algorithm.name]
    functions = load_rewards(spec.reward.functions)
    for number in training.steps_left(loop):
        step = training.begin_step(number)
        rollout = _sample(training, loop, step, policy, functions)

        with step.watch.part("train"):
            training.beat(Phase.TRAIN)
            rewards = rollout.rewards
            num_tokens, num_sequences, total, squares = training.ranks.sum(
                [rollout.num_tokens, rewards.numel(), float(rewards.sum()), float(rewards.square().sum())]
            )
            sums = StepSums(num_tokens, num_sequences, total, squares, spec.rollout.max_new_tokens)
            advantages = objective.advantages(rewards, sums, loop.algorithm)
            totals = _accumulate(training, loop, engine, reference, rollout, advantages.flatten(), sums)
            training.update(step, loop, engine, policy, rollout.num_tokens)

        step.add(objective.metrics, totals)
        step.metrics.mean("rollout/entropy", *totals.read("entropy"))
        step.metrics.mean("rollout/train_gap", *totals.read("train_gap"))
        _add_rollout_metrics(step.metrics, rollout)
        step.metrics.total("speed/tokens_per_s", rollout.num_tokens / step.watch.seconds())
        every = spec.native_trainer.log_samples_every
        if every and (number - loop.first_step) % every == 0:
            training.write_samples(_sample_lines(rollout, advantages, number))
        if training.end_step(step, loop, policy.causal_lm, engine):
            return True
    return False


def _sample(
    training: TrainingContext, loop: Loop, step: TrainingStep, policy: PolicyModel, functions: dict[str, RewardFunction]
) -> Rollout:
    """Complete and reward this rank's prompts of the step."""
    spec, num_samples = training.spec, loop.algorithm.group
    with step.watch.part("rollout"):
        training.beat(Phase.ROLLOUT)
        rows, prompts = training.take_rows(loop.algorithm.rows_per_step)
        seeds = [[sample_seed(spec.seed, step.number, row.uid, i) for i in range(num_samples)] for row in rows]
        completions = generate(
            policy.causal_lm,
            training.tokenizer,
            prompts,
            seeds,
            max_new_tokens=spec.rollout.max_new_tokens,
            temperature=spec.rollout.temperature,
            batch_size=spec.rollout.batch_size,
            beat=training.beating(Phase.ROLLOUT),
        )
    with step.watch.part("reward"):
        row_of_each = [row for row in rows for _ in range(num_samples)]
        texts = [completion.text for group in completions for completion in group]
        total, by_function = score(functions, spec.reward.weights, row_of_each, texts, training.beating(Phase.REWARD))
    rewards = torch.tensor(total, dtype=torch.float64).view(len(rows), num_samples)
    return Rollout(rows, prompts, seeds, completions, rewards, by_function)


def _accumulate(
    training: TrainingContext,
    loop: Loop,
    engine: Engine,
    reference: PolicyModel | None,
    rollout: Rollout,
    advantages: Tensor,
    sums: StepSums,
) -> Totals:
    """Forward and backward over this rank's sequences; the gradients are left in the engine.

    Args:
        advantages: ``[P*G]``.
        sums: figures of the whole step, over all ranks.
    """
    objective = ALGORITHMS[loop.algorithm.name]
    totals = Totals()
    prompts = [prompt for prompt, group in zip(rollout.prompts, rollout.completions, strict=True) for _ in group]
    completions = rollout.flat
    lengths = [len(prompt) + len(made.token_ids) for prompt, made in zip(prompts, completions, strict=True)]
    for part in training.micro_batches(lengths):
        batch, output, entropy = training.forward(
            engine,
            reference,
            [prompts[i] for i in part],
            [completions[i].token_ids for i in part],
            training.spec.rollout.temperature,
        )
        sequences = MicroBatch(batch.target_mask, advantages[part].to(training.ranks.device))
        loss, stats = objective.loss(output, sequences, sums, loop.algorithm)
        engine.backward(loss)
        sampled = batch.place([completions[i].logprobs for i in part])
        totals.add(stats)
        totals.add(
            {
                "entropy": masked_stat(entropy, batch.target_mask),
                "train_gap": masked_stat((output.logprobs.detach() - sampled).abs(), batch.target_mask),
            }
        )
    return totals


def _add_rollout_metrics(metrics: StepMetrics, rollout: Rollout) -> None:
    """What tells a healthy step from a degenerate one; the loss does not."""
    completions = rollout.flat
    num_groups = len(rollout.rows)
    metrics.mean("reward/mean", float(rollout.rewards.sum()), len(completions))
    metrics.mean("reward/std", float(rollout.rewards.std(-1).sum()), num_groups)
    for name, values in rollout.by_function.items():
        metrics.mean(f"reward/{name}", sum(values), len(values))
    metrics.mean("rollout/length_mean", rollout.num_tokens, len(completions))
    metrics.mean("rollout/truncated_share", sum(not made.finished for made in completions), len(completions))
    metrics.mean("rollout/zero_std_groups", int(zero_std_groups(rollout.rewards).sum()), num_groups)
    metrics.highest("reward/max", float(rollout.rewards.max()))
    metrics.lowest("reward/min", float(rollout.rewards.min()))
    groups = [[tuple(made.token_ids) for made in group] for group in rollout.completions]
    metrics.mean("rollout/distinct_share", sum(len(set(group)) for group in groups), len(completions))
    # Which ranks repeat themselves, or each other, shows only rank by rank.
    metrics.each(SAME_GROUPS, sum(len(set(group)) == 1 for group in groups) / num_groups)
    metrics.each(NUM_DISTINCT, len({made for group in groups for made in group}))
    metrics.each(FINGERPRINT, fingerprint(made for group in groups for made in group))
    metrics.shared_share(
        "rollout/shared_share",
        (
            f"{row.uid} {made.token_ids}"
            for row, group in zip(rollout.rows, rollout.completions, strict=True)
            for made in group
        ),
    )
    metrics.digest("rollout/seed_digest", (f"{seed}" for group in rollout.seeds for seed in group))
    metrics.digest(
        "rollout/completion_digest",
        (
            f"{row.uid} {index} {made.token_ids}"
            for row, group in zip(rollout.rows, rollout.completions, strict=True)
            for index, made in enumerate(group)
        ),
    )


def _sample_lines(rollout: Rollout, advantages: Tensor, step: int) -> list[SampleLine]:
    """The first group of this rank."""
    row, group, seeds = rollout.rows[0], rollout.completions[0], rollout.seeds[0]
    return [
        SampleLine(
            step=step,
            prompt_uid=row.uid,
            sample_index=index,
            seed=seeds[index],
            weight_version=step - 1,
            prompt=row.prompt,
            completion=made.text,
            answer=row.answer,
            reward=float(rollout.rewards[0, index]),
            advantage=float(advantages[0, index]),
        )
        for index, made in enumerate(group)
    ]
