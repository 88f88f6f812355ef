"""The training loop of algorithms that sample: sample, reward, update one or more times, repeat.

A step is one batch of completions, however many updates it is used for (``updates.py``).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rlhf_core.diagnosis.health.state import FINGERPRINT, NUM_DISTINCT, SAME_GROUPS
from rlhf_core.schemas.reports import Phase, SampleLine
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.grpo import zero_std_groups
from rlhf_core.training.data.examples import Scorer
from rlhf_core.training.metrics import StepMetrics, fingerprint
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.rollouts.health_signals import add_signals
from rlhf_core.training.trainers.context import Loop, TrainingContext
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.trainers.ppo import Critic
from rlhf_core.training.trainers.sampling import Rollout, StepSampler
from rlhf_core.training.trainers.shared_batches import of_replica
from rlhf_core.training.trainers.source_metrics import add_shares
from rlhf_core.training.trainers.step import Totals, TrainingStep
from rlhf_core.training.trainers.updates import PolicyUpdates


def train(
    training: TrainingContext,
    loop: Loop,
    policy: PolicyModel,
    engine: Engine,
    reference: Scorer | None,
    critic: Critic | None = None,
    in_flight: Iterable[Mapping[str, Any]] = (),
) -> bool:
    """Run the remaining steps of ``loop``.

    Args:
        reference: the reference model of the loop, if the algorithm needs one.
        critic: the value model, if the algorithm needs it.
        in_flight: completions already sampled for the first of these steps, from each rank that saved the checkpoint.

    Returns:
        Whether the loop stopped early because an agent requested it.
    """
    spec, objective = training.spec, ALGORITHMS[loop.algorithm.name]
    training.scorer.load(training.beating(Phase.REWARD))
    sampler = StepSampler(training, loop, policy.causal_lm, in_flight)
    for number in training.steps_left(loop):
        step = training.begin_step(number)
        rollout, groups, places = sampler.sample(step)
        training.rollouts.sleep()
        trained = rollout.take(groups)
        with step.timed("train"):
            training.beat(Phase.TRAIN)
            batch = of_replica(trained.batch(places, mask_truncated=loop.algorithm.masks_truncated), training.ranks)
            updates = PolicyUpdates(training, loop, engine, policy, reference, batch, step, critic)
            advantages = updates.make()

        step.add(objective.metrics, updates.totals)
        if not updates.num_tokens:  # every completion was truncated and is excluded
            step.metrics.shared("train/loss", 0.0)
        step.metrics.mean("rollout/entropy", *updates.totals.read("entropy"))
        _add_engine_metrics(step, spec, rollout, updates.totals)
        _add_rollout_metrics(step.metrics, rollout)
        _add_source_metrics(step.metrics, training.source_names, rollout)
        if training.evaluator.conversations is not None:
            step.times_s["tools"] += training.evaluator.conversations.take_seconds()
            _add_turn_metrics(step.metrics, rollout)
        for name, count in training.rollouts.take_counts().items():
            step.metrics.total(name, count)
        seeds = [prompt.seeds for prompt in rollout.prompts]
        add_signals(step.metrics, seeds, [len(made.sampled_ids) for made in rollout.flat], rollout.rewards)
        if spec.reward.on_failure == "zero":
            step.metrics.mean("reward/failed_share", rollout.scores.num_failed, len(rollout.flat))
        step.metrics.total("speed/tokens_per_s", rollout.num_tokens / step.seconds())
        every = spec.native_trainer.log_samples_every
        if every and (number - loop.first_step) % every == 0 and groups:
            training.write_samples(_sample_lines(trained, advantages.tokens, number))
        value_engine = critic.engine if critic else None
        ahead = (sampler.position, sampler.in_flight)
        if training.end_step(step, loop, policy.causal_lm, engine, value_engine, *ahead):
            return True
    return False


def _add_engine_metrics(step: TrainingStep, spec: RunSpec, rollout: Rollout, totals: Totals) -> None:
    """Add the difference between the sampling policy and the trained one."""
    if not spec.rollout.max_staleness:
        step.metrics.mean("rollout/train_gap", *totals.read("train_gap"))
        return
    # With weights one step behind, the difference includes the update, which is not the engine's fault.
    step.metrics.mean("rollout/policy_gap", *totals.read("train_gap"))
    behind = sum(step.number - 1 - made.weight_version for made in rollout.flat)
    step.metrics.mean("rollout/staleness", behind, len(rollout.flat))


def _add_rollout_metrics(metrics: StepMetrics, rollout: Rollout) -> None:
    """Add the metrics that distinguish a healthy step from a degenerate one; the loss alone does not."""
    completions = rollout.flat
    num_groups = len(rollout.prompts)
    metrics.mean("reward/mean", float(rollout.rewards.sum()), len(completions))
    # If completions of one prompt are not compared, all those of a rank form one group.
    compared = rollout.rewards if rollout.rewards.shape[1] > 1 else rollout.rewards.view(1, -1)
    metrics.mean("reward/std", float(compared.std(-1).nan_to_num().sum()), len(compared))
    for name, values in rollout.scores.by_function.items():
        judged = [value for value in values if value is not None]
        metrics.mean(f"reward/{name}", sum(judged), len(judged))
    metrics.mean("rollout/length_mean", rollout.num_tokens, len(completions))
    metrics.mean("rollout/truncated_share", sum(not made.finished for made in completions), len(completions))
    metrics.mean("rollout/zero_std_groups", int(zero_std_groups(compared).sum()), len(compared))
    metrics.highest("reward/max", float(rollout.rewards.max()))
    metrics.lowest("reward/min", float(rollout.rewards.min()))
    groups = [[tuple(made.sampled_ids) for made in group] for group in rollout.completions]
    metrics.mean("rollout/distinct_share", sum(len(set(group)) for group in groups), len(completions))
    # Only per-rank values show which ranks repeat themselves or each other.
    metrics.each(SAME_GROUPS, sum(len(set(group)) == 1 < len(group) for group in groups) / num_groups)
    metrics.each(NUM_DISTINCT, len({made for group in groups for made in group}))
    metrics.each(FINGERPRINT, fingerprint(made for group in groups for made in group))
    samples = [
        (prompt.row.uid, index, made.token_ids)
        for prompt, group in zip(rollout.prompts, rollout.completions, strict=True)
        for index, made in enumerate(group)
    ]
    metrics.shared_share("rollout/shared_share", (f"{uid} {token_ids}" for uid, _, token_ids in samples))
    metrics.digest("rollout/seed_digest", (f"{seed}" for prompt in rollout.prompts for seed in prompt.seeds))
    metrics.digest("rollout/completion_digest", (f"{uid} {index} {token_ids}" for uid, index, token_ids in samples))


def _add_source_metrics(metrics: StepMetrics, names: Sequence[str], rollout: Rollout) -> None:
    """Add the share and the mean reward of each source of a mixture."""
    add_shares(metrics, names, [prompt.row for prompt in rollout.prompts])
    for name in names:
        of_source = rollout.rewards[[prompt.row.source == name for prompt in rollout.prompts]].flatten().tolist()
        metrics.mean(f"reward/mean/{name}", sum(of_source), len(of_source))


def _add_turn_metrics(metrics: StepMetrics, rollout: Rollout) -> None:
    """Add the metrics of rollouts of several turns."""
    episodes = [made.episode for made in rollout.flat if made.episode is not None]
    num_calls = sum(one.num_calls for one in episodes)
    metrics.mean("turns/per_rollout", sum(len(one.turns) for one in episodes), len(episodes))
    metrics.mean("turns/calls", num_calls, len(episodes))
    metrics.mean("turns/failed_share", sum(one.num_failed for one in episodes), num_calls)
    metrics.mean("turns/observation_tokens", sum(one.sampled.count(False) for one in episodes), len(episodes))
    for name, end in (("out_of_turns", "turns"), ("out_of_tokens", "tokens"), ("lost", "failure")):
        metrics.mean(f"turns/{name}_share", sum(one.end == end for one in episodes), len(episodes))


def _sample_lines(rollout: Rollout, advantages: Tensor, step: int) -> list[SampleLine]:
    """Format the first group of this rank."""
    prompt, group = rollout.prompts[0], rollout.completions[0]
    return [
        SampleLine(
            step=step,
            prompt_uid=prompt.row.uid,
            sample_index=index,
            seed=prompt.seeds[index],
            weight_version=made.weight_version,
            prompt=prompt.row.prompt,
            completion=made.shown,
            answer=prompt.row.answer,
            reward=float(rollout.rewards[0, index]),
            advantage=float(advantages[index, 0]) if made.token_ids else 0.0,
        )
        for index, made in enumerate(group)
    ]
