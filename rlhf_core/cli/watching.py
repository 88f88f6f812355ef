"""``rlhf watch``: a view of a run that another process drives, from its run directory.

The directory does not show that a run has lost its controller; the history does.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlhf_core.cli import output
from rlhf_core.control.promotion import how_to_answer, is_due
from rlhf_core.control.undriven import undriven_since, undriven_text
from rlhf_core.control.views.progress import RunReader, RunSnapshot
from rlhf_core.errors import DatabaseUnavailable, RunCancelled, RunFailed
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import RunRecord, StageRecord
from rlhf_core.render.progress import METRICS, progress_text
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.regression import state_text
from rlhf_core.text.escaping import json_text, terminal

MAX_RANKS = 12
"""Number of ranks shown in a terminal, those with the oldest beats: what is below its last line cannot be seen."""
MAX_ENTRIES = 8
"""Number of entries of the timeline shown in a terminal, the newest ones."""

Read = Callable[[], RunSnapshot]
"""Reads the present state of the run."""


def watch_run(
    run_dir: RunDir, interval_s: float, store: HistoryStore | None = None, *, as_json: bool = False
) -> RunRecord:
    """Show a run until it ends: redrawn in a terminal, otherwise a line for every change. Writes nothing.

    Args:
        store: history that is queried for the time since which no controller drives the run; None to omit that.

    Returns:
        The last reading of its journal.
    """
    reader = RunReader(run_dir)

    def read() -> RunSnapshot:
        view = reader.read()
        if store is None or view.record.ended:
            return view
        return replace(view, undriven_since=_undriven_since(store, run_dir.run_id))

    console = output.output()
    if console.is_terminal and not as_json:
        return _watch_live(read, console, interval_s)
    return _watch_in_lines(read, interval_s, json_lines if as_json else NewLines())


def require_completed(run_id: str, record: RunRecord) -> None:
    """Raise the error whose exit code reports the end of a run.

    Raises:
        RunFailed, RunCancelled: it did not complete.
    """
    if record.state is RunState.CANCELLED:
        raise RunCancelled(f"run {run_id} was cancelled: {record.cause}")
    if record.state is not RunState.COMPLETED:
        raise RunFailed(f"run {run_id} {record.state.value}: {record.cause}. `rlhf show {run_id}` has the details")


def note_open_question(run_dir: RunDir, record: RunRecord) -> None:
    """Note that the model of a run that has completed waits for an answer, which the controller asks for only now."""
    stored = run_dir.read_spec()
    if stored.spec.promote.when == "approved" and is_due(stored, record):
        output.note(f"its model is promoted only once it is approved: {how_to_answer(run_dir.run_id)}")


def _undriven_since(store: HistoryStore, run_id: str) -> datetime | None:
    try:
        return undriven_since(store, [run_id]).get(run_id)
    except DatabaseUnavailable:
        return None  # the directory has everything else


def _watch_live(read: Read, console: Console, interval_s: float) -> RunRecord:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            view = read()
            live.update(draw(view), refresh=True)
            if view.record.ended:
                return view.record
            time.sleep(interval_s)


def _watch_in_lines(read: Read, interval_s: float, lines_of: Callable[[RunSnapshot], Sequence[str]]) -> RunRecord:
    last: Sequence[str] = ()
    while True:
        view = read()
        lines = lines_of(view)
        if lines and lines != last:
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
            last = lines
        if view.record.ended:
            return view.record
        time.sleep(interval_s)


class NewLines:
    """Selects the lines of a view that have not been printed yet: timeline entries and progress."""

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._last = ""
        self._undriven = ""

    def __call__(self, view: RunSnapshot) -> list[str]:
        """Return the new lines."""
        # By text, not by position: the start of a hang is known late, and precedes lines that were already printed.
        found = [line for line in timeline_lines(view) if line not in self._printed]
        self._printed.update(found)
        line = headline(view)
        if line != self._last:
            self._last = line
            found.append(line)
        undriven = undriven_line(view)
        if undriven != self._undriven:
            self._undriven = undriven
            found += [undriven] if undriven else []
        return [terminal(line) for line in found]


def timeline_lines(view: RunSnapshot) -> list[str]:
    """Format incidents, decisions and recoveries, oldest first."""
    return [f"{entry.time:%Y-%m-%d %H:%M:%S} {entry.text}" for entry in view.timeline.entries()]


def undriven_line(view: RunSnapshot) -> str:
    """Advice for a run that no controller drives; empty if one does."""
    if view.undriven_since is None:
        return ""
    return undriven_text(view.stored.trial_of or view.stored.run_id, view.undriven_since)


def headline(view: RunSnapshot) -> str:
    """Format the run as one line."""
    parts = [f"{view.stored.run_id} {state_text(view.record.state.value, view.regressed)}"]
    if view.progress.attempt:
        parts += [f"attempt {view.progress.attempt}", progress_text(view.progress)]
    if view.record.ended and view.record.cause:
        parts.append(view.record.cause)
    return ", ".join(parts)


def json_lines(view: RunSnapshot) -> list[str]:
    """Format the run as one line of JSON."""
    progress, timeline = view.progress, timeline_lines(view)
    shown = {
        "run_id": view.stored.run_id,
        "state": view.record.state,
        "regressed": [one.model_dump() for one in view.regressed],
        "cause": view.record.cause,
        "undriven_since": view.undriven_since,
        "attempt": progress.attempt,
        "restarts": progress.restarts,
        "step": progress.step,
        "total_steps": view.stored.spec.total_steps,
        "metrics": progress.metrics,
        "ranks": [{"role": one.role, "rank": one.rank, "phase": one.phase, "step": one.step} for one in view.ranks],
        "timeline": timeline,
        "story": timeline,  # its name in 0.1
    }
    return [json_text(output.jsonable(shown))]


def draw(view: RunSnapshot) -> Group:
    """Build the whole view."""
    style = output.STATE_STYLES.get(view.record.state.value, "")
    parts: list[object] = [Text(terminal(headline(view)), style=style)]
    if undriven := undriven_line(view):
        parts.append(Text(terminal(undriven), style="red"))
    stages = [
        (stage.name.value, stage.attempt or "", stage.state.value, _seconds(stage)) for stage in view.record.stages
    ]
    if stages:
        parts.append(output.table(("stage", "attempt", "state", "took"), stages))
    if view.ranks and not view.record.ended:
        silent = sorted(view.ranks, key=lambda rank: rank.age_s, reverse=True)[:MAX_RANKS]
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
            if rank in silent
        ]
        parts.append(output.table(("role", "rank", "node", "phase", "step", "last beat", "process"), rows))
        if len(view.ranks) > MAX_RANKS:
            parts.append(Text(f"{len(view.ranks) - MAX_RANKS} more, with a later beat", style="dim"))
    metrics = view.progress.metrics
    shown = [(key, format(metrics[key], form)) for key, _, form in METRICS if key in metrics]
    if shown:
        parts.append(output.table(("metric", "latest"), shown))
    # The last view stays in the terminal, which then scrolls.
    lines = timeline_lines(view)[0 if view.record.ended else -MAX_ENTRIES :]
    parts += [Text(terminal(line), style="yellow") for line in lines]
    return Group(*parts)  # type: ignore[arg-type]


def _seconds(stage: StageRecord) -> str:
    return "" if stage.ended_at is None else output.seconds_text((stage.ended_at - stage.started_at).total_seconds())
