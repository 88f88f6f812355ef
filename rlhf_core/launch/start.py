"""Submission of an attempt exactly once, even if the controller dies between submitting and recording it."""

from collections.abc import Callable

from rlhf_core.config.site import Site
from rlhf_core.files.lookups import is_there
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest, Scheduler
from rlhf_core.scheduler.passed_environment import PassedEnvironment
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.journal import AttemptPlanned, AttemptSubmitted
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.schemas.run import RunSpec


def agent_command(run_dir: RunDir, attempt: int, compute_python: str) -> tuple[str, ...]:
    """Build the command line that the scheduler runs on every node: the only link between controller and agents.

    The agent imports nothing from its working folder, which is often the folder of all runs.
    """
    agent = ("-P", "-m", "rlhf_core.worker", "agent")
    return (compute_python, *agent, "--run-dir", str(run_dir.root), "--attempt", str(attempt))


def job_request(run_dir: RunDir, spec: RunSpec, placement: Placement, site: Site) -> JobRequest:
    """Build the job request of one attempt. The run may override the site's Slurm options."""
    resources = spec.resources
    slurm = spec.slurm.over(site.slurm)
    return JobRequest(
        run_id=run_dir.run_id,
        placement=placement,
        scheduler_dir=run_dir.attempt(placement.attempt).scheduler_dir,
        command=agent_command(run_dir, placement.attempt, site.compute_python),
        cpus_per_node=spec.processes_on_each_of(placement.num_nodes) * resources.cpus_per_rank,
        memory_gb=resources.memory_gb,
        time_limit_s=resources.time_limit_s,
        slurm=slurm,
        passed=PassedEnvironment(slurm.pass_environment, site.job_secrets),
    )


def record_plan(run_dir: RunDir, placement: Placement, journal: Journal) -> Placement:
    """Record a placement before anything is submitted; an existing record is kept, because it may have been used."""
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
    """Submit an attempt, unless it was submitted before, whether that was recorded or only the scheduler knows it.

    A controller may be killed or suspended at any point of this function; the next one still ends up with a single job.

    Args:
        require_lease: called immediately before the job is submitted; raises if another controller has the run.

    Returns:
        The job; None if the attempt's files show that it started, but its job was never recorded and the scheduler no
        longer knows it: it has ended.

    Raises:
        SubmissionFailed: the scheduler did not accept it.
        SchedulerUnavailable: it did not answer; the job may exist, and another call finds it then.
        SchedulerError: this host belongs to another cluster than the one the attempt was planned for. Nothing is
            submitted, because the job may already exist.
        LeaseLost: another controller has the run. Nothing was submitted and nothing written.
    """
    number = request.placement.attempt
    attempt_dir = run_dir.attempt(number)
    submission = read_model(attempt_dir.submission, Submission)
    if submission is None:
        # Order matters: look for an accepted job whose answer was lost before submitting a new one.
        submission = scheduler.find(request.run_id, number, request.placement.cluster)
        if submission is None and is_there(attempt_dir.claim):
            journal.move_attempt(number, AttemptState.SUBMITTED, "its job was never recorded and no longer exists")
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
