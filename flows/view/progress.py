"""How far a run is: a share of its steps, and a few lines that say the rest."""

from dataclasses import dataclass, field

from flows.view.story import Story
from rlhf_core.escaping import markdown
from rlhf_core.launch.journal import RunRecord
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.evidence import Progress
from rlhf_core.watchdog.watch import Look
from rlhf_core.words import duration

SMOOTHING = 0.1
"""Share of the newest step in the mean time of a step."""

MAX_NODES = 8
"""Names of nodes that are listed."""

FIGURES = (
    ("reward/mean", "reward", ".3f"),
    ("train/loss", "loss", ".4g"),
    ("policy/kl", "KL", ".3g"),
    ("rollout/entropy", "entropy", ".3g"),
    ("train/grad_norm", "gradient norm", ".3g"),
    ("rollout/length_mean", "completion length", ".1f"),
    ("speed/tokens_per_s", "tokens per second", ",.0f"),
)
"""Metrics worth a glance: key, name, format."""


def furthest_step(run_dir: RunDir) -> int:
    """The furthest step that any attempt has made, so that a controller that comes later knows how far it once was."""
    furthest = 0
    for attempt in run_dir.attempts():
        progress = Progress(attempt)
        progress.update()
        furthest = max(furthest, progress.step)
    return furthest


@dataclass
class Seen:
    """What the watchdog has shown of a run, look by look."""

    spec: RunSpec
    """The run's own."""
    furthest: int = 0
    """The furthest step there ever was."""
    now_about: RunSpec | None = None
    """Spec of the trial that is being made; None while it is about the run itself."""
    title: str = ""
    """What is being done."""
    look: Look | None = None
    _step_s: dict[str, float] = field(default_factory=dict)
    """Mean time of a step by loop."""
    _measured: tuple[int, int, int] = (0, 0, 0)

    def turns_to(self, spec: RunSpec) -> None:
        """What follows is about a run with this spec."""
        self.now_about = None if spec == self.spec else spec
        self.look, self._step_s = None, {}

    def saw(self, look: Look) -> None:
        """Take a look in."""
        self.look = look
        place = (look.attempt, look.restart, look.step)
        seconds = look.metrics.get("time/step_s")
        if seconds is not None and look.loop and place != self._measured:
            before = self._step_s.get(look.loop, seconds)
            self._step_s[look.loop] = before + SMOOTHING * (seconds - before)
            self._measured = place
        if self.now_about is None:
            self.furthest = max(self.furthest, look.step)

    @property
    def percent(self) -> float:
        """Steps that are done, of all; a trial makes none of them."""
        if self.now_about is not None:
            return 0.0
        step = self.furthest if self.look is None else self.look.step
        return round(100 * min(step / max(self.spec.total_steps, 1), 1.0), 1)

    def left_s(self) -> float | None:
        """Seconds that the steps of the main algorithm still take; None before the first of them, for those of the warm
        start say nothing about them."""
        main = self.spec.loops.main.algorithm.name
        if self.look is None or self.now_about is not None or self.look.loop != main or main not in self._step_s:
            return None
        return max(self.spec.total_steps - self.look.step, 0) * self._step_s[main]

    def step_s(self) -> float | None:
        """Mean time of a step of the loop that is at work, in seconds."""
        return None if self.look is None else self._step_s.get(self.look.loop)


def describe(seen: Seen, story: Story) -> str:
    """Where the run stands, as Markdown: one line that says it, then the figures.

    It stands on two pages of the UI, so it holds no links from one to another.
    """
    record, look = story.record, seen.look
    first = [f"**{markdown(_doing(seen, record))}**"]
    if record.ended:
        first.append(markdown(record.cause))
    elif look is not None and seen.now_about is None and not look.evaluating:
        left = seen.left_s()
        first += [f"{duration(left)} left"] if left is not None and look.step < seen.spec.total_steps else []
    lines = [" · ".join(part for part in first if part)]
    lines += [_made_again(seen, story)] if _is_behind(seen) and not record.ended else []
    return "\n\n".join([*lines, *(" · ".join(line) for line in (_place(seen, story), _figures(seen)) if line)])


def _doing(seen: Seen, record: RunRecord) -> str:
    look = seen.look
    if record.ended or look is None:
        return record.state.value if record.ended or not seen.title else seen.title
    if seen.now_about is not None:
        return f"{seen.title}, step {look.step} of {seen.now_about.total_steps}"
    if look.evaluating:
        return "evaluating"
    if look.role is None:
        return f"waiting for nodes{f': {look.job.reason}' if look.job.reason else ''}"
    if not look.loop:
        return f"{look.role.value} starts"
    return f"step {look.step} of {seen.spec.total_steps} ({look.loop}), {seen.percent:.0f} %"


def _is_behind(seen: Seen) -> bool:
    return seen.now_about is None and seen.look is not None and seen.look.step < seen.furthest


def _made_again(seen: Seen, story: Story) -> str:
    """Why it has gone back: nobody should wonder about a bar that does."""
    assert seen.look is not None
    why = f" after {story.incidents[-1].incident.failure_kind.value}" if story.incidents else ""
    decision = story.decisions[-1].decision if story.decisions else None
    what = f": {markdown(decision.reason)}" if decision is not None else ""
    return f"Went back{why}: step {seen.furthest} was reached before, and is being made again{what}"


def _place(seen: Seen, story: Story) -> list[str]:
    look = seen.look
    if look is None:
        return []
    nodes, step_s = look.job.nodes, seen.step_s()
    many = f" and {len(nodes) - MAX_NODES} more" if len(nodes) > MAX_NODES else ""
    incidents = len(story.incidents)
    found = [
        f"attempt {look.attempt}, {look.restarts_made} restart{'' if look.restarts_made == 1 else 's'}",
        f"on {markdown(', '.join(nodes[:MAX_NODES]))}{many}" if nodes else "",
        f"{duration(step_s)} a step" if step_s is not None else "",
        f"{incidents} incident{'' if incidents == 1 else 's'}" if incidents else "",
        f"the history is behind: {markdown(look.history_behind)}" if look.history_behind else "",
    ]
    return [text for text in found if text]


def _figures(seen: Seen) -> list[str]:
    metrics = seen.look.metrics if seen.look is not None else {}
    return [f"{name} {format(metrics[key], spec)}" for key, name, spec in FIGURES if key in metrics]
