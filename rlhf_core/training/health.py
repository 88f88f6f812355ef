"""Judgement of training while it runs: does it still learn? Pure: the metrics of a step in, findings out.

The loss tells nothing: that of GRPO is near 0 when all is well. Judged are gradient and weights, the spread of rewards
within groups, repeated completions, the reward against its own best, entropy, and truncation (``[health]`` has the
windows and thresholds, each with its reason).

Three things look like a failure and are none, and no rule may take them for one:

- A task that is *solved* has no spread, no gradient and hardly any entropy: its mean reward is the highest that any
  completion ever had.
- A policy that has *gained* reward since it began may have become certain of its answers, some of them wrong.
- A *rare* reward may not come for many steps: what counts is how many completions went without, and whether a mean has
  fallen by more than chance allows.

Every rank sees the same metrics and comes to the same findings. The state is part of each checkpoint, so that a run
that goes on is judged as if it had never stopped. A new rule is a function over the state and a row of :data:`RULES`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlhf_core.schemas.run import HealthRule, HealthSpec
from rlhf_core.training.health_state import Batch, HealthState, Level, Repetition, block_steps, mean_reward, observe

SURE_GAIN = 3.0
"""Standard errors by which a mean must be above another to be higher."""
SURE_LOSS = 4.0
"""The same to be lower: the best of many means is high by chance too."""
SOLVED_WITHIN = 0.02
"""Share of the range of rewards by which a solved task may miss the highest."""

_ADVICE = "`rlhf report` shows curves and completions; health.off turns off a rule that does not fit the task"


@dataclass(frozen=True)
class HealthFinding:
    """One reason to say that training learns nothing."""

    rule: HealthRule
    since_step: int
    """First step that shows it."""
    message: str
    """In words, without a full stop."""


class Judge:
    """Judges the steps of one run, in their order."""

    def __init__(self, spec: HealthSpec, batch: Batch, state: HealthState | None = None) -> None:
        """Begin, or go on from the state of a checkpoint."""
        self._spec = spec
        self._batch = batch
        self.state = state or HealthState()

    def look(
        self, step: int, samples: bool, metrics: Mapping[str, float], by_rank: Mapping[str, Sequence[float]]
    ) -> list[HealthFinding]:
        """Take in one step. Returns what is found by now, the most telling first; empty when all is well."""
        self.state = observe(self.state, self._spec, self._batch, step, samples, metrics, by_rank)
        return findings(self.state, self._spec, self._batch)


def in_words(found: Sequence[HealthFinding], step: int) -> str:
    """Findings as the message of an error."""
    since = min(finding.since_step for finding in found)
    also = f". Also: {'; '.join(finding.message for finding in found[1:])}" if len(found) > 1 else ""
    return (
        f"Training learns nothing any more at step {step}, since step {since} ({found[0].rule}): {found[0].message}"
        f"{also}. {_ADVICE}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rewards compared


def _is_higher(one: Level, other: Level, standard_errors: float) -> bool:
    return one.mean > other.mean and one.mean - other.mean > standard_errors * math.hypot(one.error, other.error)


def _is_solved(state: HealthState, now: Level) -> bool:
    """All rewards are the highest ever seen. One that never varied is taken for the highest if it is positive."""
    if state.top == state.floor:
        return state.top > 0
    return now.mean >= state.top - SOLVED_WITHIN * (state.top - state.floor)


def _has_gained(state: HealthState, now: Level) -> bool:
    return state.first is not None and _is_higher(now, state.first, SURE_GAIN)


# ---------------------------------------------------------------------------------------------------------------------
# Rules


@dataclass(frozen=True)
class _View:
    """A full window of steps of the main algorithm, as rules see it."""

    state: HealthState
    spec: HealthSpec
    batch: Batch
    now: Level
    """Reward of the window."""

    @property
    def is_well(self) -> bool:
        """The task is solved, or the reward has risen since training began."""
        return _is_solved(self.state, self.now) or _has_gained(self.state, self.now)

    @property
    def steps(self) -> str:
        """The window in words."""
        return f"the last {len(self.state.recent)} steps"

    def steps_without_spread(self) -> int:
        """In a row, up to now."""
        return self.state.recent[-1].step - max(self.state.spread_ended, self.state.first_step - 1)


def findings(state: HealthState, spec: HealthSpec, batch: Batch) -> list[HealthFinding]:
    """All that is wrong after the last step, the most telling first."""
    found = [_frozen(state, spec), *_identical(state, spec, batch)]
    if len(state.recent) == spec.window_steps:
        view = _View(state, spec, batch, mean_reward(state, state.recent, batch))
        found += [rule(view) for rule in RULES]
    return [finding for finding in found if finding is not None and finding.rule not in spec.off]


def _frozen(state: HealthState, spec: HealthSpec) -> HealthFinding | None:
    num_steps = state.last_step - state.frozen_since + 1
    if not state.frozen_since or num_steps < spec.frozen_steps:
        return None
    return HealthFinding(
        "frozen",
        state.frozen_since,
        f"{state.frozen_why}, {num_steps} steps in a row. Expected trained weights (requires_grad) that are reached by "
        f"the loss, and a learning rate that their number format does not round away",
    )


def _identical(state: HealthState, spec: HealthSpec, batch: Batch) -> list[HealthFinding | None]:
    groups, ranks, steps = state.same_groups, state.same_ranks, state.same_steps
    whatever = ", and the same for every prompt" if groups.distinct == 1 else ""
    told = (
        (
            groups,
            len(groups.ranks),
            f"all {batch.samples_per_prompt} completions of every prompt are identical{whatever}",
        ),
        (ranks, len(ranks.ranks), "ranks make the same completions as other ranks"),
        (steps, len(steps.ranks), "the same completions are made at every step"),
    )
    return [_repetition(one, num, what, state, spec, batch) for one, num, what in told]


def _repetition(
    found: Repetition, num_ranks: int, what: str, state: HealthState, spec: HealthSpec, batch: Batch
) -> HealthFinding | None:
    if found.num_steps < 2 or found.nats * num_ranks < -math.log(spec.identical_chance):
        return None
    return HealthFinding(
        "identical",
        found.since_step,
        f"{what} on {_named(found.ranks, batch.nodes)}, {found.num_steps} steps in a row, although the policy is not "
        f"certain of its answers (entropy {state.recent[-1].entropy:.3g} nats per token). Expected sampling seeds that "
        f"differ for every step, prompt and sample; seeds made from a rank or a node repeat themselves",
    )


def _reward_collapse(view: _View) -> HealthFinding | None:
    state, now, best = view.state, view.now, view.state.best
    if best is None or not _is_higher(best, now, SURE_LOSS):
        return None
    if now.mean - state.floor > view.spec.collapsed_share * (best.mean - state.floor):
        return None
    return HealthFinding(
        "reward_collapse",
        best.since_step + block_steps(view.spec),
        f"the mean reward of {view.steps} is {now.mean:.3g}; over its best {block_steps(view.spec)} steps, from step "
        f"{best.since_step} on, it was {best.mean:.3g}. Try a lower loops.main.optimizer.learning_rate or a "
        f"KL penalty (loops.main.algorithm.kl_coefficient), and see whether the reward function still works",
    )


def _no_spread(view: _View) -> HealthFinding | None:
    state, without = view.state, view.steps_without_spread()
    too_few = without < view.spec.window_steps or without * view.batch.num_completions < view.spec.min_completions
    if too_few or view.is_well:
        return None
    before = f"{state.first.mean:.3g} over the first steps" if state.first and state.spread_ended else "never another"
    return HealthFinding(
        "no_spread",
        state.recent[-1].step - without + 1,
        f"in {without} steps, {without * view.batch.num_completions} completions, no prompt had completions with "
        f"different rewards, so there is nothing to compare and the gradient is 0; the mean reward is "
        f"{view.now.mean:.3g} ({before}). Expected prompts that are solved some of the time: see whether the reward "
        f"function fits the completions, the task is too hard, or the learning rate has destroyed the model",
    )


def _truncated(view: _View) -> HealthFinding | None:
    state = view.state
    nothing = view.now.mean <= state.floor + SOLVED_WITHIN * (state.top - state.floor) and not _is_solved(
        state, view.now
    )
    rare = len(state.recent) * view.batch.num_completions < view.spec.min_completions
    if not nothing or rare or any(seen.truncated < view.spec.truncated_share for seen in state.recent):
        return None
    return HealthFinding(
        "truncated",
        state.recent[0].step,
        f"{state.recent[-1].truncated:.0%} of the completions are cut off at rollout.max_new_tokens, as in all of "
        f"{view.steps}, and none is rewarded. Expected completions that end: raise rollout.max_new_tokens, or see why "
        f"the model does not write its end token",
    )


def _entropy_collapse(view: _View) -> HealthFinding | None:
    state, entropy = view.state, fmean(seen.entropy for seen in view.state.recent)
    if entropy >= view.spec.entropy_share * state.first_entropy or view.is_well:
        return None
    return HealthFinding(
        "entropy_collapse",
        state.recent[0].step,
        f"the policy is certain of every token: {entropy:.2g} nats over {view.steps}, {state.first_entropy:.2g} over "
        f"the first ones, and the reward has not risen by it. Try a lower "
        f"loops.main.optimizer.learning_rate, a higher loops.main.algorithm.clip_high or a KL penalty "
        f"(loops.main.algorithm.kl_coefficient)",
    )


RULES: tuple[Callable[[_View], HealthFinding | None], ...] = (
    _reward_collapse,
    _no_spread,
    _truncated,
    _entropy_collapse,
)
"""Rules over a full window of the main algorithm, the most telling first."""


def _named(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Ranks by node: ``ranks 0, 1 (all of node1) and rank 5 (node3)``."""
    parts = []
    for node in dict.fromkeys(nodes):
        own = [rank for rank in range(len(nodes)) if nodes[rank] == node]
        named = [rank for rank in ranks if nodes[rank] == node]
        if named:
            whole = "all of " if len(named) == len(own) > 1 else ""
            word = "rank" if len(named) == 1 else "ranks"
            parts.append(f"{word} {', '.join(map(str, named))} ({whole}{node})")
    return " and ".join(parts)
