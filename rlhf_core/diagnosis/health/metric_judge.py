"""Health of an external trainer, judged from its metrics alone. Pure: metrics of a step in, warnings out.

The rules match those of :mod:`rlhf_core.diagnosis.health.rules`, which also see completions and weights: a solved task
and a policy that has gained reward have no reward spread and are healthy. Only logged metrics can be judged; a missing
metric proves nothing.

A step here is a logged step. With ``logging_steps`` above 1, a streak of bad steps must span the same number of
optimizer steps and several log lines, because a line shows the gradient of its last step alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, variance

from rlhf_core.diagnosis.health.rules import SOLVED_WITHIN, SURE_GAIN
from rlhf_core.diagnosis.health.state import block_steps
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.health import HealthRule, HealthSpec

MIN_LINES = 3
"""Minimum number of consecutive logged steps that must show the same."""
ZERO_STD = 1e-8
"""Standard deviation up to which rewards are equal except for rounding (``torch.isclose``, which TRL uses)."""

LOSS, GRADIENT, REWARD, SPREAD = "train/loss", "train/grad_norm", "reward/mean", "reward/std"
ZERO_GROUPS, TRUNCATED, KL = "rollout/zero_std_groups", "rollout/truncated_share", "policy/kl"


@dataclass(frozen=True)
class MetricWarning:
    """One reason to inspect a training run that continues."""

    rule: HealthRule | str
    """Rule as named in ``health.off``, or ``non_finite``, which is always judged."""
    kind: FailureKind
    step: int
    """Step at which it is reported."""
    message: str
    """Finding, expectation and remedy in words, without a full stop."""


def _mean(rewards: list[float]) -> tuple[float, float]:
    """The mean of at least one reward, and its standard error."""
    spread = variance(rewards) if len(rewards) > 1 else 0.0
    return fmean(rewards), math.sqrt(spread / len(rewards))


@dataclass
class _Rewards:
    """Rewards so far, judged by their means."""

    top: float = -math.inf
    floor: float = math.inf
    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)

    def take(self, metrics: Mapping[str, float], block: int) -> None:
        """Add one step; blocks of ``block`` steps are compared with the first block."""
        reward = metrics.get(REWARD, math.nan)
        if not math.isfinite(reward):
            return
        self.top = max(self.top, metrics.get("reward/max", reward), reward)
        self.floor = min(self.floor, metrics.get("reward/min", reward), reward)
        self.first = [*self.first, reward] if len(self.first) < block else self.first
        self.recent = [*self.recent, reward][-block:]

    @property
    def are_well(self) -> bool:
        """True if the rewards are the highest ever seen, or have risen since the first steps."""
        if not self.recent:
            return False
        (now, now_error), (first, first_error) = _mean(self.recent), _mean(self.first)
        if self.top == self.floor:
            return self.top > 0
        is_solved = now >= self.top - SOLVED_WITHIN * (self.top - self.floor)
        return is_solved or now - first > SURE_GAIN * math.hypot(now_error, first_error)

    @property
    def in_words(self) -> str:
        """A phrase with the mean reward of the last steps, if it is logged."""
        return f"; the mean reward is {fmean(self.recent):.3g}" if self.recent else ""


@dataclass(frozen=True)
class _LoggedStep:
    """One logged step as the rules see it."""

    metrics: Mapping[str, float]
    rewards: _Rewards
    spec: HealthSpec

    def number(self, name: str) -> float | None:
        """A metric; None if it is not logged or is the mean of nothing (NaN)."""
        value = self.metrics.get(name)
        return None if value is None or math.isnan(value) else value


@dataclass(frozen=True)
class _Rule:
    name: HealthRule | str
    kind: FailureKind
    finds: Callable[[_LoggedStep], str | None]
    """Describes the problem; empty if there is none, None if the step does not show it."""
    num_steps: Callable[[HealthSpec], int]
    """Consecutive optimizer steps that must show it."""
    min_lines: int = MIN_LINES


@dataclass
class _Row:
    """Consecutive logged steps that show the same."""

    since_step: int = 0
    before_step: int = 0
    """The logged step before the first of them."""
    last_step: int = 0
    num_lines: int = 0
    is_reported: bool = False


class MetricJudge:
    """Judges the logged steps of one start of a program, in order."""

    def __init__(self, spec: HealthSpec, first_step: int = 0) -> None:
        """Start judging.

        Args:
            spec: ``[health]`` of the run.
            first_step: Step of the checkpoint that the program resumes from.
        """
        self._spec = spec
        self._rules = [rule for rule in RULES if rule.name not in spec.off]
        self._before_step = self._last_step = first_step
        self._begin()

    def judge(self, step: int, metrics: Mapping[str, float]) -> list[MetricWarning]:
        """Add the metrics of a step, under this project's names.

        A step may arrive in parts. A step before the last one means that the program has restarted: judging restarts.

        Returns:
            New warnings; each is reported once until it has cleared.
        """
        if step < self._last_step:
            self._last_step = max(step - 1, 0)
            self._begin()
        if step > self._last_step:
            self._before_step, self._last_step = self._last_step, step
        self._rewards.take(metrics, block_steps(self._spec))
        logged = _LoggedStep(metrics, self._rewards, self._spec)
        warnings = [self._judge(rule, row, step, logged) for rule, row in zip(self._rules, self._rows, strict=True)]
        return [warning for warning in warnings if warning is not None]

    def _begin(self) -> None:
        self._rewards = _Rewards()
        self._rows = [_Row() for _ in self._rules]

    def _judge(self, rule: _Rule, row: _Row, step: int, logged: _LoggedStep) -> MetricWarning | None:
        found = rule.finds(logged)
        if found is None:
            return None
        if not found:
            row.num_lines, row.last_step, row.is_reported = 0, 0, False
            return None
        if not row.num_lines:
            row.since_step, row.before_step = step, self._before_step
        if step != row.last_step:
            row.num_lines += 1
            row.last_step = step
        too_short = step - row.before_step < rule.num_steps(self._spec) or row.num_lines < rule.min_lines
        if too_short or row.is_reported:
            return None
        row.is_reported = True
        since = f", since step {row.since_step}" if row.num_lines > 1 else ""
        return MetricWarning(rule.name, rule.kind, step, f"At step {step}{since}: {found}")


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def _loss_is_not_finite(logged: _LoggedStep) -> str | None:
    loss = logged.metrics.get(LOSS)
    if loss is None:
        return None
    return "" if math.isfinite(loss) else f"found a loss of {loss}, {_FINITE}"


def _gradient_is_not_finite(logged: _LoggedStep) -> str | None:
    norm = logged.metrics.get(GRADIENT)
    if norm is None:
        return None
    return "" if math.isfinite(norm) else f"found gradient norms of {norm}, {_FINITE}"


_FINITE = (
    "expected finite ones: resume from an older checkpoint with a lower learning rate, clip the gradient, or train in "
    "bfloat16 instead of float16"
)


def _frozen(logged: _LoggedStep) -> str | None:
    norm = logged.metrics.get(GRADIENT)
    if norm is None:
        return None
    # Equal rewards give no gradient and are covered by their own rule.
    if norm != 0 or _has_spread(logged) is False:
        return ""
    return (
        "found gradient norms of exactly 0 although there is something to learn from, expected other values: check "
        "that the loss reaches trained weights (requires_grad, modules with LoRA), and that the number format does "
        "not round the gradient to zero"
    )


def _no_spread(logged: _LoggedStep) -> str | None:
    has_spread = _has_spread(logged)
    if has_spread is None:
        return None
    if has_spread or logged.rewards.are_well:
        return ""
    return (
        "found no group of completions with different rewards, so there is nothing to learn "
        f"from{logged.rewards.in_words}; expected prompts that are solved some of the time: check that the reward "
        "function fits the completions, that the task is not too hard, and that the temperature is not 0"
    )


def _has_spread(logged: _LoggedStep) -> bool | None:
    """True if some group had different rewards; None if that is not logged."""
    groups, spread = logged.number(ZERO_GROUPS), logged.number(SPREAD)
    if groups is not None:
        return groups < 1
    return None if spread is None else abs(spread) > ZERO_STD


def _truncated(logged: _LoggedStep) -> str | None:
    share = logged.number(TRUNCATED)
    if share is None:
        return None
    if share < logged.spec.truncated_share or logged.rewards.are_well:
        return ""
    return (
        f"found {share:.0%} of the completions cut off at the maximum length, and no gain in "
        f"reward{logged.rewards.in_words}; expected completions that end: raise the maximum length "
        "(max_completion_length in TRL and ms-swift), or find out why the model does not emit its end token"
    )


def _kl(logged: _LoggedStep) -> str | None:
    kl = logged.metrics.get(KL)
    if kl is None:
        return None
    if kl <= logged.spec.max_kl:
        return ""
    if not math.isfinite(kl):
        return (
            f"found a KL divergence from the reference model that is not finite ({kl}), expected at most "
            f"{logged.spec.max_kl:g} nats per token (health.max_kl): check that the log-probabilities of the policy "
            "and of the reference model are finite, and that some completions are not masked"
        )
    return (
        f"found a KL divergence from the reference model of {kl:.3g} nats per token, expected at most "
        f"{logged.spec.max_kl:g} (health.max_kl): resume from an older checkpoint with a lower learning rate or a "
        "larger KL coefficient (beta)"
    )


RULES: tuple[_Rule, ...] = (
    _Rule("non_finite", FailureKind.NON_FINITE, _loss_is_not_finite, lambda spec: 1, min_lines=1),
    # With loss scaling, float16 skips single steps whose gradient overflows, mostly early ones.
    _Rule("non_finite", FailureKind.NON_FINITE, _gradient_is_not_finite, lambda spec: spec.frozen_steps),
    _Rule("frozen", FailureKind.DEGENERATE_RL, _frozen, lambda spec: spec.frozen_steps),
    _Rule("no_spread", FailureKind.DEGENERATE_RL, _no_spread, lambda spec: spec.window_steps),
    _Rule("truncated", FailureKind.DEGENERATE_RL, _truncated, lambda spec: spec.window_steps),
    _Rule("kl", FailureKind.DEGENERATE_RL, _kl, lambda spec: spec.window_steps),
)
"""Rules, the most specific first."""
