"""The steps of a run and their order: preflight, then allocate, train and evaluate for each attempt, then promote.

    for step in steps(controller):
        step.run()

The order is re-entrant. A controller may be killed at any point. If it is started again for the same run, it continues
from the state that the journal and the run directory show, and adopts the running job. It never submits twice. The
decision about a failed attempt is made in :mod:`rlhf_core.control.attempts.recovery`.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from rlhf_core.control import promotion, stages
from rlhf_core.control.attempts.jobs import is_to_save, release
from rlhf_core.control.attempts.recovery import conclude
from rlhf_core.control.cancel import cancel
from rlhf_core.control.controller import CancelRequested, Controller
from rlhf_core.control.gone_directory import abandon
from rlhf_core.control.stages import StageFailed, title_of
from rlhf_core.control.trials import TRIAL, due
from rlhf_core.errors import HistoryError, LeaseLost, PromotionFailed, RlhfError, RunCancelled, RunDirGone, RunFailed
from rlhf_core.history import queries
from rlhf_core.schemas.attempts import RunState, StageName, StageState
from rlhf_core.schemas.base import utc_now
from rlhf_core.survival import Survived

WAIT = "wait"
"""Name of a wait between two attempts."""

CLUSTER_RETRY_INTERVAL_S = 60.0
"""Pause before counting the restarts of all runs again."""

_OF_AN_ATTEMPT: tuple[tuple[StageName, Callable[[Controller, int], None]], ...] = (
    (StageName.ALLOCATE, stages.allocate),
    (StageName.TRAIN, stages.train),
    (StageName.EVALUATE, stages.evaluate),
)


@dataclass
class Step:
    """A stage, a trial, or a wait between two attempts. It is carried out once."""

    name: str
    """Name of the stage, ``trial`` or ``wait``."""
    title: str
    """Name for the user, with the attempt and the nodes that it excludes."""
    work: Callable[[], None]
    begun: bool = False
    error: BaseException | None = None
    """Error that ended it. The loop that yielded the step decides what follows, and raises it if the run ends with
    it."""

    def run(self) -> None:
        """Carry out the step. An error is stored in :attr:`error`."""
        self.begun = True
        with Survived() as failed:  # the loop decides: see result()
            self.work()
        self.error = failed.error

    def result(self) -> None:
        """Raise the error that ended the step, if there was one.

        Raises:
            RuntimeError: it was not carried out.
        """
        if self.error is not None:
            raise self.error
        if not self.begun:
            raise RuntimeError(f"the step {self.title!r} was taken from the loop and not carried out")


def drive(controller: Controller) -> None:
    """Carry out all steps of a run, one after the other. Raises what :func:`steps` raises."""
    for step in steps(controller):
        step.run()


def steps(controller: Controller) -> Iterator[Step]:
    """The steps that bring a run to its end, from its current state.

    Each step must be carried out before the next one is requested, because the next one depends on its result. The loop
    ends when the run is completed and its promotion, if one was requested, has come to an end. Whatever that end is,
    the run is completed.

    Raises:
        PreflightBlocked: a check blocks it, before an allocation or on its nodes.
        RunFailed: the run was stopped; the message is the diagnosis.
        RunCancelled: the run was cancelled.
        LeaseLost: another controller has taken the run over. Nothing was changed since.
        SchedulerError: the scheduler cannot be used, or a job could not be ended; the run stays as it is and can be
            resumed.
        RunDirGone: the run directory is gone; its job was ended, and the run is closed in the history.
    """
    try:
        try:
            yield from _steps(controller)
        except CancelRequested as request:
            cancel(controller, str(request), save=request.save)
            if controller.journal.record.state is not RunState.COMPLETED:
                raise RunCancelled(f"run {controller.run_dir.run_id} was cancelled: {request}") from None
    except LeaseLost:
        raise  # the run and its history are those of another controller now
    except RunDirGone as found:
        if not controller.presence.is_gone:  # otherwise the missing directory is that of a trial
            raise
        raise abandon(controller, found) from None
    except RlhfError:
        controller.record()
        raise


def _steps(controller: Controller) -> Iterator[Step]:
    journal = controller.journal
    if journal.record.cancelling is not None:
        cancel(controller, journal.record.cancelling, save=is_to_save(controller.run_dir))
    if not controller.resumed:
        _require_open(controller)
    if journal.record.state in (RunState.PENDING, RunState.PREFLIGHT, RunState.FAILED, RunState.CANCELLED):
        yield from _carried_out(StageName.PREFLIGHT, "preflight", partial(stages.preflight, controller))
        for rung in due(controller):
            yield from _carried_out(TRIAL, rung.title, partial(stages.trial, controller, rung, drive))
    last = journal.record.last_number
    if last >= journal.record.first_attempt and journal.record.attempts[last].ended:
        conclude(controller, last)  # the previous controller may have been killed halfway
    while journal.record.state is not RunState.COMPLETED:
        number = journal.record.last_number
        if number == 0 or journal.record.attempts[number].ended:
            number += 1
        with suppress(StageFailed):
            yield from _attempt(controller, number)
        conclude(controller, number)
    if promotion.is_due(controller.stored, journal.record):
        release(controller)
        try:
            yield from _carried_out(StageName.PROMOTE, "promote", partial(promotion.carry_out, controller))
        except PromotionFailed as error:
            controller.observer.log(str(error))


def _carried_out(name: str, title: str, work: Callable[[], None]) -> Iterator[Step]:
    """One step, whose error is raised here after it was carried out."""
    step = Step(name, title, work)
    yield step
    step.result()


def _require_open(controller: Controller) -> None:
    """Leave a run alone that has ended and that no user resumed: it may have been ended in the meantime, as while the
    flow run that takes it over for the site daemon waited for a worker.

    Raises:
        RunCancelled, RunFailed: it has.
    """
    run_id, record = controller.run_dir.run_id, controller.journal.record
    if record.state is RunState.CANCELLED:
        raise RunCancelled(f"run {run_id} was cancelled: {record.cause}")
    if record.state is RunState.FAILED:
        raise RunFailed(f"run {run_id} failed: {record.cause}")


def _attempt(controller: Controller, number: int) -> Iterator[Step]:
    """The stages of one attempt, without those that an earlier controller completed.

    Raises:
        StageFailed: the attempt ended before its last stage did.
    """
    if number not in controller.journal.record.attempts:
        yield from _back_off(controller, number - 1)
    for name, stage in _OF_AN_ATTEMPT:
        if name is StageName.EVALUATE and not controller.spec.is_evaluated:
            continue
        state = controller.journal.record.stage_state(name, number)
        if state in (StageState.FAILED, StageState.CANCELLED):
            return
        if state is not StageState.COMPLETED:
            yield from _carried_out(name, title_of(controller, name, number), partial(stage, controller, number))


def _back_off(controller: Controller, failed: int) -> Iterator[Step]:
    """Waits before the next attempt: first while too many jobs of all runs are being restarted, then for the delay of
    the decision about the failed attempt, counted from the time of that decision."""
    last = controller.journal.record.attempts.get(failed)
    if last is None or last.decision is None or failed == controller.resumed_at:
        return
    yield from _while_the_cluster_recovers(controller, failed + 1)
    due_at = last.decision.decided_at + timedelta(seconds=last.decision.delay_s)
    rest = min((due_at - utc_now()).total_seconds(), last.decision.delay_s)
    if rest > 0:
        controller.observer.log(f"attempt {failed + 1} begins in {rest:.0f} s: {last.decision.reason}")
        title = f"wait {rest:.0f} s before attempt {failed + 1} - {last.decision.reason}"
        yield from _carried_out(WAIT, title, partial(controller.wait, rest))


def _while_the_cluster_recovers(controller: Controller, number: int) -> Iterator[Step]:
    most = controller.site.max_restarts_per_hour
    while (recent := _restarts_in_the_last_hour(controller)) > most:
        why = f"{recent} restarts of all runs in the last hour, {most} allowed on this site (max_restarts_per_hour)"
        controller.observer.log(f"attempt {number} waits: {why}")
        title = f"wait before attempt {number} - {why}"
        yield from _carried_out(WAIT, title, partial(controller.wait, CLUSTER_RETRY_INTERVAL_S))


def _restarts_in_the_last_hour(controller: Controller) -> int:
    try:
        return queries.restarts_since(controller.store, utc_now() - timedelta(hours=1))
    except HistoryError:
        return 0  # an unavailable database delays no attempt
