"""Rules of the health judge: signs in the state of a run that training learns nothing, or not what was intended."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlhf_core.diagnosis.health.advice import ADVICE
from rlhf_core.diagnosis.health.state import (
    ALL_MASKED,
    NO_CHANGE,
    Batch,
    HealthState,
    Level,
    Repetition,
    block_steps,
    mean_reward,
)
from rlhf_core.schemas.health import HealthRule, HealthSpec

SURE_GAIN = 3.0
"""Number of standard errors by which a mean must exceed another to count as higher."""
SURE_LOSS = 4.0
"""Number of standard errors to count as lower; larger, because the best of many means is high partly by chance."""
SOLVED_WITHIN = 0.02
"""Share of the reward range by which a solved task may fall short of the highest reward."""


@dataclass(frozen=True)
class HealthFinding:
    """One sign that training learns nothing, or not what was intended."""

    rule: HealthRule
    since_step: int
    """First step that shows it."""
    found: str
    """Signs seen in the steps, without a full stop."""
    kind: str = ""
    """Kind of finding, for a rule with several; warnings distinguish them."""

    @property
    def key(self) -> str:
        """Rule and kind."""
        return f"{self.rule}/{self.kind}" if self.kind else self.rule

    @property
    def message(self) -> str:
        """The finding, its usual causes and what to do, without a full stop."""
        causes, remedy = ADVICE[self.key]
        return f"{self.found}. Usual causes: {causes}. To do: {remedy}"


# ---------------------------------------------------------------------------------------------------------------------
# Comparison of rewards


def _is_higher(one: Level, other: Level, standard_errors: float) -> bool:
    return one.mean > other.mean and one.mean - other.mean > standard_errors * math.hypot(one.error, other.error)


def _is_solved(state: HealthState, now: Level) -> bool:
    """True if all rewards are the highest ever seen. A reward that never varied counts as the highest if it is
    positive."""
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
        """True if the task is solved, or the reward has risen since training began."""
        return _is_solved(self.state, self.now) or _has_gained(self.state, self.now)

    @property
    def steps(self) -> str:
        """Describe the window."""
        return f"the last {len(self.state.recent)} steps"

    def steps_without_spread(self) -> int:
        """Number of consecutive steps without spread, up to now."""
        return self.state.recent[-1].step - max(self.state.spread_ended, self.state.first_step - 1)


def findings(state: HealthState, spec: HealthSpec, batch: Batch) -> list[HealthFinding]:
    """List all findings after the last step, the most conclusive first."""
    found = [_frozen(state, spec), *_identical(state, spec, batch)]
    if len(state.recent) == spec.window_steps:
        view = _View(state, spec, batch, mean_reward(state, state.recent, batch))
        found += [rule(view) for rule in RULES if batch.learns_from_rewards or rule in WITHOUT_REWARDS]
    return [finding for finding in found if finding is not None and finding.rule not in spec.off]


def _frozen(state: HealthState, spec: HealthSpec) -> HealthFinding | None:
    num_steps = state.last_step - state.frozen_since + 1
    if not state.frozen_since or num_steps < spec.frozen_steps:
        return None
    kind = {ALL_MASKED: "all cut off", NO_CHANGE: "no change"}.get(state.frozen_why, "no gradient")
    return HealthFinding("frozen", state.frozen_since, f"{state.frozen_why}, {num_steps} steps in a row", kind)


def _identical(state: HealthState, spec: HealthSpec, batch: Batch) -> list[HealthFinding | None]:
    whatever = ", and the same for every prompt" if state.same_groups.distinct == 1 else ""
    within_groups = f"all {batch.samples_per_prompt} completions of every prompt are identical{whatever}"
    repetitions = (
        (state.same_groups, "within groups", within_groups),
        (state.same_ranks, "across ranks", "ranks produce the same completions as other ranks"),
        (state.same_steps, "across steps", "every step produces the same completions"),
    )
    return [*(_repetition(*one, state, spec, batch) for one in repetitions), *_seeds(state, batch)]


def _seeds(state: HealthState, batch: Batch) -> list[HealthFinding]:
    """Find repeated sampling seeds: no policy causes them, so two steps in a row are proof."""
    in_groups, across = state.seeds_in_groups, state.seeds_across_prompts
    found = []
    if in_groups.num_steps >= 2:
        what = (
            f"{state.seeds_repeated:.0%} of the completions are sampled with the seed of another one of their group on "
            f"{_named(in_groups.ranks, batch.nodes)}"
        )
        found.append(HealthFinding("identical", in_groups.since_step, what, "seeds within groups"))
    if across.num_steps >= 2 and not in_groups.num_steps:
        what = f"different prompts are sampled with the same seeds on {_named(across.ranks, batch.nodes)}"
        found.append(HealthFinding("identical", across.since_step, what, "seeds across prompts"))
    if state.same_seeds_since:
        what = "the sampling seeds are the same at every step"
        found.append(HealthFinding("identical", state.same_seeds_since, what, "seeds across steps"))
    return found


def _repetition(
    found: Repetition, kind: str, what: str, state: HealthState, spec: HealthSpec, batch: Batch
) -> HealthFinding | None:
    if found.num_steps < 2 or found.nats * len(found.ranks) < -math.log(spec.identical_chance):
        return None
    return HealthFinding(
        "identical",
        found.since_step,
        f"{what} on {_named(found.ranks, batch.nodes)}, {found.num_steps} steps in a row, although the policy is not "
        f"certain of its answers (entropy {state.recent[-1].entropy:.3g} nats per token)",
        kind,
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
        f"{best.since_step} on, it was {best.mean:.3g}",
    )


def _no_spread(view: _View) -> HealthFinding | None:
    state, without = view.state, view.steps_without_spread()
    too_few = without < view.spec.window_steps or without * view.batch.num_completions < view.spec.min_completions
    if too_few or view.is_well:
        return None
    before = f"{state.first.mean:.3g} over the first steps" if state.first and state.spread_ended else "never another"
    constant = f": every completion so far was rewarded with {state.top:.3g}" if state.top == state.floor else ""
    compared = "prompt" if view.batch.samples_per_prompt > 1 else "step"
    # A KL penalty and a value model have a gradient nevertheless, so nothing is said about the gradient.
    return HealthFinding(
        "no_spread",
        state.recent[-1].step - without + 1,
        f"in {without} steps, {without * view.batch.num_completions} completions, no {compared} had completions with "
        f"different rewards{constant}, so the rewards favour no completion over another; the mean "
        f"reward is {view.now.mean:.3g} ({before})",
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
        f"{view.steps}, and none is rewarded",
    )


def _entropy_collapse(view: _View) -> HealthFinding | None:
    state, entropy = view.state, fmean(seen.entropy for seen in view.state.recent)
    if entropy >= view.spec.entropy_share * state.first_entropy or view.is_well:
        return None
    return HealthFinding(
        "entropy_collapse",
        state.recent[0].step,
        f"the policy is certain of every token: {entropy:.2g} nats over {view.steps}, {state.first_entropy:.2g} over "
        "the first ones, without a gain in reward",
    )


def _clipped(view: _View) -> HealthFinding | None:
    shares = [seen.clipped for seen in view.state.recent]
    if view.is_well or any(share is None or share < view.spec.clipped_share for share in shares):
        return None
    return HealthFinding(
        "clipped",
        view.state.recent[0].step,
        f"the clip removes the gradient of {shares[-1]:.0%} of the tokens, as in all of {view.steps}",
    )


def _train_gap(view: _View) -> HealthFinding | None:
    gaps = [seen.train_gap for seen in view.state.recent]
    if view.is_well or any(gap is None or gap <= view.spec.max_train_gap for gap in gaps):
        return None
    return HealthFinding(
        "train_gap",
        view.state.recent[0].step,
        f"sampling and training disagree about the log-probability of a token by {gaps[-1]:.3g} nats on average, and "
        f"by more than {view.spec.max_train_gap:g} (health.max_train_gap) in all of {view.steps}",
    )


def _kl(view: _View) -> HealthFinding | None:
    divergences = [seen.kl for seen in view.state.recent]
    if any(kl is None or kl <= view.spec.max_kl for kl in divergences) or _is_solved(view.state, view.now):
        return None
    best = view.state.best
    if _has_gained(view.state, view.now) and best is not None and not _is_higher(best, view.now, SURE_GAIN):
        return None  # the reward is at its best, however far the policy has moved
    last = divergences[-1]
    if last is not None and not math.isfinite(last):
        found = (
            f"the KL divergence from the reference model is not finite ({last}), in none of {view.steps} within "
            f"{view.spec.max_kl:g} (health.max_kl)"
        )
        return HealthFinding("kl", view.state.recent[0].step, found, "not finite")
    return HealthFinding(
        "kl",
        view.state.recent[0].step,
        f"the policy is {last:.3g} nats per token from the reference model, and more than {view.spec.max_kl:g} "
        f"(health.max_kl) in all of {view.steps}, without a gain in reward",
    )


def _length(view: _View) -> HealthFinding | None:
    """Find a reward that rises through length alone.

    Within a group the prompt is the same, so a reward that correlates with length there rewards length itself, and the
    slope gives the reward per token. The finding requires that such a reward has risen, that completions have become
    longer, and that the slope explains at least half of the rise. A policy that reasons longer and is right more often
    has a far lower correlation: its long answers to a prompt are not almost always the right ones.
    """
    state, spec = view.state, view.spec
    pairs = [
        (seen.length_correlation, seen.length_slope)
        for seen in state.recent
        if seen.length_correlation is not None and seen.length_slope is not None
    ]
    if state.first is None or 2 * len(pairs) < len(state.recent):
        return None
    correlation, slope = (fmean(pair[place] for pair in pairs) for place in (0, 1))
    length = fmean(seen.length for seen in state.recent)
    longer = length - state.first_length
    if correlation < spec.length_correlation or longer < spec.length_rise * state.first_length:
        return None
    gain = view.now.mean - state.first.mean
    if not _has_gained(state, view.now) or slope * longer < gain / 2:
        return None
    return HealthFinding(
        "length",
        state.recent[0].step,
        f"the reward rises by length: completions have {length:.3g} tokens over {view.steps} and had "
        f"{state.first_length:.3g} over the first ones, and among the completions of a prompt reward and length have "
        f"a correlation of {correlation:.2f}",
    )


RULES: tuple[Callable[[_View], HealthFinding | None], ...] = (
    _reward_collapse,
    _no_spread,
    _truncated,
    _entropy_collapse,
    _clipped,
    _train_gap,
    _kl,
    _length,
)
"""Rules over a full window of the main algorithm, the most conclusive first."""
WITHOUT_REWARDS = frozenset({_clipped, _train_gap})
"""Rules that also judge a policy that learns from a teacher: it may be certain, brief or wrong like the teacher."""


def _named(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Name ranks by node: ``ranks 0, 1 (all of node1) and rank 5 (node3)``."""
    parts = []
    for node in dict.fromkeys(nodes):
        own = [rank for rank in range(len(nodes)) if nodes[rank] == node]
        named = [rank for rank in ranks if nodes[rank] == node]
        if named:
            whole = "all of " if len(named) == len(own) > 1 else ""
            word = "rank" if len(named) == 1 else "ranks"
            parts.append(f"{word} {', '.join(map(str, named))} ({whole}{node})")
    return " and ".join(parts)
