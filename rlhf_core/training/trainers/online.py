"""The loop of algorithms that sample: sample, reward, update once or several times, again.

A step is one batch of completions, whatever number of updates is made of it (``updates.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import Phase, SampleLine
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.grpo import zero_std_groups
from rlhf_core.training.algorithms.objective import SampledBatch
from rlhf_core.training.examples import Scorer
from rlhf_core.training.health_signals import add_signals
from rlhf_core.training.health_state import FINGERPRINT, NUM_DISTINCT, SAME_GROUPS
from rlhf_core.training.metrics import StepMetrics, fingerprint
from rlhf_core.training.models import PolicyModel
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.scoring import Scores
from rlhf_core.training.seeds import sample_seed
from rlhf_core.training.trainers.context import Loop, TrainingContext, TrainingStep
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.trainers.ppo import Critic
from rlhf_core.training.trainers.updates import PolicyUpdates, StepBatch
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
    scores: Scores
    """The same by function, P*G values each, and failures."""

    @property
    def flat(self) -> list[Completion]:
        """All completions, group after group."""
        return [completion for group in self.completions for completion in group]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(completion.token_ids) for completion in self.flat)

    def take(self, groups: Sequence[int]) -> "Rollout":
        """The same with some of the groups only."""
        size = self.rewards.shape[1]
        flat = [group * size + index for group in groups for index in range(size)]
        return Rollout(
            [self.rows[group] for group in groups],
            [self.prompts[group] for group in groups],
            [self.seeds[group] for group in groups],
            [self.completions[group] for group in groups],
            self.rewards[list(groups)],
            self.scores.take(flat),
        )

    def batch(self, places: Sequence[int], *, mask_truncated: bool) -> StepBatch:
        """The completions as the updates take them.

        Args:
            places: index of each group among those of the whole step, over all ranks.
        """
        size = self.rewards.shape[1]
        lengths = torch.tensor([len(completion.token_ids) for completion in self.flat], dtype=torch.int64)
        mask = torch.arange(max(lengths.tolist(), default=0)) < lengths[:, None]
        finished = torch.tensor([completion.finished for completion in self.flat], dtype=torch.bool)
        trained = mask & finished[:, None] if mask_truncated else mask
        return StepBatch(
            [prompt for prompt in self.prompts for _ in range(size)],
            self.flat,
            [place * size + index for place in places for index in range(size)],
            SampledBatch(self.rewards, mask, finished, trained),
        )


def train(
    training: TrainingContext,
    loop: Loop,
    policy: PolicyModel,
    engine: Engine,
    reference: Scorer | None,
    critic: Critic | None = None,
) -> bool:
    """Make the steps of ``loop`` that are left.

    Args:
        reference: the policy as it was at the start of the loop, if the algorithm needs it.
        critic: the value model, likewise.

    Returns:
        Whether it ended early because an agent asked for it.
    """
    spec, objective = training.spec, ALGORITHMS[loop.algorithm.name]
    training.scorer.load(training.beating(Phase.REWARD))
    for number in training.steps_left(loop):
        step = training.begin_step(number)
        with step.watch.part("weight_sync"):
            training.beat(Phase.WEIGHT_SYNC)
            training.rollouts.load(policy.causal_lm, number - 1, training.beating(Phase.WEIGHT_SYNC))
        rollout, groups, places = _sample(training, loop, step)
        training.rollouts.sleep()
        trained = rollout.take(groups)
        with step.watch.part("train"):
            training.beat(Phase.TRAIN)
            batch = trained.batch(places, mask_truncated=loop.algorithm.masks_truncated)
            updates = PolicyUpdates(training, loop, engine, policy, reference, batch, step, critic)
            advantages = updates.make()

        step.add(objective.metrics, updates.totals)
        if not updates.num_tokens:  # every completion was cut off, and is left out
            step.metrics.shared("train/loss", 0.0)
        step.metrics.mean("rollout/entropy", *updates.totals.read("entropy"))
        step.metrics.mean("rollout/train_gap", *updates.totals.read("train_gap"))
        _add_rollout_metrics(step.metrics, rollout)
        for name, count in training.rollouts.take_counts().items():
            step.metrics.total(name, count)
        add_signals(step.metrics, rollout.seeds, [len(made.token_ids) for made in rollout.flat], rollout.rewards)
        if spec.reward.on_failure == "zero":
            step.metrics.mean("reward/failed_share", rollout.scores.num_failed, len(rollout.flat))
        step.metrics.total("speed/tokens_per_s", rollout.num_tokens / step.watch.seconds())
        every = spec.native_trainer.log_samples_every
        if every and (number - loop.first_step) % every == 0 and groups:
            training.write_samples(_sample_lines(trained, advantages.tokens, number))
        if training.end_step(step, loop, policy.causal_lm, engine, critic):
            return True
    return False


def _sample(training: TrainingContext, loop: Loop, step: TrainingStep) -> tuple[Rollout, list[int], list[int]]:
    """Complete and reward this rank's prompts of the step.

    Where an algorithm wants groups with something to compare only, it is done again with the next prompts, until there
    are as many as a step takes, or as often as it may be done (dynamic sampling, DAPO, arXiv 2503.14476, sec. 3.2).

    Returns:
        All that was sampled, the groups of it to train on, and the index of each of these among those of all ranks.
    """
    ranks, wanted = training.ranks, loop.algorithm.rows_per_step
    rounds: list[Rollout] = []
    flags: list[list[list[float]]] = []
    for number in range(loop.algorithm.sampling_rounds):
        rounds.append(_sample_round(training, loop, step, number))
        if loop.algorithm.sampling_rounds == 1:
            own = len(rounds[0].rows)
            return rounds[0], list(range(own)), list(range(ranks.rank * own, (ranks.rank + 1) * own))
        flags.append(ranks.gather_numbers((~zero_std_groups(rounds[-1].rewards)).double().tolist()))
        if sum(sum(map(sum, told)) for told in flags) >= wanted:
            break
    groups, places = select_groups(flags, wanted, ranks.rank)
    return _joined(rounds), groups, places


def select_groups(flags: Sequence[Sequence[Sequence[float]]], wanted: int, rank: int) -> tuple[list[int], list[int]]:
    """The groups of a step: the first ones with something to compare, and others where there are not enough.

    The choice follows from the order in which prompts were taken, so it is the same on any number of ranks. Ranks may
    get different numbers of groups.

    Args:
        flags: 1 for each group with different rewards, by round, rank and group.
        wanted: groups of the step, over all ranks.

    Returns:
        This rank's groups, counted over its rounds, and their places among all that were chosen.
    """
    found = [
        (number, owner, index, flag)
        for number, told in enumerate(flags)
        for owner, own in enumerate(told)
        for index, flag in enumerate(own)
    ]
    preferred = sorted(range(len(found)), key=lambda place: (not found[place][3], place))
    chosen = [found[place] for place in sorted(preferred[:wanted])]
    mine = [
        (number * len(flags[0][rank]) + index, place)
        for place, (number, owner, index, _) in enumerate(chosen)
        if owner == rank
    ]
    return [group for group, _ in mine], [place for _, place in mine]


def _sample_round(
    training: TrainingContext,
    loop: Loop,
    step: TrainingStep,
    number: int,
) -> Rollout:
    """Complete and reward the next prompts; ``number`` counts the rounds of the step from 0."""
    spec, num_samples = training.spec, loop.algorithm.group
    with step.watch.part("rollout"):
        training.beat(Phase.ROLLOUT)
        rows, prompts = training.take_rows(loop.algorithm.rows_per_step)
        # A prompt that comes again in a later round of the step gets other samples.
        indices = range(number * num_samples, (number + 1) * num_samples)
        seeds = [[sample_seed(spec.seed, step.number, row.uid, index) for index in indices] for row in rows]
        sampling = Sampling(spec.rollout.max_new_tokens, spec.rollout.temperature, spec.rollout.batch_size)
        completions = training.rollouts.sample(
            prompts, seeds, sampling, step.number - 1, training.beating(Phase.ROLLOUT)
        )
    with step.watch.part("reward"):
        row_of_each = [row for row in rows for _ in range(num_samples)]
        made = [completion for group in completions for completion in group]
        scores = training.scorer.score(
            row_of_each,
            [completion.text for completion in made],
            step.number,
            training.beating(Phase.REWARD),
            number,
            [completion.finished for completion in made],
        )
        training.warn(FailureKind.REWARD_FUNCTION, scores.warnings)
    rewards = torch.tensor(scores.total, dtype=torch.float64).view(len(rows), num_samples)
    return Rollout(rows, prompts, seeds, completions, rewards, scores)


def _joined(rounds: Sequence[Rollout]) -> Rollout:
    """All rounds of a step as one."""
    return Rollout(
        [row for one in rounds for row in one.rows],
        [prompt for one in rounds for prompt in one.prompts],
        [seeds for one in rounds for seeds in one.seeds],
        [group for one in rounds for group in one.completions],
        torch.cat([one.rewards for one in rounds]),
        Scores.joined([one.scores for one in rounds]),
    )


def _add_rollout_metrics(metrics: StepMetrics, rollout: Rollout) -> None:
    """What tells a healthy step from a degenerate one; the loss does not."""
    completions = rollout.flat
    num_groups = len(rollout.rows)
    metrics.mean("reward/mean", float(rollout.rewards.sum()), len(completions))
    # Where no completions of one prompt are compared, those of a rank are: one group.
    compared = rollout.rewards if rollout.rewards.shape[1] > 1 else rollout.rewards.view(1, -1)
    metrics.mean("reward/std", float(compared.std(-1).nan_to_num().sum()), len(compared))
    for name, values in rollout.scores.by_function.items():
        metrics.mean(f"reward/{name}", sum(values), len(values))
    metrics.mean("rollout/length_mean", rollout.num_tokens, len(completions))
    metrics.mean("rollout/truncated_share", sum(not made.finished for made in completions), len(completions))
    metrics.mean("rollout/zero_std_groups", int(zero_std_groups(compared).sum()), len(compared))
    metrics.highest("reward/max", float(rollout.rewards.max()))
    metrics.lowest("reward/min", float(rollout.rewards.min()))
    groups = [[tuple(made.token_ids) for made in group] for group in rollout.completions]
    metrics.mean("rollout/distinct_share", sum(len(set(group)) for group in groups), len(completions))
    # Which ranks repeat themselves, or each other, shows only rank by rank.
    metrics.each(SAME_GROUPS, sum(len(set(group)) == 1 < len(group) for group in groups) / num_groups)
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
            weight_version=made.weight_version,
            prompt=row.prompt,
            completion=made.text,
            answer=row.answer,
            reward=float(rollout.rewards[0, index]),
            advantage=float(advantages[index, 0]) if made.token_ids else 0.0,
        )
        for index, made in enumerate(group)
    ]
