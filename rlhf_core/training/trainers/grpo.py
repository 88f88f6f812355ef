"""Group relative policy optimisation, strictly on-policy: sample, reward, one update, again.

The policy that samples is the policy that is updated, so the old log-probabilities are the present ones without
gradient, and no second pass computes them. A reference model exists only when its divergence is penalised or measured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.schemas.reports import Phase, SampleLine
from rlhf_core.training import health
from rlhf_core.training.algorithms.aggregation import masked_stat, step_normaliser
from rlhf_core.training.algorithms.grpo import group_advantages, grpo_loss, std_of_moments, zero_std_groups
from rlhf_core.training.batches import collate
from rlhf_core.training.metrics import StepMetrics, fingerprint
from rlhf_core.training.models import PolicyModel
from rlhf_core.training.rewards import RewardFunction, load_rewards, score
from rlhf_core.training.rollouts.transformers_engine import generate
from rlhf_core.training.seeds import sample_seed
from rlhf_core.training.trainers.engine import Engine, learning_rate
from rlhf_core.training.trainers.session import Session, Stage, Step, Totals
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
    session: Session,
    stage: Stage,
    policy: PolicyModel,
    engine: Engine,
    reference: PolicyModel | None,
) -> bool:
    """Make the steps of ``stage`` that are left.

    Args:
        reference: the policy as it was at the start of the stage, if its divergence is wanted.

    Returns:
        Whether it ended early because an agent asked for it.
    """
    spec = session.spec
    functions = load_rewards(spec.reward.functions)
    for number in session.steps_left(stage):
        step = session.begin_step(number)
        rollout = _sample(session, step, policy, functions)

        with step.watch.part("train"):
            session.beat(Phase.TRAIN)
            rewards = rollout.rewards
            num_tokens, num_sequences, total, total_of_squares = session.ranks.sum(
                [rollout.num_tokens, rewards.numel(), float(rewards.sum()), float(rewards.square().sum())]
            )
            batch_std = std_of_moments(num_sequences, total, total_of_squares)
            advantages = group_advantages(rewards, spec.grpo.advantage_scale, spec.grpo.advantage_epsilon, batch_std)
            normaliser = step_normaliser(
                spec.grpo.loss_aggregation, num_tokens, num_sequences, spec.rollout.max_new_tokens
            )
            totals = _accumulate(session, engine, reference, rollout, advantages.flatten(), normaliser)
            rate = learning_rate(number - stage.first_step + 1, stage.optimizer, stage.num_steps)
            grad_norm = engine.step(rate)

        metrics = step.metrics
        metrics.mean("train/loss", *totals.read("loss/policy"))
        metrics.shared("train/grad_norm", grad_norm)
        metrics.shared("train/changed_share", engine.changed_share(policy))
        metrics.shared("train/learning_rate", rate)
        metrics.total("train/num_tokens", rollout.num_tokens)
        metrics.mean("rollout/entropy", *totals.read("entropy"))
        metrics.mean("rollout/train_gap", *totals.read("train_gap"))
        low, weight = totals.read("policy/clip_low_share")
        metrics.mean("policy/clip_share", low + totals.read("policy/clip_high_share")[0], weight)
        if reference is not None:
            metrics.mean("policy/kl", *totals.read("policy/kl"))
        _add_rollout_metrics(metrics, rollout)
        metrics.total("speed/tokens_per_s", rollout.num_tokens / step.watch.seconds())
        if spec.train.log_samples_every and (number - stage.first_step) % spec.train.log_samples_every == 0:
            session.write_samples(_sample_lines(rollout, advantages, number))
        if session.end_step(step, stage, policy.causal_lm, engine):
            return True
    return False


def _sample(session: Session, step: Step, policy: PolicyModel, functions: dict[str, RewardFunction]) -> Rollout:
    """Complete and reward this rank's prompts of the step."""
    spec = session.spec
    num_samples = spec.grpo.samples_per_prompt
    with step.watch.part("rollout"):
        session.beat(Phase.ROLLOUT)
        rows, prompts = session.take_rows(spec.grpo.prompts_per_step)
        seeds = [[sample_seed(spec.seed, step.number, row.uid, i) for i in range(num_samples)] for row in rows]
        completions = generate(
            policy.causal_lm,
            session.tokenizer,
            prompts,
            seeds,
            max_new_tokens=spec.rollout.max_new_tokens,
            temperature=spec.rollout.temperature,
            batch_size=spec.rollout.batch_size,
            beat=session.beating(Phase.ROLLOUT),
        )
    with step.watch.part("reward"):
        row_of_each = [row for row in rows for _ in range(num_samples)]
        texts = [completion.text for group in completions for completion in group]
        total, by_function = score(functions, spec.reward.weights, row_of_each, texts, session.beating(Phase.REWARD))
    rewards = torch.tensor(total, dtype=torch.float64).view(len(rows), num_samples)
    return Rollout(rows, prompts, seeds, completions, rewards, by_function)


def _accumulate(
    session: Session,
    engine: Engine,
    reference: PolicyModel | None,
    rollout: Rollout,
    advantages: Tensor,
    normaliser: float,
) -> Totals:
    """Forward and backward over this rank's sequences; the gradients are left in the engine.

    Args:
        advantages: ``[P*G]``.
        normaliser: what the loss of the whole step, over all ranks, is divided by.
    """
    spec, device = session.spec, session.ranks.device
    totals = Totals()
    prompts = [prompt for prompt, group in zip(rollout.prompts, rollout.completions, strict=True) for _ in group]
    completions = rollout.flat
    lengths = [len(prompt) + len(made.token_ids) for prompt, made in zip(prompts, completions, strict=True)]
    for part in session.micro_batches(lengths):
        session.beat(Phase.TRAIN)
        batch = collate(
            [prompts[i] for i in part],
            [completions[i].token_ids for i in part],
            session.tokenizer.pad_token_id,
            device,
        )
        inputs = {"target_mask": batch.target_mask, "temperature": spec.rollout.temperature}
        logprobs, entropy = engine(batch.input_ids, **inputs)
        ref_logprobs = None
        if reference is not None:
            with torch.no_grad():
                ref_logprobs, _ = reference(batch.input_ids, **inputs)
        loss, stats = grpo_loss(
            logprobs,
            None,
            advantages[part].to(device),
            batch.target_mask,
            normaliser=normaliser,
            clip_low=spec.grpo.clip_low,
            clip_high=spec.grpo.clip_high,
            ref_logprobs=ref_logprobs,
            kl_coefficient=spec.grpo.kl_coefficient,
            aggregation=spec.grpo.loss_aggregation,
        )
        engine.backward(loss)
        sampled = batch.place([completions[i].logprobs for i in part])
        totals.add(stats)
        totals.add(
            {
                "entropy": masked_stat(entropy, batch.target_mask),
                "train_gap": masked_stat((logprobs.detach() - sampled).abs(), batch.target_mask),
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
    metrics.each(health.SAME_GROUPS, sum(len(set(group)) == 1 for group in groups) / num_groups)
    metrics.each(health.NUM_DISTINCT, len({made for group in groups for made in group}))
    metrics.each(health.FINGERPRINT, fingerprint(made for group in groups for made in group))
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
