"""``rlhf watch``: a view of a run that is driven by another process, from its directory alone."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlhf_core.cli import output, story
from rlhf_core.escaping import json_text, terminal
from rlhf_core.launch.journal import RunRecord, read_record
from rlhf_core.run_dir import RestartDir, RunDir, parse_lines, read_lines, read_model
from rlhf_core.schemas.regression import Regression, state_text
from rlhf_core.schemas.reports import AgentStatus, MetricsLine, RankStatus
from rlhf_core.schemas.run import StoredSpec
from rlhf_core.watchdog.evidence import AttemptProgress, agent_decisions, incidents, regressed

SHOWN_METRICS = (
    "reward/mean",
    "train/loss",
    "train/grad_norm",
    "policy/kl",
    "rollout/entropy",
    "rollout/length_mean",
    "eval/greedy",
    "speed/tokens_per_s",
)
"""Metrics in the view, where the run has them."""

FIRST_LINE_BYTES = 1 << 16
"""No line of metrics is longer."""


@dataclass
class View:
    """What is shown at one moment."""

    stored: StoredSpec
    record: RunRecord
    progress: AttemptProgress | None
    ranks: Sequence[RankStatus]
    story: Sequence[str]
    """Incidents and decisions, oldest first."""
    regressed: Sequence[Regression] = ()
    """Held-out scores that fell."""


class Viewer:
    """Reads a run directory again and again; appended files from where it was before."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._stored = run_dir.read_spec()
        self._progress: AttemptProgress | None = None

    def read(self) -> View:
        """The run as it is now."""
        attempts = self._run_dir.attempts()
        if attempts and (self._progress is None or self._progress.attempt.number != attempts[-1].number):
            self._progress = AttemptProgress(attempts[-1])
        if self._progress is not None:
            self._progress.update()
        restarts = attempts[-1].restarts() if attempts else []
        return View(
            stored=self._stored,
            record=read_record(self._run_dir),
            progress=self._progress,
            ranks=_ranks(restarts[-1]) if restarts else [],
            story=_story(self._run_dir),
            regressed=regressed(self._run_dir),
        )


def watch_run(run_dir: RunDir, interval_s: float, *, as_json: bool = False) -> RunRecord:
    """Show a run until it ends: redrawn in a terminal, else a line whenever something has changed. Writes nothing.
    Returns what its journal says then."""
    viewer = Viewer(run_dir)
    console = output.output()
    if console.is_terminal and not as_json:
        return _watch_live(viewer, console, interval_s)
    return _watch_in_lines(viewer, interval_s, json_lines if as_json else Lines())


def _watch_live(viewer: Viewer, console: Console, interval_s: float) -> RunRecord:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            view = viewer.read()
            live.update(draw(view), refresh=True)
            if view.record.ended:
                return view.record
            time.sleep(interval_s)


def _watch_in_lines(viewer: Viewer, interval_s: float, lines_of: Callable[[View], Sequence[str]]) -> RunRecord:
    last: Sequence[str] = ()
    while True:
        view = viewer.read()
        lines = lines_of(view)
        if lines and lines != last:
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
            last = lines
        if view.record.ended:
            return view.record
        time.sleep(interval_s)


