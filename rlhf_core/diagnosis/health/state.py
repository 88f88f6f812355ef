"""State of the health judge, folded from the metrics of each step.

The state is part of every checkpoint, so that a resumed run is judged as if it had never stopped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.health import HealthSpec

NATS_PER_CHANCE = 25.0
"""A sampled token with an entropy of h nats differs from that of another sample with probability at least h / 25.

By Fano's inequality h is at most e (1 + ln(1/e) + ln(V)) for a chance e and V tokens; with e no smaller than 1e-5 and
a vocabulary of 160,000 the bracket is 25. So n repeated completions of s nats each have a chance of exp(-n s / 25)."""

LEAST_RATE_SHARE = 0.1
"""Share of a loop's highest learning rate from which weights must change. At the end of a schedule, or the beginning of
a warm-up, updates are so small that bfloat16 weights stay the same for many steps, and only their float32 copies in the
optimizer change."""

FINGERPRINT = "rollout/fingerprint"
SAME_GROUPS = "rollout/same_groups"
NUM_DISTINCT = "rollout/num_distinct"
"""Per-rank metrics of the completions: a hash of all of them in order, the share of groups whose completions are all
the same, and the number of distinct ones over all its prompts."""

SEEDS_IN_GROUPS = "rollout/seeds_in_groups"
SEEDS_ACROSS_PROMPTS = "rollout/seeds_across_prompts"
"""Per-rank metrics of the sampling seeds (``rlhf_core/training/rollouts/health_signals.py``)."""

LENGTH_CORRELATION = "reward/length_correlation"
LENGTH_SLOPE = "reward/length_slope"
"""Metrics of the completions of a prompt: correlation of reward and length, and reward for each further token."""

NO_GRADIENT = "the gradient is exactly 0 although there is something to learn from"
NO_CHANGE = "no weight changes although there is a gradient"
ALL_MASKED = (
    "every completion trained on is cut off at rollout.max_new_tokens, and the loss leaves such completions out "
    "(loops.main.algorithm.mask_truncated)"
)
"""Reasons for which a step changes nothing."""


@dataclass(frozen=True)
class Batch:
    """Size of a step of the main algorithm, and its ranks."""

    num_prompts: int
    """Number of prompts of a step, over all ranks."""
    samples_per_prompt: int
    nodes: tuple[str, ...]
    """Name of the node of each rank."""
    learns_from_rewards: bool = True
    """False if rewards are only measured."""

    @property
    def num_completions(self) -> int:
        """Number of completions of a step, over all ranks."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def repeats_per_rank(self) -> float:
        """Number of one rank's completions preceded by another completion of the same prompt."""
        return self.num_prompts * (self.samples_per_prompt - 1) / len(self.nodes)

    @property
    def completions_per_rank(self) -> float:
        """Number of completions of one rank."""
        return self.num_completions / len(self.nodes)


class Seen(Schema):
    """Figures kept of one step."""

    step: int
    reward: float
    has_spread: bool
    """At least one group had different rewards; without groups, at least one completion of the step."""
    entropy: float
    truncated: float
    length: float = 0.0
    """Mean length of a completion in tokens."""
    length_correlation: float | None = None
    length_slope: float | None = None
    """This and the following fields are None if the step lacks them."""
    kl: float | None = None
    train_gap: float | None = None
    clipped: float | None = None


class Repetition(Schema):
    """Ranks whose completions were repeated in every step since it began."""

    since_step: int = 0
    num_steps: int = 0
    ranks: tuple[int, ...] = ()
    nats: float = 0.0
    """Surprise for one rank: minus the logarithm of the probability, summed over the steps."""
    distinct: float = 0.0
    """Largest number of distinct completions of such a rank over all its prompts."""


class Level(Schema):
    """Mean reward of some consecutive steps."""

    since_step: int
    mean: float
    error: float
    """Standard error of that mean."""


