"""The summary of a run: its results in a dozen facts, and a Markdown page of them.

Read by :mod:`rlhf_core.control.views.summary`; shown at the end of ``rlhf run``, before an approval, and in Prefect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.render.timeline import Timeline, decision_text
from rlhf_core.render.weight_syncs import weight_sync_text
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.command_trainer import steps_hint
from rlhf_core.schemas.evaluation import EvaluationReport, gain
from rlhf_core.schemas.failures import Incident
from rlhf_core.schemas.regression import Regression, regression_text, regressions, state_text
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.text.escaping import markdown, markdown_code
from rlhf_core.text.formatting import count, duration, markdown_table

if TYPE_CHECKING:
    from rlhf_core.history.queries import RunDetails


@dataclass(frozen=True)
class Accuracy:
    """One measure, before and after training."""

    name: str
    """``greedy``, ``sampled``, ``preference``, ``loss`` or ``pass@k``."""
    metric: str
    before: EvaluationReport | None
    after: EvaluationReport | None

    @property
    def gain(self) -> float | None:
        """Improvement from before to after; None if either is missing."""
        return gain(self.name, self.before.value, self.after.value) if self.before and self.after else None


@dataclass(frozen=True)
class Summary:
    """A run in a dozen facts."""

    run_dir: Path
    stored: StoredSpec
    state: RunState
    cause: str
    accuracy: Sequence[Accuracy]
    steps: int
    """Last step since the last rewind."""
    missing_steps: str
    """Steps without metrics; empty if none is missing."""
    num_attempts: int
    num_restarts: int
    incidents: Sequence[Incident]
    stage_seconds: Sequence[tuple[str, float]]
    """Stage (with its attempt if there were several) and its wall time, in order."""

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.stored.run_id

    @property
    def steps_hint(self) -> str:
        """Advice if an external trainer completed without reporting any step; otherwise empty."""
        return steps_hint(self.stored.spec.trainer.kind, self.state, self.steps)

    @property
    def regressed(self) -> tuple[Regression, ...]:
        """Held-out scores that became worse."""
        reports = [report for row in self.accuracy for report in (row.before, row.after) if report is not None]
        return regressions(map(dict, reports))

    @property
    def state_text(self) -> str:
        """State of the run, followed by ``regressed`` if a score dropped."""
        return state_text(self.state.value, self.regressed)


def summary_markdown(summary: Summary, timeline: Timeline, details: "RunDetails | None", links: str) -> str:
    """Format a summary as a page of Markdown.

    Args:
        timeline: the run's timeline, for its promotion, incidents and decisions.
        details: the run in the history, for its goodput, lost time and weight syncs; None if unknown.
        links: Markdown with links to other pages of the run.
    """
    spec = summary.stored.spec
    good = summary.state is RunState.COMPLETED
    lines = [
        f"# {summary.run_id}: {summary.state_text}",
        "",
        *([f"> **Regressed**: {markdown(regression_text(summary.regressed))}", ""] if summary.regressed else []),
        *([] if good or not summary.cause else [f"> {markdown(summary.cause)}", ""]),
        f"{spec.algorithm.upper()}, {summary.steps} of {spec.total_steps} steps on "
        f"{spec.num_ranks} ranks{_engine_nodes(spec)}, {count(summary.num_attempts, 'attempt')}, "
        f"{count(summary.num_restarts, 'restart')}.",
        *(["", f"> {summary.missing_steps}"] if summary.missing_steps else []),
        *(["", f"> No step was reported; {markdown(summary.steps_hint)}"] if summary.steps_hint else []),
        "",
        *(accuracy_table(summary.accuracy) if summary.accuracy else []),
        "",
        *([links, ""] if links else []),
        *_promotion(timeline),
        *_times(details, has_step_times=spec.trainer.kind == "native"),
        *_incidents_and_decisions(timeline),
        *markdown_table(
            ("stage", "seconds"), ((markdown(title), f"{seconds:.1f}") for title, seconds in summary.stage_seconds)
        ),
        "",
        f"Run directory: {markdown_code(str(summary.run_dir))}",
        "",
        f"More: `rlhf show {summary.run_id}`; with plots and samples: `rlhf report {summary.run_id}`, which writes "
        f"{markdown_code(str(RunDir(summary.run_dir).report))}",
    ]
    return "\n".join(lines)


def _engine_nodes(spec: RunSpec) -> str:
    engines, nodes = spec.rollout.engines, spec.rollout.nodes
    return f", {count(engines, 'rollout engine')} on {count(nodes, 'node')} of their own" if nodes else ""


def accuracy_table(rows: Sequence[Accuracy]) -> list[str]:
    """Format the held-out results before and after training as a table in Markdown."""
    return markdown_table(
        ("held-out", "before", "after", "gain"),
        (
            (markdown(f"{row.metric}, {row.name}"), interval(row.before), interval(row.after), signed(row.gain))
            for row in rows
        ),
    )


def interval(report: EvaluationReport | None) -> str:
    """Format a value with its confidence interval."""
    return "-" if report is None else f"{report.value:.3f} [{report.ci_low:.3f}, {report.ci_high:.3f}]"


def signed(value: float | None) -> str:
    """Format a difference with its sign."""
    return "-" if value is None else f"{value:+.3f}"


def _promotion(timeline: Timeline) -> list[str]:
    event = timeline.promotion
    if event is None:
        return []
    parts = [
        f"**Promotion: {event.state.value}**, step {event.checkpoint_step}",
        f"by {markdown(event.by)}" if event.by else "",
        markdown(event.reason),
        markdown_code(event.path) if event.path else "",
    ]
    advice = [f"Decide with `rlhf approve {timeline.run_id}`", ""] if event.state.value == "waiting" else []
    return [" · ".join(part for part in parts if part), "", *advice]


def _times(details: "RunDetails | None", *, has_step_times: bool) -> list[str]:
    if details is None or not details.goodput["wall_s"]:
        return []
    goodput = details.goodput
    # Not every trainer logs step times; without them the share would be 0.
    has_share = goodput["ettr"] is not None and (has_step_times or goodput["productive_s"])
    rows = [
        ("from start to end", duration(goodput["wall_s"])),
        ("of it waiting for nodes", duration(goodput["queue_s"])),
        ("steps that count", duration(goodput["productive_s"])),
        ("steps made again", duration(goodput["repeated_s"])),
        ("lost to failures, with these", duration(goodput["lost_s"])),
        ("goodput, queue not counted", f"{goodput['ettr']:.1%}" if has_share else ""),
        *(
            (f"lost to {markdown(row['failure_kind'])}", f"{duration(row['lost_s'])}, {row['num_incidents']} of them")
            for row in details.lost_time
        ),
        ("weight syncs", markdown(weight_sync_text(details.weight_syncs))),
    ]
    return [*markdown_table(("time", ""), (row for row in rows if row[1])), ""]


def _incidents_and_decisions(timeline: Timeline) -> list[str]:
    found = [
        (one.incident.seen_at, one.incident.attempt, one.incident.failure_kind.value, one.incident.message)
        for one in timeline.incidents
    ]
    found += [
        (one.decision.decided_at, one.decision.attempt, "", decision_text(one.decision)) for one in timeline.decisions
    ]
    if not found:
        return ["No incident.", ""]
    return [
        *markdown_table(
            ("at (UTC)", "attempt", "incident", "message, decision"),
            ((f"{at:%Y-%m-%d %H:%M:%S}", number, kind, markdown(text)) for at, number, kind, text in sorted(found)),
        ),
        "",
    ]