class Lines:
    """What to print of one view after another: what was found and decided since, and how far the run is."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._last = ""

    def __call__(self, view: View) -> list[str]:
        """Lines that say something new."""
        # By their words, not by their number: when progress stopped is known late, and stands before what was told.
        found = [line for line in view.story if line not in self._told]
        self._told.update(found)
        line = headline(view)
        if line != self._last:
            self._last = line
            found.append(line)
        return [terminal(line) for line in found]


def headline(view: View) -> str:
    """The run in one line."""
    parts = [f"{view.stored.run_id} {state_text(view.record.state.value, view.regressed)}"]
    if view.progress is not None:
        parts.append(f"attempt {view.progress.attempt.number}")
        if view.progress.restarts_made:
            parts.append(f"restart {view.progress.restarts_made}")
        parts.append(f"step {view.progress.step}/{view.stored.spec.total_steps}")
        parts += [
            f"{name} {view.progress.metrics[name]:.4g}" for name in SHOWN_METRICS[:2] if name in view.progress.metrics
        ]
    if view.record.ended and view.record.cause:
        parts.append(view.record.cause)
    return ", ".join(parts)


def json_lines(view: View) -> list[str]:
    """The run in one line of JSON."""
    progress = view.progress
    shown = {
        "run_id": view.stored.run_id,
        "state": view.record.state,
        "regressed": [one.model_dump() for one in view.regressed],
        "cause": view.record.cause,
        "attempt": progress.attempt.number if progress else 0,
        "restarts": progress.restarts_made if progress else 0,
        "step": progress.step if progress else 0,
        "total_steps": view.stored.spec.total_steps,
        "metrics": progress.metrics if progress else {},
        "ranks": [{"role": one.role, "rank": one.rank, "phase": one.phase, "step": one.step} for one in view.ranks],
        "story": view.story,
    }
    return [json_text(output.jsonable(shown))]


def draw(view: View) -> Group:
    """The whole view."""
    style = output.STATE_STYLES.get(view.record.state.value, "")
    parts: list[object] = [Text(terminal(headline(view)), style=style)]
    stages = [
        (stage.name.value, stage.attempt or "", stage.state.value, _seconds(view, index))
        for index, stage in enumerate(view.record.stages)
    ]
    if stages:
        parts.append(output.table(("stage", "attempt", "state", "took"), stages))
    if view.ranks and not view.record.ended:
        rows = [
            (
                rank.role.value,
                rank.rank,
                rank.node,
                rank.phase.value,
                rank.step,
                f"{rank.age_s:.1f} s ago",
                rank.process_state,
            )
            for rank in view.ranks
        ]
        parts.append(output.table(("role", "rank", "node", "phase", "step", "last beat", "process"), rows))
    metrics = view.progress.metrics if view.progress is not None else {}
    shown = [(name, f"{metrics[name]:.4g}") for name in SHOWN_METRICS if name in metrics]
    if shown:
        parts.append(output.table(("metric", "latest"), shown))
    parts += [Text(terminal(line), style="yellow") for line in view.story]
    return Group(*parts)  # type: ignore[arg-type]


def _seconds(view: View, index: int) -> str:
    stage = view.record.stages[index]
    return "" if stage.ended_at is None else output.seconds_text((stage.ended_at - stage.started_at).total_seconds())


def _ranks(restart: RestartDir) -> list[RankStatus]:
    statuses = (read_model(path, AgentStatus) for path in sorted(restart.agents.glob("*.json")))
    return [rank for status in statuses if status is not None for rank in status.ranks]


def _story(run_dir: RunDir) -> list[str]:
    attempts, told = run_dir.attempts(), read_record(run_dir).attempts.values()
    found = [incident for attempt in attempts for incident in incidents(attempt)]
    found += [one.incident for one in told if one.incident is not None]
    decided = [decision for attempt in attempts for decision in agent_decisions(attempt)]
    decided += [one.decision for one in told if one.decision is not None]
    if not found and not decided:
        return []
    starts = [start for attempt in attempts for restart in attempt.restarts() if (start := _start(restart)) is not None]
    return [f"{line.time:%H:%M:%S} {line.text}" for line in story.tell(found, decided, starts)]


def _start(restart: RestartDir) -> story.Start | None:
    """The first step of a start of the workers, if it has made one."""
    found = read_lines(restart.metrics, 0, FIRST_LINE_BYTES)
    first = next(iter(parse_lines(found.lines[:1], MetricsLine)), None)
    return None if first is None else story.Start(restart.attempt, restart.restart, first.step, first.time)