class HealthState(Schema):
    """Everything known about the steps so far. Part of a checkpoint."""

    recent: tuple[Seen, ...] = ()
    """The last steps of the main algorithm, at most a window."""
    last_step: int = 0
    """The last step, whatever its loop."""
    num_steps: int = 0
    """Steps of the main algorithm so far."""
    last_step_sampled: int = 0
    """Last step of the main algorithm."""
    top: float = -math.inf
    """Highest reward of any completion so far."""
    floor: float = math.inf
    """Lowest reward of any completion so far."""
    first: Level | None = None
    """Reward of the first block of steps."""
    best: Level | None = None
    """The block with the highest reward."""
    first_entropy: float = 0.0
    """Mean entropy of the first block."""
    first_length: float = 0.0
    """Mean length of a completion in the first block, in tokens."""
    spread_ended: int = 0
    """Last step with any spread; 0 if there was none."""
    first_step: int = 0
    """First observed step of the main algorithm."""
    frozen_since: int = 0
    """First of the current consecutive steps that changed nothing; 0 if the last one changed something."""
    frozen_why: str = ""
    same_groups: Repetition = Repetition()
    """Ranks with the same completion throughout every group."""
    same_ranks: Repetition = Repetition()
    """Ranks with the same completions as another rank."""
    same_steps: Repetition = Repetition()
    """Ranks with the same completions as in the step before."""
    seeds_in_groups: Repetition = Repetition()
    """Ranks that sample several completions of a prompt with one seed."""
    seeds_across_prompts: Repetition = Repetition()
    """Ranks that sample several prompts with the same seeds."""
    seeds_repeated: float = 0.0
    """Largest share of such a rank's completions that repeat the seed of another completion."""
    same_seeds_since: int = 0
    """First of the current consecutive steps that all had the same seeds; 0 if the last one had others."""
    seed_digest: float | None = None
    """Digest of the sampling seeds of the last step."""
    fingerprints: tuple[float, ...] = ()
    """Hashes of the completions of the last step, by rank."""
    warned: tuple[tuple[str, int], ...] = ()
    """Findings already reported as warnings, with the last step that had them."""

    def of_other_ranks(self) -> "HealthState":
        """Drop the observations of individual ranks, for a run that resumes with a different number of them."""
        parts = ("same_groups", "same_ranks", "same_steps", "fingerprints")
        return self.model_copy(update={name: getattr(HealthState(), name) for name in parts})


# ---------------------------------------------------------------------------------------------------------------------
# Observation of a step


def observe(
    state: HealthState,
    spec: HealthSpec,
    batch: Batch,
    step: int,
    samples: bool,
    metrics: Mapping[str, float],
    by_rank: Mapping[str, Sequence[float]],
    peak_rate: float = 0.0,
) -> HealthState:
    """Return the state after one more step.

    Args:
        samples: whether the loop samples completions; otherwise only gradient and weights are judged.
        metrics: as in ``metrics.jsonl``.
        by_rank: per-rank metrics.
        peak_rate: highest learning rate of the loop; 0 judges every step as if it were trained at that rate.
    """
    has_spread = samples and _has_spread(batch, metrics)
    # A loss is exactly 0 only with a margin (hinge) that every pair has reached.
    has_signal = has_spread or not batch.learns_from_rewards if samples else metrics.get("train/loss") != 0
    state = _observe_weights(state, step, metrics, has_signal=has_signal, peak_rate=peak_rate)
    if not samples:
        return state
    seen = Seen(
        step=step,
        reward=metrics["reward/mean"],
        has_spread=has_spread,
        entropy=metrics["rollout/entropy"],
        truncated=metrics["rollout/truncated_share"],
        length=metrics["rollout/length_mean"],
        length_correlation=metrics.get(LENGTH_CORRELATION),
        length_slope=metrics.get(LENGTH_SLOPE),
        kl=metrics.get("policy/kl"),
        train_gap=metrics.get("rollout/train_gap"),
        clipped=_clipped_share(metrics),
    )
    state = _observe_repetitions(state, batch, seen, by_rank)
    state = _observe_seeds(state, batch, step, metrics.get("rollout/seed_digest"), by_rank)
    state = state.model_copy(
        update={
            "recent": (*state.recent, seen)[-spec.window_steps :],
            "num_steps": state.num_steps + 1,
            "first_step": state.first_step or step,
            "spread_ended": step if seen.has_spread else state.spread_ended,
            "top": max(state.top, metrics["reward/max"]),
            "floor": min(state.floor, metrics["reward/min"]),
        }
    )
    return _observe_blocks(state, spec, batch)


def _clipped_share(metrics: Mapping[str, float]) -> float | None:
    """Share of tokens without a gradient because of a clip, of which at most one applies to a token."""
    share = metrics.get("policy/clip_share")
    return None if share is None else share + metrics.get("policy/dual_clip_share", 0.0)


def _has_spread(batch: Batch, metrics: Mapping[str, float]) -> bool:
    """True if the rewards that the algorithm compares differ: within a group, or in the whole step without groups.

    Without groups, ``rollout/zero_std_groups`` compares the completions of each rank, of which there may be only one.
    """
    if batch.samples_per_prompt == 1:
        return metrics["reward/max"] > metrics["reward/min"]
    return metrics["rollout/zero_std_groups"] < 1


def _observe_weights(
    state: HealthState, step: int, metrics: Mapping[str, float], *, has_signal: bool, peak_rate: float
) -> HealthState:
    """Update the consecutive steps that changed nothing. Equal rewards (no signal) are judged separately."""
    reason, rate = "", metrics["train/learning_rate"]
    if metrics["train/grad_norm"] == 0:
        if has_signal:
            # At a rate of 0, PPO trains its value model alone, which counts no tokens.
            reason = ALL_MASKED if rate > 0 and metrics.get("train/num_tokens") == 0 else NO_GRADIENT
    elif rate > 0 and rate >= LEAST_RATE_SHARE * peak_rate and metrics.get("train/changed_share", 1.0) == 0:
        reason = NO_CHANGE
    since = (state.frozen_since or step) if reason else 0
    return state.model_copy(update={"frozen_since": since, "frozen_why": reason, "last_step": step})


