"""The cancellation of a run: by its controller, or from another process."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rlhf_core.config.site import Site
from rlhf_core.control.attempts.jobs import (
    CANCEL_TIMEOUT_S,
    end_job,
    end_submission,
    give_order,
    order_to_end,
    pending_request,
    submission_of,
)
from rlhf_core.control.attempts.recovery import conclude
from rlhf_core.control.controller import Controller, opened
from rlhf_core.control.trials import cancel_trials
from rlhf_core.control.views.timeline import trials_of
from rlhf_core.errors import (
    DatabaseUnavailable,
    JournalDamaged,
    LeaseLost,
    RunDirError,
    SchedulerError,
)
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import AttemptRecord, read_record
from rlhf_core.launch.lease import IfHeld, known_dead, owner_text
from rlhf_core.machine.accounts import account, user_name
from rlhf_core.run_dir.journal import read_journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler import JobState, get_scheduler
from rlhf_core.schemas.attempts import ATTEMPT_ENDS, AttemptState, RunState, StageState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import CancelStarted, ControllerStarted
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.text.formatting import duration
from rlhf_core.watchdog.watcher import record

CONTROLLER_TIMEOUT_S = 60.0
"""Time for a live controller to end its run after a cancel request, besides that for writing a checkpoint."""


@dataclass(frozen=True)
class Cancelled:
    """The outcome of a cancellation."""

    state: RunState | None
    """None if the journal cannot be read."""
    job_ended: bool
    """True if the scheduler confirms that no job of the run is still running."""
    message: str


def cancel(controller: Controller, reason: str, *, save: bool = False) -> None:
    """End the run's job, verify that it ended, and record it. The caller must hold the run's lease.

    Args:
        save: write a checkpoint first, if the workers manage to within ``supervise.save_timeout_s`` of the request. A
            later request to end at once ends the wait.

    Raises:
        SchedulerError: part of the job is still running.
    """
    journal = controller.journal
    if journal.record.ended:
        return
    if journal.record.cancelling is None:
        journal.append(CancelStarted(reason=reason))
    cancel_trials(controller, reason, cancel)
    number, attempt = journal.record.last_number, journal.record.last_attempt
    if attempt is not None and not attempt.ended:
        _end_attempt(controller, attempt, reason, save=save)
        if _state(controller, number) is AttemptState.COMPLETED:
            _end_stage(controller, StageState.COMPLETED)
            conclude(controller, number)  # it completed before the order arrived
            return
        journal.move_attempt(number, AttemptState.CANCELLED, reason, FailureKind.USER_CANCEL)
    elif attempt is not None and attempt.state is AttemptState.LOST:
        # Given up while its job may still have been running, and its controller may not have ended that.
        end_job(controller, attempt.submission, on_request=True)
    _end_stage(controller, StageState.CANCELLED, reason)
    journal.move_run(RunState.CANCELLED, reason)
    controller.run_dir.cancel_request.unlink(missing_ok=True)
    controller.record()


def _end_attempt(controller: Controller, attempt: AttemptRecord, reason: str, *, save: bool) -> None:
    """Order the agents of an attempt to end, wait until they have, and end its job.

    Raises:
        SchedulerError: part of the job is still running.
    """
    number = attempt.placement.attempt
    # A job that is still waiting for nodes has nothing to save.
    save = save and _state(controller, number) is AttemptState.RUNNING
    controller.observer.log(f"{'saving, then ' if save else ''}cancelling attempt {number}")
    try:
        give_order(controller.run_dir, number, order_to_end(reason, save=save))
    except OSError as error:  # the scheduler ends the job without it
        save = False
        controller.observer.log(f"attempt {number} cannot be told to end: {error}")
    submission = submission_of(controller.scheduler, controller.run_dir.run_id, attempt)
    deadline = controller.clock() + (_save_s(controller) if save else CANCEL_TIMEOUT_S)
    # Workers that hang while they save do not keep it waiting: the agents end them, and with them the attempt.
    while submission is not None and _state(controller, number) not in ATTEMPT_ENDS:
        request = pending_request(controller.run_dir) if save else None
        if controller.clock() >= deadline or (request is not None and request.kind == "cancel"):
            break
        controller.lease.keep()
        controller.sleep(0.2)
    end_job(controller, submission, on_request=True)


def _save_s(controller: Controller) -> float:
    """Time left for writing a checkpoint, in seconds. A controller that takes over does not wait anew."""
    request = pending_request(controller.run_dir)
    waited_s = (utc_now() - request.time).total_seconds() if request is not None else 0.0
    return max(controller.spec.supervise.save_timeout_s - max(waited_s, 0.0), CANCEL_TIMEOUT_S)


def _state(controller: Controller, number: int) -> AttemptState | None:
    """State of an attempt; None if its files cannot be read, which must not keep its job from being ended."""
    with suppress(OSError):
        return controller.watcher(number).poll().verdict.state
    return None


def _end_stage(controller: Controller, state: StageState, message: str = "") -> None:
    stage = controller.journal.record.open_stage()
    if stage is not None:
        controller.journal.end_stage(stage.index, state, message)


def cancel_run(
    run_dir: RunDir,
    site: Site,
    store: HistoryStore | None,
    reason: str,
    *,
    save: bool = False,
    log: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Cancelled:
    """End a run.

    The run's controller is asked first. If none is alive, this process takes the lease and ends the run itself. If a
    controller is alive but does not respond, the scheduler ends the job. The same happens if the history is unusable or
    the journal cannot be read; the run is then marked as cancelled once that is fixed.

    Args:
        store: the history; None if it cannot be used.
        save: write a checkpoint first.

    Raises:
        SchedulerError: part of the job is still running, or the scheduler does not answer about a job that was not
            recorded.
        RunDirError: the run belongs to another user, who has not let this one write its directory.
    """
    run_id = run_dir.run_id
    try:
        ended = read_record(run_dir).ended
    except JournalDamaged as damage:
        return _ended_without_journal(run_dir, site, reason, damage)
    if ended:
        record(run_dir, store)
        return _result(run_dir, site, f"run {run_id} had already ended")
    try:
        write_model(run_dir.cancel_request, order_to_end(reason, save=save))
    except OSError as error:
        _require_own(run_dir, error)
        return _ended_without_writing(run_dir, site, error)
    save_s = _save_timeout_s(run_dir, save=save)
    try:
        return _ended_from_here(run_dir, site, store, reason, save=save, log=log)
    except LeaseLost:
        log(f"asking the controller of {run_id} to end it" + _time_given(save_s))
        asks = True
    except DatabaseUnavailable as error:
        log(f"{error}. Asking the controller of {run_id}, if there is one, to end it" + _time_given(save_s))
        asks = _may_have_controller(run_dir)
    until = clock() + CONTROLLER_TIMEOUT_S + save_s
    while asks and clock() < until:
        if read_record(run_dir).ended:
            return _result(run_dir, site, f"run {run_id} was ended by its controller")
        sleep(0.3)
    return _ended_without_controller(run_dir, site)


def _ended_from_here(
    run_dir: RunDir, site: Site, store: HistoryStore | None, reason: str, *, save: bool, log: Callable[[str], None]
) -> Cancelled:
    """End a run as its controller.

    Args:
        save: write a checkpoint first.

    Raises:
        LeaseLost: another controller drives it.
        DatabaseUnavailable: the history cannot be used.
    """
    if store is None:
        raise DatabaseUnavailable("the history cannot be used")
    with opened(run_dir, site, store, if_held=IfHeld.FAIL) as controller:
        log("no controller is running for it; ending it from here" + _time_given(_save_timeout_s(run_dir, save=save)))
        cancel(controller, reason, save=save)
        completed = controller.journal.record.state is RunState.COMPLETED
    done = "had completed before its job was told to end" if completed else "is cancelled"
    return _result(run_dir, site, f"run {run_dir.run_id} {done}")


def _ended_without_controller(run_dir: RunDir, site: Site) -> Cancelled:
    """End the job of a run whose controller or history does not respond; the request to end the run stays.

    Raises:
        SchedulerError: part of the job is still running.
    """
    run_id = run_dir.run_id
    try:
        _end_last_job(run_dir, site)
    except SchedulerError as error:
        raise SchedulerError(
            f"{error}. The request to end run {run_id} stays: its controller, or the next one, still carries it out"
        ) from None
    return _result(
        run_dir,
        site,
        f"the job of run {run_id} was ended, but its controller or the history does not respond; the run is marked as "
        f"cancelled once they do, or if you then run `rlhf cancel {run_id}` again",
    )


def _may_have_controller(run_dir: RunDir) -> bool:
    """False if the last controller in the journal is known to be dead, or none ever started."""
    last = _last_controller(run_dir)
    return bool(last) and not known_dead(last)


def _last_controller(run_dir: RunDir) -> str:
    """The last controller in the journal; empty if none ever started."""
    events = [line.event for line in read_journal(run_dir.control)]
    return next((event.controller for event in reversed(events) if isinstance(event, ControllerStarted)), "")


def _ended_without_journal(run_dir: RunDir, site: Site, reason: str, damage: JournalDamaged) -> Cancelled:
    """End every job named in the files of a run. The state of the run is unknown and left as it is.

    Raises:
        SchedulerError: part of a job is still running.
    """
    with suppress(OSError):  # the scheduler ends the jobs without it
        write_model(run_dir.cancel_request, order_to_end(reason, save=False))
    scheduler = get_scheduler(site.scheduler)
    for attempt in run_dir.attempts():
        placement, submission = read_model(attempt.placement, Placement), read_model(attempt.submission, Submission)
        if submission is None:
            cluster = placement.cluster if placement is not None else ""
            submission = scheduler.find(run_dir.run_id, attempt.number, cluster)
        if submission is not None:
            end_submission(scheduler, submission)
    return Cancelled(
        None, True, f"none of the jobs of {run_dir.run_id} is running; the state of the run is unknown: {damage}"
    )


def _require_own(run_dir: RunDir, error: OSError) -> None:
    """Refuse to end a run of another user, whose jobs and controller this user cannot end either.

    Raises:
        RunDirError: it is one.
    """
    owner = run_dir.root.stat().st_uid
    if isinstance(error, PermissionError) and owner != os.geteuid():
        raise RunDirError(
            f"{run_dir.root} belongs to {user_name(owner)}, and {account()} cannot write it: only {user_name(owner)} "
            "can end this run. If it was requested in Prefect, cancel its flow run there"
        ) from None


def _ended_without_writing(run_dir: RunDir, site: Site, error: OSError) -> Cancelled:
    """End the job of a run whose directory cannot be written, so that neither a request nor its end can be recorded.

    Raises:
        SchedulerError: part of the job is still running.
    """
    _end_last_job(run_dir, site)
    message = (
        f"{run_dir.root} cannot be written ({error.strerror}), so run {run_dir.run_id} is not marked as cancelled; the "
        "scheduler has ended its job"
    )
    last = _last_controller(run_dir)
    if last and not known_dead(last):
        message += f". Its controller ({owner_text(last)}) may start another attempt if it is alive: end it first"
    advice = f"Make the folder writable, then mark the run with `rlhf cancel {run_dir.run_id}`"
    return _result(run_dir, site, f"{message}. {advice}")


def _save_timeout_s(run_dir: RunDir, *, save: bool) -> float:
    """Time for writing a checkpoint first, in seconds; 0 to write none, and the default if the spec of the run cannot
    be read."""
    if not save:
        return 0.0
    with suppress(RunDirError, OSError):
        return run_dir.read_spec().spec.supervise.save_timeout_s
    return SuperviseSpec().save_timeout_s


def _time_given(save_s: float) -> str:
    if not save_s:
        return ""
    advice = "a second `rlhf cancel` without --save ends it at once"
    return f", after writing a checkpoint, which may take up to {duration(save_s)}; {advice}"


def _end_last_job(run_dir: RunDir, site: Site) -> None:
    scheduler = get_scheduler(site.scheduler)
    for concerned in (run_dir, *trials_of(run_dir)):
        attempt = read_record(concerned).last_attempt
        submission = submission_of(scheduler, concerned.run_id, attempt) if attempt is not None else None
        if submission is not None:
            end_submission(scheduler, submission)


def _result(run_dir: RunDir, site: Site, message: str) -> Cancelled:
    """The current state. It asks the scheduler, because ordering a job to end does not prove that it ended.

    Raises:
        SchedulerError: it does not answer about a job that was not recorded.
    """
    present = read_record(run_dir)
    if present.ended:
        with suppress(OSError):  # the next controller ignores it
            run_dir.cancel_request.unlink(missing_ok=True)
    scheduler = get_scheduler(site.scheduler)
    found = [
        submission_of(scheduler, concerned.run_id, attempt)
        for concerned in (run_dir, *trials_of(run_dir))
        for attempt in read_record(concerned).attempts.values()
    ]
    submissions = [submission for submission in found if submission is not None]
    states = scheduler.status(submissions) if submissions else {}
    alive = [job_id for job_id, status in states.items() if status.state is not JobState.ENDED]
    proof = f"job {', '.join(alive)} may still be running" if alive else "none of its jobs is running"
    return Cancelled(present.state, not alive, f"{message} ({present.state.value}); {proof}")
