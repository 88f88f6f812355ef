"""What a run came to, from its directory alone: for the end of `rlhf run` and for the artifact in Prefect."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.escaping import markdown as escaped
from rlhf_core.escaping import markdown_code
from rlhf_core.launch.journal import RunRecord, StageRecord, read_record
from rlhf_core.run_dir import RunDir, read_model, read_models
from rlhf_core.schemas.attempts import RunState, StageName, StageState
from rlhf_core.schemas.failures import Incident
from rlhf_core.schemas.regression import Regression, regression_text, regressions, state_text
from rlhf_core.schemas.reports import EvaluationReport, MetricsLine
from rlhf_core.schemas.run import StoredSpec
from rlhf_core.watchdog.evidence import incidents, num_restarts
from rlhf_core.words import count, missing_steps

Section = Sequence[str]
"""Lines of Markdown."""


@dataclass(frozen=True)
class Accuracy:
    """One measure, before and after."""

    name: str
    """``greedy`` or ``sampled``."""
    metric: str
    before: EvaluationReport | None
    after: EvaluationReport | None

    @property
    def gain(self) -> float | None:
        """After minus before; None when one of them is missing."""
        return self.after.value - self.before.value if self.before and self.after else None


@dataclass(frozen=True)
class Summary:
    """A run in a dozen facts."""

    run_dir: Path
    stored: StoredSpec
    state: RunState
    cause: str
    accuracy: Sequence[Accuracy]
    steps: int
    missing_steps: str
    """Of which steps there are no metrics; empty where none is missing."""
    num_attempts: int
    num_restarts: int
    incidents: Sequence[Incident]
    stage_seconds: Sequence[tuple[str, float]]
    """Stage (with its attempt where there were several) and its wall time, in order."""

    @property
    def run_id(self) -> str:
        """Identity of the run."""
        return self.stored.run_id

    @property
    def regressed(self) -> tuple[Regression, ...]:
        """Held-out scores that fell."""
        reports = [report for row in self.accuracy for report in (row.before, row.after) if report is not None]
        return regressions(report.model_dump(exclude={"samples"}) for report in reports)

    @property
    def state_text(self) -> str:
        """The state in which the run ended, with what must not be missed beside it."""
        return state_text(self.state.value, self.regressed)


def summarise(run_dir: RunDir) -> Summary:
    """Gather the facts.

    Raises:
        RunDirError: the run directory is missing or damaged.
    """
    stored = run_dir.read_spec()
    record = read_record(run_dir)
    steps = _steps(run_dir)
    return Summary(
        run_dir=run_dir.root,
        stored=stored,
        state=record.state,
        cause=record.cause,
        accuracy=[_accuracy(run_dir, name) for name in ("greedy", "sampled")],
        steps=max(steps, default=0),
        missing_steps=missing_steps(steps, stored.spec.total_steps, record.state),
        num_attempts=len(record.attempts),
        num_restarts=sum(num_restarts(attempt) for attempt in run_dir.attempts()),
        incidents=_incidents(run_dir, record),
        stage_seconds=_stage_seconds(record),
    )


def markdown(summary: Summary, sections: Sequence[Section] = ()) -> str:
    """The summary as Markdown.

    Args:
        sections: what else is told, between what it came to and how long its stages took.
    """
    spec = summary.stored.spec
    good = summary.state is RunState.COMPLETED
    lines = [
        f"# {summary.run_id}: {summary.state_text}",
        "",
        *([f"> **Regressed**: {escaped(regression_text(summary.regressed))}", ""] if summary.regressed else []),
        *([] if good or not summary.cause else [f"> {escaped(summary.cause)}", ""]),
        f"{spec.loops.main.algorithm.name.upper()}, {summary.steps} of {spec.total_steps} steps on "
        f"{spec.num_ranks} ranks, {count(summary.num_attempts, 'attempt')}, {count(summary.num_restarts, 'restart')}.",
        *(["", f"> {summary.missing_steps}"] if summary.missing_steps else []),
        "",
        "| held-out | before | after | gain |",
        "|---|---|---|---|",
        *(
            f"| {escaped(f'{row.metric}, {row.name}')} | {interval(row.before)} | {interval(row.after)} "
            f"| {signed(row.gain)} |"
            for row in summary.accuracy
        ),
        "",
        *(line for section in sections for line in section),
        "| stage | seconds |",
        "|---|---|",
        *(f"| {escaped(title)} | {seconds:.1f} |" for title, seconds in summary.stage_seconds),
        "",
        f"Run directory: {markdown_code(str(summary.run_dir))}",
        "",
        f"More: `rlhf show {summary.run_id}`; with plots and samples: `rlhf report {summary.run_id}`, which writes "
        f"{markdown_code(str(RunDir(summary.run_dir).report))}",
    ]
    return "\n".join(lines)


def interval(report: EvaluationReport | None) -> str:
    """A value with its confidence interval."""
    return "-" if report is None else f"{report.value:.3f} [{report.ci_low:.3f}, {report.ci_high:.3f}]"


def signed(value: float | None) -> str:
    """A difference with its sign."""
    return "-" if value is None else f"{value:+.3f}"


def _accuracy(run_dir: RunDir, name: str) -> Accuracy:
    before = read_model(run_dir.evaluation("before", name), EvaluationReport)
    after = read_model(run_dir.evaluation("after", name), EvaluationReport)
    known = after or before
    return Accuracy(name, known.metric if known else "accuracy", before, after)


def _steps(run_dir: RunDir) -> set[int]:
    """Steps that left metrics."""
    restarts = [restart for attempt in run_dir.attempts() for restart in attempt.restarts()]
    return {line.step for restart in restarts for line in read_models(restart.metrics, MetricsLine)}


def _incidents(run_dir: RunDir, record: RunRecord) -> list[Incident]:
    found = [incident for attempt in run_dir.attempts() for incident in incidents(attempt)]
    found += [attempt.incident for attempt in record.attempts.values() if attempt.incident is not None]
    return sorted(found, key=lambda incident: incident.seen_at)


def _stage_seconds(record: RunRecord) -> list[tuple[str, float]]:
    many = len(record.attempts) > 1

    def title(stage: StageRecord) -> str:
        if stage.name is StageName.PREFLIGHT and stage.state is StageState.COMPLETED and stage.message:
            return stage.message  # a trial
        return f"{stage.name.value} {stage.attempt}" if many and stage.attempt else stage.name.value

    return [
        (title(stage), (stage.ended_at - stage.started_at).total_seconds())
        for stage in record.stages
        if stage.ended_at is not None
    ]
