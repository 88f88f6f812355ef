"""The job of an attempt: questions to its scheduler, commands to its agents, and its confirmed end."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from rlhf_core.condition_log import ConditionLog
from rlhf_core.control.controller import Controller
from rlhf_core.errors import DatabaseUnavailable, SchedulerError, SchedulerUnavailable
from rlhf_core.files.lookups import paths_in
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.launch.journal import AttemptRecord
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState, Scheduler
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.resources import Submission

CANCEL_TIMEOUT_S = 10.0
"""Time for agent 0 to obey the command to end, before the scheduler ends the job."""

RELEASE_TIMEOUT_S = 60.0
"""Time for the job of a completed run to end by itself, before approval of its model is requested."""

SCHEDULER_RETRY_INTERVAL_S = 30.0
"""Pause before asking an unresponsive scheduler again. By then, it lists a job whose acceptance it did not confirm."""

_Answer = TypeVar("_Answer")


def answer_of(controller: Controller, ask: Callable[[], _Answer]) -> _Answer:
    """Answer of the scheduler. While it does not respond, nothing about the run is decided; it is asked again.

    Raises:
        SchedulerError: it cannot be used, or it refuses; also the errors of :meth:`Controller.wait`.
    """
    outage = ConditionLog(controller.observer.log)
    while True:
        try:
            return ask()
        except SchedulerUnavailable as error:
            outage.log_change(
                f"waiting for the scheduler: {error}; asking again every {SCHEDULER_RETRY_INTERVAL_S:.0f} s"
            )
            controller.wait(SCHEDULER_RETRY_INTERVAL_S)


def order_to_end(reason: str, *, save: bool) -> AgentCommand:
    """The command to end, with or without writing a checkpoint first."""
    return AgentCommand(kind="stop_after_step" if save else "cancel", reason=reason, time=utc_now())


def pending_request(run_dir: RunDir) -> AgentCommand | None:
    """The pending request to end a run; None if there is none or it cannot be read."""
    with suppress(OSError):
        return read_model(run_dir.cancel_request, AgentCommand)
    return None


def is_to_save(run_dir: RunDir) -> bool:
    """True if the pending request to end a run asks for a checkpoint first."""
    request = pending_request(run_dir)  # if it cannot be read, the run is ended without one
    return request is not None and request.kind == "stop_after_step"


def give_order(run_dir: RunDir, number: int, command: AgentCommand) -> None:
    """Send agent 0 a command: the next numbered file in its folder."""
    folder = run_dir.attempt(number).commands
    taken = [int(path.stem) for path in paths_in(folder, "*.json") if path.stem.isdigit()]
    write_model(folder / f"{max(taken, default=0) + 1}.json", command)


def submission_of(scheduler: Scheduler, run_id: str, attempt: AttemptRecord) -> Submission | None:
    """Job of an attempt. The scheduler is asked for one that a controller submitted but has not recorded yet.

    Raises:
        SchedulerError: it does not answer, or this host belongs to another cluster.
    """
    if attempt.submission is not None or attempt.ended:
        return attempt.submission
    return scheduler.find(run_id, attempt.placement.attempt, attempt.placement.cluster)


def end_job(controller: Controller, submission: Submission | None, *, on_request: bool = False) -> None:
    """End a job and confirm that it is gone. The lease is checked first, because another controller may have adopted
    the job.

    Args:
        on_request: a user cancels the run and means its job, whichever controller owns it: wait neither for the
            database to confirm that, nor for a scheduler that does not respond, which the user is told instead.

    Raises:
        SchedulerError: part of the job is still running, or the scheduler was not waited for.
    """
    if submission is None:
        return
    run_id = controller.run_dir.run_id
    if on_request:
        with suppress(DatabaseUnavailable):
            controller.lease.require()
        gone = controller.scheduler.cancel(submission)
    else:

        def end() -> bool:
            controller.require_lease()
            return controller.scheduler.cancel(submission)

        gone = answer_of(controller, end)
    if not gone:
        raise SchedulerError(
            f"job {submission.job_id} of {run_id} could not be ended: part of it is still running on "
            f"{submission.host or 'its nodes'}. End it there, then run `rlhf cancel {run_id}` again"
        )


def end_submission(scheduler: Scheduler, submission: Submission) -> None:
    """End a job from outside the controller of its run, and confirm that it is gone.

    Raises:
        SchedulerError: part of it is still running.
    """
    if not scheduler.cancel(submission):
        raise SchedulerError(f"job {submission.job_id} could not be ended: part of it is still running")


def release(controller: Controller) -> None:
    """Confirm that the job of the last attempt is gone: nodes must not idle while an approval is pending. The job
    normally ends by itself a moment after its outcome is written; otherwise it is ended here."""
    last = controller.journal.record.last_attempt
    if last is None or last.submission is None:
        return
    deadline = controller.clock() + RELEASE_TIMEOUT_S
    while controller.clock() < deadline:
        status = controller.scheduler.status([last.submission])[last.submission.job_id]
        if status.state is JobState.ENDED:
            return
        controller.wait(controller.poll_s)
    end_job(controller, last.submission)
