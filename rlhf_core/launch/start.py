"""Submission of an attempt exactly once, whatever happens between the submission and its record."""

from collections.abc import Callable
from pathlib import Path

from rlhf_core.files.whole import read_model, write_model
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest, Scheduler
from rlhf_core.scheduler.passed_environment import PassedEnvironment
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.journal import AttemptPlanned, AttemptSubmitted
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.schemas.run import RunSpec


def agent_command(run_dir: RunDir, attempt: int, compute_python: str) -> tuple[str, ...]:
    """Build the command line that the scheduler starts on every node: the seam between the two towers.

    Nothing is imported from the folder that it is started in: that is often the folder of all runs.
    """
    return (
        compute_python,
        "-P",
        "-m",
        "rlhf_core.worker",
        "agent",
        "--run-dir",
        str(run_dir.root),
        "--attempt",
        str(attempt),
    )


def job_request(
    run_dir: RunDir,
    spec: RunSpec,
    placement: Placement,
    compute_python: str,
    site: SlurmSpec | None = None,
    job_secrets: Path | None = None,
) -> JobRequest:
    """Build the job request of one attempt.

    Args:
        site: Slurm options of all jobs of the site, unless their run overrides them.
        job_secrets: File with values for ``slurm.pass_environment``.
    """
    resources = spec.resources
    slurm = spec.slurm.over(site or SlurmSpec())
    return JobRequest(
        run_id=run_dir.run_id,
        placement=placement,
        scheduler_dir=run_dir.attempt(placement.attempt).scheduler_dir,
        command=agent_command(run_dir, placement.attempt, compute_python),
        cpus_per_node=spec.processes_per_node * resources.cpus_per_rank,
        memory_gb=resources.memory_gb,
        time_limit_s=resources.time_limit_s,
        slurm=slurm,
        passed=PassedEnvironment(slurm.pass_environment, job_secrets),
        environment={},  # threads, ports and devices of the workers are set by their agent
    )


def record_plan(run_dir: RunDir, placement: Placement, journal: Journal) -> Placement:
    """Record a placement before anything is submitted; an existing one is kept, for it may have been used."""
    attempt_dir = run_dir.attempt(placement.attempt)
    present = read_model(attempt_dir.placement, Placement)
    if present is None:
        write_model(attempt_dir.placement, placement)
        present = placement
    if placement.attempt not in journal.record.attempts:
        journal.append(AttemptPlanned(placement=present))
    return present


def submit_once(
    run_dir: RunDir,
    request: JobRequest,
    scheduler: Scheduler,
    journal: Journal,
    require_lease: Callable[[], None] = lambda: None,
) -> Submission | None:
    """Submit an attempt, unless it was submitted before: recorded, or known to the scheduler only.

    A controller may be killed or suspended at any point in here; the next one ends with the same single job.

    Args:
        require_lease: called immediately before the job is submitted; raises if another controller has the run.

    Returns:
        The job; None if the attempt was begun, as its files show, but its job was never recorded and the scheduler no
        longer knows it: it has ended.

    Raises:
        SubmissionFailed: the scheduler did not accept it.
        SchedulerError: it did not answer. Nothing is submitted then: it could be the second time.
        LeaseLost: another controller has the run. Nothing was submitted and nothing written.
    """
    number = request.placement.attempt
    attempt_dir = run_dir.attempt(number)
    submission = read_model(attempt_dir.submission, Submission)
    if submission is None:
        # The order matters: a job that was accepted, but whose answer was lost, must be found before one is made.
        submission = scheduler.find(request.run_id, number)
        if submission is None and attempt_dir.claim.exists():
            journal.move_attempt(number, AttemptState.SUBMITTED, "its job was never recorded and is gone")
            return None
        if submission is None:
            require_lease()
            submission = scheduler.submit(request)
        write_model(attempt_dir.submission, submission)
    record = journal.record.attempts[number]
    if record.submission is None:
        journal.append(AttemptSubmitted(submission=submission))
    if record.state is AttemptState.PLANNED:
        journal.move_attempt(number, AttemptState.SUBMITTED, f"{submission.scheduler} job {submission.job_id}")
    return submission
