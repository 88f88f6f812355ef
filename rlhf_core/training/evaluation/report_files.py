"""Report files of evaluations in the run directory."""

from collections.abc import Sequence

from rlhf_core.files.lookups import is_there
from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.evaluation import EvaluationName, EvaluationReport, When
from rlhf_core.training.distributed import Ranks


def write_reports(run_dir: RunDir, reports: Sequence[EvaluationReport], ranks: Ranks) -> None:
    """Write the report files on rank 0."""
    if ranks.is_first:
        for report in reversed(reports):  # pass@k before the files that mean that all are written
            write_model(run_dir.evaluation(report.when, report.name), report)
    for report in reports:
        ranks.log(
            f"evaluation {report.when} training, {report.name}: {report.metric} {report.value:.3f} "
            f"[{report.ci_low:.3f}, {report.ci_high:.3f}] over {report.num_samples} samples"
        )


def are_written(run_dir: RunDir, when: When, names: Sequence[EvaluationName] = ("greedy", "sampled")) -> bool:
    """True if the evaluations of that point in the run already exist."""
    return all(is_there(run_dir.evaluation(when, name)) for name in names)
