"""The progress of a run at one moment, and its one-line form for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_core.schemas.attempts import RUN_ENDS, Role, RunState
from rlhf_core.text.formatting import duration

METRICS = (
    ("reward/mean", "reward", ".3f"),
    ("train/loss", "loss", ".4g"),
    ("policy/kl", "KL", ".3g"),
    ("rollout/entropy", "entropy", ".3g"),
    ("train/grad_norm", "gradient norm", ".3g"),
    ("rollout/length_mean", "completion length", ".1f"),
    ("eval/greedy", "held-out accuracy", ".3f"),
    ("eval/loss", "held-out loss", ".4g"),
    ("speed/tokens_per_s", "tokens per second", ",.0f"),
)
"""Metrics shown while a run is active: key, name, format."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run at one moment; read by :mod:`rlhf_core.control.views.progress`."""

    state: RunState
    total_steps: int
    attempt: int = 0
    """Number of the attempt; 0 before the first."""
    restarts: int = 0
    """In-place restarts of this attempt."""
    role: Role | None = None
    phase: str = ""
    loop: str = ""
    """Loop that made the last step; of an active run, empty before the first step of this start."""
    step: int = 0
    furthest: int = 0
    """Highest step reached by any attempt."""
    evaluating: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    step_s: float | None = None
    """Mean time of a step of this loop, in seconds; None if unknown or if the run is over."""
    left_s: float | None = None
    """Remaining time of the main algorithm's steps, in seconds; None before the first of them, because warm-start steps
    do not predict it."""
    title: str = ""
    """Current stage, as the controller calls it."""
    is_trial: bool = False
    """True if the steps are those of a trial."""
    waits_for: str = ""
    """The scheduler's reason for the job's wait."""
    history_behind: str = ""
    """Reason why the history could not be updated."""

    @property
    def percent(self) -> float:
        """Share of steps done, in percent; a trial contributes none."""
        step = 0 if self.is_trial else self.step
        return round(100 * min(step / max(self.total_steps, 1), 1.0), 1)

    @property
    def is_behind(self) -> bool:
        """True if steps are being repeated."""
        return not self.is_trial and bool(self.attempt) and self.step < self.furthest

    def activity(self) -> str:
        """Format the run's current activity."""
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
        """Format the activity of a run that is not making steps."""
        if self.evaluating:
            return "evaluating"
        if self.role is None:
            return f"waiting for nodes: {self.waits_for}" if self.waits_for else "waiting for nodes"
        if self.phase in ("", "setup"):
            return f"{self.role.value} starts"
        return f"{self.role.value}: {self.phase}"


def progress_text(progress: RunProgress) -> str:
    """Format the progress for one terminal line: step, metrics, time left."""
    if progress.state not in RUN_ENDS and (progress.evaluating or not progress.loop):
        parts = [progress.waiting()]
    else:
        parts = [f"{progress.loop} step {progress.step}/{progress.total_steps}".strip(), *_metrics(progress)]
        parts += [f"{duration(progress.left_s)} left"] if progress.left_s is not None else []
    parts += [f"restart {progress.restarts}"] if progress.restarts else []
    return ", ".join(parts)


def _metrics(progress: RunProgress) -> list[str]:
    """Reward, or loss if there is no reward, and speed."""
    metrics, found = progress.metrics, []
    if progress.loop != "sft" and "reward/mean" in metrics:
        found.append(f"reward {metrics['reward/mean']:.3f}")
    elif "train/loss" in metrics:
        found.append(f"loss {metrics['train/loss']:.3f}")
    if "speed/tokens_per_s" in metrics:
        found.append(f"{metrics['speed/tokens_per_s']:,.0f} tokens/s")
    return found
