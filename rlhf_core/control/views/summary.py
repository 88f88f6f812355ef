"""Reading the summary of a run from its directory alone."""

from rlhf_core.control.views.timeline import all_incidents
from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import read_all
from rlhf_core.launch.journal import RunRecord, StageRecord, read_record
from rlhf_core.render.summary import Accuracy, Summary
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import StageName, StageState
from rlhf_core.schemas.evaluation import EvaluationReport, display_order
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import missing_steps
from rlhf_core.watchdog.evidence import num_restarts


def summarise(run_dir: RunDir) -> Summary:
    """Read the summary of a run.

    Raises:
        RunDirError: the run directory is missing or damaged.
    """
    stored = run_dir.read_spec()
    record = read_record(run_dir)
    by_restart = _steps(run_dir)
    steps = {step for made in by_restart for step in made}
    return Summary(
        run_dir=run_dir.root,
        stored=stored,
        state=record.state,
        cause=record.cause,
        accuracy=_accuracies(run_dir, stored.spec) if stored.spec.is_evaluated else [],
        steps=max(by_restart[-1]) if by_restart else 0,
        # Another program may log every tenth step, or none.
        missing_steps=missing_steps(steps, stored.spec.total_steps, record.state)
        if stored.spec.trainer.kind == "native"
        else "",
        num_attempts=len(record.attempts),
        num_restarts=sum(num_restarts(attempt) for attempt in run_dir.attempts()),
        incidents=all_incidents(run_dir, record),
        stage_seconds=_stage_seconds(record),
    )


def _accuracies(run_dir: RunDir, spec: RunSpec) -> list[Accuracy]:
    """Evaluations that were made, and those that are certain to follow."""
    reports = {(one.name, one.when): one for one in read_all(run_dir.evaluations(), EvaluationReport)}
    names = sorted({*(name for name, _ in reports), *spec.evaluations}, key=display_order)
    return [_accuracy(name, reports.get((name, "before")), reports.get((name, "after"))) for name in names]


def _accuracy(name: str, before: EvaluationReport | None, after: EvaluationReport | None) -> Accuracy:
    known = after or before
    return Accuracy(name, known.metric if known else "accuracy", before, after)


def _steps(run_dir: RunDir) -> list[set[int]]:
    """Steps that left metrics, for each restart with such steps."""
    found = [{line.step for line in read_models(restart.metrics, MetricsLine)} for restart in run_dir.restarts()]
    return [steps for steps in found if steps]


def _stage_seconds(record: RunRecord) -> list[tuple[str, float]]:
    many = len(record.attempts) > 1

    def title(stage: StageRecord) -> str:
        if stage.name is StageName.PREFLIGHT and stage.state is StageState.COMPLETED and stage.message:
            return stage.message  # a trial
        return f"{stage.name.value} (attempt {stage.attempt})" if many and stage.attempt else stage.name.value

    return [
        (title(stage), (stage.ended_at - stage.started_at).total_seconds())
        for stage in record.stages
        if stage.ended_at is not None
    ]
