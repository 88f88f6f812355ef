"""The end of a run whose directory was removed or moved away, by its controller, a user or the site daemon: its job is
ended, and the run is closed in the history."""

from contextlib import suppress

from rlhf_core.config.site import Site
from rlhf_core.control.attempts.jobs import end_submission, submission_of
from rlhf_core.control.cancel import Cancelled
from rlhf_core.control.controller import Controller
from rlhf_core.errors import HistoryError, RlhfError, RunDirError, RunDirGone, SchedulerError, UnknownRun
from rlhf_core.files.whole import remove_tree
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler import get_scheduler
from rlhf_core.schemas.attempts import AttemptState, RunState, StageState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.watchdog.gone_run import close_gone

GONE = "the run directory is gone"
"""Beginning of the cause with which such a run ends."""


def abandon(controller: Controller, found: RunDirGone) -> RunDirGone:
    """End the job, since its results have nowhere to go, and close the run in the history.

    If the scheduler or the database does not respond, one timeout each is all that is spent on them: without the
    directory, there is nothing left to wait for.

    Returns: the error to raise.
    """
    run_id = controller.run_dir.run_id
    if controller.journal.record.ended:  # only its promotion was still pending
        return RunDirGone(f"the directory of run {run_id}, which had ended, is gone: {found}")
    cause = f"{GONE}: {found}. {_end_job(controller)}"
    _clear_remains(controller.run_dir)
    _record_end(controller.journal, cause)
    try:
        close_gone(run_id, controller.store, cause, utc_now())
    except HistoryError as error:
        cause += f". The history could not be updated ({error}); the site daemon will update it later"
    return RunDirGone(
        f"run {run_id} failed: {cause}.\n"
        f"  Its checkpoints and metrics were in it. If it was moved, move it back, then run `rlhf resume {run_id}`; "
        f"if it was deleted, start over: `rlhf run {controller.stored.config_source}`"
    )


def cancel_gone(run: str, site: Site, store: HistoryStore, reason: str) -> Cancelled | None:
    """End the jobs of a run whose directory was removed or moved away, and close the run in the history.

    The journal is gone with the directory, so the jobs are found by the marker that each one carries.

    Args:
        run: its id, or a prefix that identifies one run.

    Returns:
        The result; None if the history has no such run.

    Raises:
        RunDirError: the folder of all runs is missing too: its file system may be unavailable.
        SchedulerError: it does not respond, or part of a job is still running.
    """
    try:
        run_id = queries.resolve_run(store, run)
    except UnknownRun:
        return None
    root = queries.run_dir_of(store, run_id).root
    if not root.parent.is_dir():
        raise RunDirError(
            f"{root.parent}, the folder of all runs, is missing: restore its file system, then cancel again"
        )
    scheduler = get_scheduler(site.scheduler)
    jobs = [living.submission for living in scheduler.living() if living.run_id == run_id]
    for job in jobs:
        end_submission(scheduler, job)
    ended = (
        f"ended by its marker: job {', '.join(job.job_id for job in jobs)}" if jobs else "none of its jobs was running"
    )
    cause = f"{GONE}: {root}. Cancelled ({reason}); {ended}"
    closed = close_gone(run_id, store, cause, utc_now())
    state = RunState(queries.show_run(store, run_id).run["state"])
    how = f"is closed as {state.value}" if closed else f"had ended ({state.value})"
    message = f"the directory of run {run_id}, {root}, is gone; the run {how}; {ended}"
    return Cancelled(state, True, message)


def _record_end(journal: Journal, cause: str) -> None:
    """Close the run in the journal, whose file is still open. If the directory was moved, the journal moved with it and
    will say why the run ended; if it was deleted, the entry is lost."""
    stage, attempt = journal.record.open_stage(), journal.record.last_attempt
    with suppress(RlhfError):
        if stage is not None:
            journal.end_stage(stage.index, StageState.FAILED, cause)
        if attempt is not None and not attempt.ended:
            journal.move_attempt(attempt.placement.attempt, AttemptState.LOST, cause, FailureKind.FILE_SYSTEM)
        journal.move_run(RunState.FAILED, cause)


def _clear_remains(run_dir: RunDir) -> None:
    """Remove the folders that agents recreated after the directory was gone. If the directory had been moved, moving it
    back would otherwise put it inside them. A checkpoint written meanwhile is kept."""
    kept = (run_dir.spec, run_dir.control, run_dir.checkpoints_dir)
    if not any(path.exists() for path in kept):
        with suppress(OSError):
            remove_tree(run_dir.root)


def _end_job(controller: Controller) -> str:
    attempt = controller.journal.record.last_attempt
    if attempt is None or attempt.ended:
        return "None of its jobs is running"
    submission = attempt.submission
    try:
        submission = submission_of(controller.scheduler, controller.run_dir.run_id, attempt)
        if submission is None:
            return "None of its jobs is running"
        if controller.scheduler.cancel(submission):
            return f"Its job {submission.job_id} was ended"
        problem = "part of it is still running"
    except SchedulerError as error:
        problem = str(error)
    named = f"Its job {submission.job_id}" if submission is not None else "Its job"
    return f"{named} could not be ended ({problem}): end it at the scheduler"
