"""Handling of a run whose directory was removed or moved away: its job is ended and the run is closed in the
history."""

from contextlib import suppress

from rlhf_core.control.attempts.jobs import submission_of
from rlhf_core.control.controller import Controller
from rlhf_core.errors import HistoryError, RlhfError, RunDirGone, SchedulerError
from rlhf_core.files.whole import remove_tree
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import AttemptState, RunState, StageState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.watchdog.missing_run import close_missing


def abandon(controller: Controller, found: RunDirGone) -> RunDirGone:
    """End the job, since its results have nowhere to go, and close the run in the history.

    If the scheduler or the database does not respond, one timeout each is all that is spent on them: without the
    directory, there is nothing left to wait for.

    Returns: the error to raise.
    """
    run_id = controller.run_dir.run_id
    if controller.journal.record.ended:  # only its promotion was still pending
        return RunDirGone(f"the directory of run {run_id}, which had ended, is gone: {found}")
    cause = f"the run directory is gone: {found}. {_end_job(controller)}"
    _clear_remains(controller.run_dir)
    _record_end(controller.journal, cause)
    try:
        close_missing(run_id, controller.store, cause, utc_now())
    except HistoryError as error:
        cause += f". The history could not be updated ({error}); the site daemon will update it later"
    return RunDirGone(
        f"run {run_id} failed: {cause}.\n"
        f"  Its checkpoints and metrics were in it. If it was moved, move it back, then run `rlhf resume {run_id}`; "
        f"if it was deleted, start over: `rlhf run {controller.stored.config_source}`"
    )


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
        return "No job of it is at work"
    submission = attempt.submission
    try:
        submission = submission_of(controller.scheduler, controller.run_dir.run_id, attempt)
        if submission is None:
            return "No job of it is at work"
        if controller.scheduler.cancel(submission):
            return f"Its job {submission.job_id} was ended"
        problem = "something of it is still at work"
    except SchedulerError as error:
        problem = str(error)
    named = f"Its job {submission.job_id}" if submission is not None else "Its job"
    return f"{named} could not be ended ({problem}): end it at the scheduler"
