"""The stages of a run: preflight, then allocate, train and evaluate for each attempt."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rlhf_core.condition_log import ConditionLog
from rlhf_core.control.attempts.jobs import answer_of
from rlhf_core.control.attempts.planning import decision_before, plan_attempt
from rlhf_core.control.attempts.recovery import used_so_far
from rlhf_core.control.baseline import read_baseline
from rlhf_core.control.cancel import cancel
from rlhf_core.control.controller import Controller
from rlhf_core.control.trials import cancel_trials, carry_out
from rlhf_core.diagnosis import attempt_caps
from rlhf_core.diagnosis.policy import backoff_s
from rlhf_core.errors import BadInput, SubmissionDeferred, SubmissionFailed
from rlhf_core.launch.prepare import code_folder, code_sources
from rlhf_core.launch.start import job_request, submit_once
from rlhf_core.preflight.gather_facts import Surroundings
from rlhf_core.preflight.runner import blocking, make_checks, require_passed
from rlhf_core.preflight.trial import Rung
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.attempts import AttemptState, RunState, StageName, StageState
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import ChecksMade
from rlhf_core.watchdog.watcher import AttemptSnapshot, AttemptVerdict


class StageFailed(Exception):
    """The attempt that a stage belongs to did not end well; :func:`drive` decides what follows."""

    def __init__(self, verdict: AttemptVerdict) -> None:
        super().__init__(verdict.cause)
        self.cancelled = verdict.state is AttemptState.CANCELLED


def preflight(controller: Controller) -> None:
    """Run the static checks.

    Raises:
        PreflightBlocked: a check blocks the run, whose state is now failed.
    """
    resumed = controller.journal.record.attempts
    controller.journal.move_run(RunState.PREFLIGHT, "resumed" if resumed else "started")
    with _stage(controller, StageName.PREFLIGHT, 0, "preflight"):
        surroundings = Surroundings(
            site=controller.site,
            inventory=answer_of(controller, controller.scheduler.inventory),
            scheduler=controller.scheduler.name,
            code_path=controller.run_dir.code / "snapshot",
            # In a resumed run, only the copy can be wrong: the user's files may have been fixed since.
            code_sources=() if resumed else code_sources(controller.spec, code_folder(controller.stored)),
            resume=controller.run_dir.newest_checkpoint(),
            stored_version=controller.stored.package_version,
            baseline=read_baseline(
                controller.store, controller.spec, controller.observer.log, controller.run_dir.run_id
            ),
        )
        results = make_checks(controller.spec, surroundings, controller.check)
        controller.journal.append(ChecksMade(results=results))
        for result in results:
            if result.status is CheckStatus.WARNING:
                controller.observer.log(f"warning {result.id}: {result.found}; expected {result.expected}")
        controller.record()
        if blocking(results):  # possible only if an earlier controller had already begun the trials
            cancel_trials(controller, "its run is blocked", cancel)
        require_passed(results)


def trial(controller: Controller, rung: Rung, drive: Callable[[Controller], None]) -> None:
    """Try the run out on a small scale, as a separate run that precedes it.

    Raises:
        PreflightBlocked: the trial failed; the state of the run is now failed.
    """
    with _stage(controller, StageName.PREFLIGHT, 0, rung.title, message=rung.title):
        verdict = carry_out(controller, rung, drive)
        controller.journal.append(ChecksMade(results=(*controller.journal.record.checks, verdict)))
        controller.record()
        require_passed([verdict])


def allocate(controller: Controller, number: int) -> None:
    """Plan an attempt, submit it once, and wait for its nodes."""
    journal = controller.journal
    if number not in journal.record.attempts:
        journal.move_run(RunState.QUEUED, f"attempt {number}")
    with _stage(controller, StageName.ALLOCATE, number, title_of(controller, StageName.ALLOCATE, number)):
        if number not in journal.record.attempts:
            plan_attempt(controller, number)
        if journal.record.attempts[number].state is AttemptState.PLANNED:
            _submit(controller, number)
        _watch_until(controller, number, lambda snapshot: snapshot.verdict.state is not AttemptState.SUBMITTED)


def train(controller: Controller, number: int) -> None:
    """Watch the trainer until the evaluator starts.

    Raises:
        StageFailed: the attempt ended before that.
    """
    with _stage(controller, StageName.TRAIN, number, title_of(controller, StageName.TRAIN, number)):
        snapshot = _watch_until(controller, number, lambda snapshot: snapshot.progress.evaluating)
        if snapshot.ended and snapshot.verdict.state is not AttemptState.COMPLETED and not snapshot.progress.evaluating:
            raise StageFailed(snapshot.verdict)


def evaluate(controller: Controller, number: int) -> None:
    """Watch the evaluator until the attempt ends.

    Raises:
        StageFailed: it did not end well.
    """
    if controller.journal.record.state in (RunState.QUEUED, RunState.TRAINING):
        controller.journal.move_run(RunState.EVALUATING, f"training of attempt {number} is done")
    with _stage(controller, StageName.EVALUATE, number, "evaluate"):
        snapshot = _watch_until(controller, number, lambda snapshot: False)
        if snapshot.verdict.state is not AttemptState.COMPLETED:
            raise StageFailed(snapshot.verdict)


def title_of(controller: Controller, name: StageName, number: int) -> str:
    """Title of a stage of an attempt, with the nodes that its attempt excludes."""
    if name is StageName.EVALUATE:
        return "evaluate"
    attempts = controller.journal.record.attempts
    if number in attempts:
        without = attempts[number].placement.excluded_nodes
    else:  # not planned yet
        decision = decision_before(controller, number)
        without = decision.excluded_nodes if decision is not None else ()
    return f"{name.value} attempt {number}" + (f" - excluding {', '.join(without)}" if without else "")


def _submit(controller: Controller, number: int) -> None:
    journal = controller.journal
    placement = journal.record.attempts[number].placement
    limit_s = attempt_caps.time_limit_s(controller.spec, used_so_far(controller), placement.num_nodes)
    request = job_request(controller.run_dir, controller.spec, placement, controller.site)
    try:
        _submit_when_accepted(controller, replace(request, time_limit_s=limit_s))
    except SubmissionFailed as error:
        verdict = AttemptVerdict(AttemptState.FAILED, str(error), FailureKind.CONFIG)
        journal.move_attempt(number, verdict.state, verdict.cause, verdict.failure_kind)
        raise StageFailed(verdict) from error


def _submit_when_accepted(controller: Controller, request: JobRequest) -> None:
    """Submit a job once. If the scheduler temporarily rejects it, or does not respond, wait as for a job that is
    pending.

    Raises:
        SubmissionFailed: the scheduler rejected it for good.
    """

    def submit() -> None:
        submit_once(controller.run_dir, request, controller.scheduler, controller.journal, controller.require_lease)

    for refusals in itertools.count(1):
        try:
            answer_of(controller, submit)
        except SubmissionDeferred as error:
            pause_s = max(backoff_s(refusals, controller.spec.supervise, random.random()), controller.poll_s)
            controller.observer.log(f"{error}; asking again in {pause_s:.0f} s")
            controller.wait(pause_s)
        else:
            return


def _watch_until(controller: Controller, number: int, enough: Callable[[AttemptSnapshot], bool]) -> AttemptSnapshot:
    """Poll until the attempt has ended or ``enough`` returns True, and update states meanwhile."""
    journal = controller.journal
    waits = ConditionLog(controller.observer.log)
    while True:
        snapshot = controller.poll(number)
        if snapshot.job.needs_action:
            waits.log_once(f"warning attempt {number} waits: {snapshot.job.reason}", snapshot.job.reason)
        if (
            snapshot.verdict.state is AttemptState.RUNNING
            and journal.record.attempts[number].state is AttemptState.SUBMITTED
        ):
            nodes = ", ".join(snapshot.job.nodes)
            journal.move_attempt(number, AttemptState.RUNNING, f"on {nodes}" if nodes else "its job runs")
            if journal.record.state is RunState.QUEUED:
                journal.move_run(RunState.TRAINING, f"attempt {number} runs")
        controller.observer.polled(snapshot)
        if not controller.lacks_directory() and (snapshot.ended or enough(snapshot)):
            return snapshot
        controller.wait(controller.poll_s)


@contextmanager
def _stage(controller: Controller, name: StageName, attempt: int, title: str, message: str = "") -> Iterator[None]:
    """Time a stage and record its result. An exception that does not end the stage (a lost lease, a bug) leaves it
    open.

    Args:
        message: message to record on success.
    """
    index = controller.journal.begin_stage(name, attempt)
    controller.record()
    controller.observer.stage_started(title)
    try:
        yield
    except StageFailed as error:
        state = StageState.CANCELLED if error.cancelled else StageState.FAILED
        controller.journal.end_stage(index, state, str(error))
        raise
    except BadInput as error:
        controller.journal.end_stage(index, StageState.FAILED, str(error))
        # Lists and chat messages show only this: a first line would announce findings that they do not show.
        controller.journal.move_run(RunState.FAILED, " ".join(str(error).split()))
        raise
    controller.journal.end_stage(index, StageState.COMPLETED, message)
    controller.record()
