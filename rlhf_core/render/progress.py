"""The progress of a run at one moment, and the line that says it in a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_core.schemas.attempts import RUN_ENDS, RunState
from rlhf_core.schemas.resources import Role
from rlhf_core.text.formatting import duration

METRICS = (
    ("reward/mean", "reward", ".3f"),
    ("train/loss", "loss", ".4g"),
    ("policy/kl", "KL", ".3g"),
    ("rollout/entropy", "entropy", ".3g"),
    ("train/grad_norm", "gradient norm", ".3g"),
    ("rollout/length_mean", "completion length", ".1f"),
    ("eval/greedy", "held-out accuracy", ".3f"),
    ("speed/tokens_per_s", "tokens per second", ",.0f"),
)
"""Metrics shown while a run is at work: key, name, format."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run at one moment; read by :mod:`rlhf_core.control.views.progress`."""

    state: RunState
    total_steps: int
    attempt: int = 0
    """0 before the first."""
    restarts: int = 0
    """Restarts in place of this attempt."""
    role: Role | None = None
    phase: str = ""
    loop: str = ""
    """Loop that made the last step; empty before the first step."""
    step: int = 0
    furthest: int = 0
    """Furthest step that any attempt has made."""
    evaluating: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    step_s: float | None = None
    """Mean time of a step of this loop, in seconds; None where unknown or over."""
    left_s: float | None = None
    """Time of the steps of the main algorithm that are left, in seconds; None before the first of them, since those of
    the warm start say nothing about them."""
    title: str = ""
    """Stage at work, as the controller calls it."""
    is_trial: bool = False
    """True if the steps are those of a trial."""
    waits_for: str = ""
    """Reason of the scheduler for which the job waits."""
    history_behind: str = ""
    """Reason for which the history could not be brought up to date."""

    @property
    def percent(self) -> float:
        """Share of the steps that are done, in percent; a trial makes none of them."""
        step = 0 if self.is_trial else self.step
        return round(100 * min(step / max(self.total_steps, 1), 1.0), 1)

    @property
    def is_behind(self) -> bool:
        """True if steps are being made again."""
        return not self.is_trial and bool(self.attempt) and self.step < self.furthest

    def activity(self) -> str:
        """Format what the run does now."""
        if self.state in RUN_ENDS or not (self.attempt or self.title):
            return self.state.value
        if self.is_trial:
            return f"{self.title}, step {self.step} of {self.total_steps}"
        if not self.attempt:
            return self.title
        if self.loop and not self.evaluating:
            return f"step {self.step} of {self.total_steps} ({self.loop}), {self.percent:.0f} %"
        return self.waiting()

    def waiting(self) -> str:
        """Format what the run does while it makes no step."""
        if self.evaluating:
            return "evaluating"
        if self.role is None:
            return f"waiting for nodes: {self.waits_for}" if self.waits_for else "waiting for nodes"
        if self.phase in ("", "setup"):
            return f"{self.role.value} starts"
        return f"{self.role.value}: {self.phase}"


def progress_text(progress: RunProgress) -> str:
    """Format the progress for a line in a terminal: step, metrics, time left."""
    if progress.state not in RUN_ENDS and (progress.evaluating or not progress.loop):
        parts = [progress.waiting()]
    else:
        parts = [f"{progress.loop} step {progress.step}/{progress.total_steps}".strip(), *_metrics(progress)]
        parts += [f"{duration(progress.left_s)} left"] if progress.left_s is not None else []
    parts += [f"restart {progress.restarts}"] if progress.restarts else []
    return ", ".join(parts)


def _metrics(progress: RunProgress) -> list[str]:
    """Reward, or loss where there is none, and speed."""
    metrics, found = progress.metrics, []
    if progress.loop != "sft" and "reward/mean" in metrics:
        found.append(f"reward {metrics['reward/mean']:.3f}")
    elif "train/loss" in metrics:
        found.append(f"loss {metrics['train/loss']:.3f}")
    if "speed/tokens_per_s" in metrics:
        found.append(f"{metrics['speed/tokens_per_s']:,.0f} tokens/s")
    return found
