"""Implementation of ``rlhf check --probe``: take the allocation that a run would get, check its nodes, release it."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rlhf_core.allocation.planner import plan
from rlhf_core.condition_log import ConditionLog
from rlhf_core.config.site import Site
from rlhf_core.errors import RunFailed, SchedulerError
from rlhf_core.files.appended import read_tail
from rlhf_core.files.whole import read_model, remove_tree, write_model
from rlhf_core.launch.prepare import prepare
from rlhf_core.launch.start import job_request
from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState, JobStatus, Scheduler
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import AttemptOutcome
from rlhf_core.schemas.resources import GroupPlan, Submission, in_order
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.redaction import masked
from rlhf_core.watchdog.evidence import scheduler_log

PROBES = ".probes"
"""Folder, next to the runs, for the directories of probes. Probes are not runs, and the history does not list them."""
POLL_S = 0.5
OUTCOME_S = 10.0
"""Time for the outcome of an ended job to appear."""
LOG_TAIL_BYTES = 16 << 10
MARGIN_S = 600
"""Added to the job's time limit on top of the measurements: interpreters start slowly on a cold file system."""


def probe_nodes(
    spec: RunSpec, site: Site, scheduler: Scheduler, report_progress: Callable[[str], None]
) -> tuple[CheckResult, ...]:
    """Check the nodes that a run would get. The directory of the probe is kept only if something was found.

    Args:
        spec: With absolute paths.
        report_progress: Called with progress messages.

    Raises:
        BadInput: the inventory has no room for the run.
        SchedulerError: the scheduler does not respond or did not accept the job.
        RunFailed: the agents ended without reporting findings.
    """
    run_dir = prepare(spec, site.runs_dir / PROBES, config_source="rlhf check --probe")
    attempt = run_dir.attempt(1)
    resources = spec.resources
    probe = GroupPlan.on_all_nodes(Role.PROBE, resources.ranks_per_node, resources.num_nodes, resources.gpus_per_node)
    placement = plan(spec, scheduler.inventory(), attempt=1, slurm=spec.slurm.over(site.slurm))
    placement = placement.model_copy(update={"phases": in_order(probe)})
    write_model(attempt.placement, placement)
    request = job_request(run_dir, spec, placement, site)
    needed_s = spec.supervise.join_s + spec.preflight.measurement_s(resources.num_nodes)
    limit_s = min(request.time_limit_s, round(needed_s) + MARGIN_S)
    submission = scheduler.submit(replace(request, time_limit_s=limit_s))
    try:
        report = _await_report(attempt, submission, scheduler, report_progress)
    finally:
        gone = False
        with suppress(SchedulerError):  # report how the probe ended instead
            gone = scheduler.cancel(submission)
        if not gone:
            report_progress(
                f"job {submission.job_id} may still be running; the scheduler did not confirm that it ended"
            )
    report_progress(f"nodes checked in {report.seconds:.1f} s")
    _clean_up(run_dir, report, report_progress)
    return report.results


def _await_report(
    attempt: AttemptDir, submission: Submission, scheduler: Scheduler, report_progress: Callable[[str], None]
) -> ProbeReport:
    progress, ended_at_s = ConditionLog(report_progress), None
    while True:
        status = scheduler.status([submission]).get(submission.job_id, JobStatus(JobState.UNKNOWN))
        outcome = read_model(attempt.outcome, AttemptOutcome)
        report = read_model(attempt.probe_report, ProbeReport)
        if report is not None and outcome is not None:
            return report
        if outcome is not None:
            raise RunFailed(f"the nodes were not checked: {outcome.message}. Logs: {attempt.scheduler_dir}")
        if status.state is JobState.ENDED:
            ended_at_s = time.monotonic() if ended_at_s is None else ended_at_s
            if time.monotonic() - ended_at_s > OUTCOME_S:
                why = f"{status.reason or 'no reason given'}{_srun_error(attempt)}"
                raise RunFailed(f"the job ended without findings ({why}). Logs: {attempt.scheduler_dir}")
        progress.log_change(_status_text(submission, status))
        time.sleep(POLL_S)


def _srun_error(attempt: AttemptDir) -> str:
    """The srun error for a node whose agent could not start; empty if there is none."""
    log = scheduler_log(attempt)
    lines = read_tail(log, LOG_TAIL_BYTES).splitlines() if log is not None else []
    return next(
        (f"; {masked(line.strip())}" for line in lines if line.startswith(("srun: error", "slurmstepd: error"))), ""
    )


def _status_text(submission: Submission, status: JobStatus) -> str:
    job = f"{submission.scheduler} job {submission.job_id}"
    if status.state is JobState.PENDING:
        return f"{job} is waiting for nodes: {status.reason}" if status.reason else f"{job} is waiting for nodes"
    if status.state is JobState.RUNNING:
        return f"{job} is checking {', '.join(status.nodes)}" if status.nodes else f"{job} is running"
    return f"{job}: {status.state.value}"


def _clean_up(run_dir: RunDir, report: ProbeReport, report_progress: Callable[[str], None]) -> None:
    if all(result.status in (CheckStatus.PASSED, CheckStatus.SKIPPED) for result in report.results):
        remove_tree(run_dir.root)
    else:
        report_progress(f"the reports of the nodes are in {run_dir.attempt(1).probe}")