def _observe_blocks(state: HealthState, spec: HealthSpec, batch: Batch) -> HealthState:
    """Update the first and the best block of steps, each a quarter of a window, so that a peak before a sudden drop
    counts."""
    size = block_steps(spec)
    if state.num_steps < size:
        return state
    steps = state.recent[-size:]
    level = mean_reward(state, steps, batch)
    changes: dict[str, object] = {}
    if state.first is None:
        changes = {
            "first": level,
            "first_entropy": fmean(seen.entropy for seen in steps),
            "first_length": fmean(seen.length for seen in steps),
        }
    if state.best is None or level.mean > state.best.mean:
        changes["best"] = level
    return state.model_copy(update=changes)


def _observe_repetitions(
    state: HealthState, batch: Batch, seen: Seen, by_rank: Mapping[str, Sequence[float]]
) -> HealthState:
    fingerprints = tuple(by_rank[FINGERPRINT])
    same = [rank for rank, share in enumerate(by_rank[SAME_GROUPS]) if share == 1]
    twins = [rank for rank, mark in enumerate(fingerprints) if fingerprints.count(mark) > 1]
    again = [
        rank
        for rank, (mark, before) in enumerate(zip(fingerprints, state.fingerprints, strict=False))
        if mark == before
    ]
    nats = max(0.0, seen.entropy) * seen.length / NATS_PER_CHANCE
    distinct = by_rank[NUM_DISTINCT]
    return state.model_copy(
        update={
            "fingerprints": fingerprints,
            "same_groups": _repeated(state.same_groups, seen.step, same, nats * batch.repeats_per_rank, distinct),
            # Of two ranks with the same completions, only one is a surprise.
            "same_ranks": _repeated(
                state.same_ranks, seen.step, twins, nats * batch.completions_per_rank / 2, distinct
            ),
            "same_steps": _repeated(state.same_steps, seen.step, again, nats * batch.completions_per_rank, distinct),
        }
    )


def _observe_seeds(
    state: HealthState, batch: Batch, step: int, digest: float | None, by_rank: Mapping[str, Sequence[float]]
) -> HealthState:
    in_groups, across = (by_rank.get(name, ()) for name in (SEEDS_IN_GROUPS, SEEDS_ACROSS_PROMPTS))
    marked = [[rank for rank, count in enumerate(counts) if count > 0] for counts in (in_groups, across)]
    share = max([0.0, *in_groups]) / batch.completions_per_rank
    is_same = digest is not None and digest == state.seed_digest
    return state.model_copy(
        update={
            "seeds_in_groups": _repeated(state.seeds_in_groups, step, marked[0], 0.0, [0.0] * len(in_groups)),
            "seeds_across_prompts": _repeated(state.seeds_across_prompts, step, marked[1], 0.0, [0.0] * len(across)),
            "seeds_repeated": max(share, state.seeds_repeated) if marked[0] else 0.0,
            "same_seeds_since": (state.same_seeds_since or state.last_step_sampled) if is_same else 0,
            "seed_digest": digest,
            "last_step_sampled": step,
        }
    )


def _repeated(
    before: Repetition, step: int, ranks: Sequence[int], nats: float, distinct: Sequence[float]
) -> Repetition:
    """Keep the ranks that are repeated again; start afresh if there are none."""
    kept = [rank for rank in before.ranks if rank in set(ranks)]
    start = before if kept else Repetition(since_step=step)
    kept = kept or list(ranks)
    if not kept:
        return Repetition()
    return Repetition(
        since_step=start.since_step,
        num_steps=start.num_steps + 1,
        ranks=tuple(kept),
        nats=start.nats + nats,
        distinct=max(start.distinct, *(distinct[rank] for rank in kept)),
    )


def block_steps(spec: HealthSpec) -> int:
    """Number of steps in a block: a quarter of a window."""
    return max(1, spec.window_steps // 4)


def mean_reward(state: HealthState, steps: Sequence[Seen], batch: Batch) -> Level:
    """Mean reward with a conservative standard error, since a few steps may vary too little by chance.

    A reward between floor and top with mean m has a variance of at most (m - floor)(top - m); the independent draws are
    prompts, not completions.
    """
    rewards = [seen.reward for seen in steps]
    mean = fmean(rewards)
    possible = max(0.0, (mean - state.floor) * (state.top - mean)) / batch.num_prompts
    seen_variance = variance(rewards) if len(rewards) > 1 else 0.0
    error = math.sqrt(max(possible, seen_variance) / len(rewards))
    return Level(since_step=steps[0].step, mean=mean, error=error)
