"""The steps of a run and their order, without Prefect: preflight -> allocate -> train -> evaluate; and after failures.

A completed run may be promoted, which is a step of its own (``flows/promoting/promotion.py``): by then its job is gone.

:func:`drive` is re-entrant. It may be killed at any point; started again for the same run, in whatever state that is,
it goes on from what the journal and the run directory say, and adopts the job that is running. It never submits twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

from flows.gone import abandon
from flows.past import look_back
from flows.promoting import promotion
from flows.session import CancelAsked, Session
from flows.trial import TRIAL, cancel_trials, carry_out, due
from rlhf_core.allocation.planner import plan, shortages
from rlhf_core.diagnosis import attempt_caps
from rlhf_core.diagnosis.node_strikes import REMEMBERED
from rlhf_core.errors import (
    BadInput,
    DatabaseUnavailable,
    HistoryError,
    LeaseLost,
    PreflightBlocked,
    PromotionFailed,
    RunCancelled,
    RunDirGone,
    RunFailed,
    SchedulerError,
    SubmissionFailed,
)
from rlhf_core.history import queries
from rlhf_core.launch.journal import AttemptRecord
from rlhf_core.launch.start import job_request, record_plan, submit_once
from rlhf_core.preflight.gather_facts import Surroundings
from rlhf_core.preflight.runner import blocking, make_checks, require_passed
from rlhf_core.preflight.trial import Rung
from rlhf_core.run_dir import RunDir, read_model, write_model
from rlhf_core.scheduler.base import JobState
from rlhf_core.schemas.attempts import AttemptState, RunState, StageName, StageState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.failures import Action, Decision, FailureKind
from rlhf_core.schemas.journal import CancelStarted, ChecksMade, DecisionMade, IncidentFound
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.resources import Inventory, Submission
from rlhf_core.schemas.run import shape_key
from rlhf_core.watchdog.evidence import allocated_s
from rlhf_core.watchdog.node_records import node_standings
from rlhf_core.watchdog.watcher import AttemptFailure, AttemptSnapshot, AttemptVerdict, explain

Call = Callable[[str, str, Callable[[], None]], None]
"""How a stage, or a wait between two attempts, is carried out, given its title, its name and the work."""

WAIT = "wait"
"""Name of a wait, where stages have theirs."""

CLUSTER_PAUSE_S = 60.0
"""How long an attempt waits before it looks again whether fewer jobs of all runs come back."""

SAVE_PATIENCE_S = 600.0
"""How long the workers may take to end their step and to write a checkpoint, when that was asked for."""

CANCEL_PATIENCE_S = 10.0
"""How long agent 0 may take to follow the order to end, before the scheduler ends the job."""


RELEASE_PATIENCE_S = 60.0
"""How long the job of a completed run may take to end by itself, before its model is asked about."""


class AttemptFailed(Exception):
    """The attempt a stage belongs to did not end well; :func:`drive` decides what follows."""

    def __init__(self, verdict: AttemptVerdict) -> None:
        super().__init__(verdict.cause)
        self.cancelled = verdict.state is AttemptState.CANCELLED


# ---------------------------------------------------------------------------------------------------------------------
# The order


def plainly(title: str, name: str, work: Callable[[], None]) -> None:
    """Carry a stage out, and nothing else."""
    work()


def drive(session: Session, call: Call = plainly, ask: promotion.Ask = promotion.in_the_terminal) -> None:
    """Bring a run to its end, from wherever it stands. Returns when it is completed, and its promotion, where one was
    asked for, has come to an end: whichever that is, the run is completed.

    Args:
        call: carries the stages out.
        ask: makes the question visible whether the model may be promoted.

    Raises:
        PreflightBlocked: a check blocks it, before an allocation or on its nodes.
        RunFailed: it was stopped; the message is the diagnosis.
        RunCancelled: somebody ended it.
        LeaseLost: another controller has taken it over. Nothing was changed since.
        SchedulerError: the scheduler does not answer; the run stays as it is and can be resumed.
        RunDirGone: its directory is gone; its job was ended, and the history has closed it.
    """
    try:
        try:
            _drive(session, call, ask)
        except CancelAsked as asked:
            cancel(session, str(asked), save=asked.save)
            if session.journal.record.state is not RunState.COMPLETED:
                raise RunCancelled(f"run {session.run_dir.run_id} was cancelled: {asked}") from None
    except LeaseLost:
        session.lease_lost = True
        raise
    except RunDirGone as found:
        if not session.presence.is_gone:  # it is that of a trial
            raise
        raise abandon(session, found) from None
    finally:
        if not session.lease_lost:
            session.record()


def _drive(session: Session, call: Call, ask: promotion.Ask) -> None:
    journal = session.journal
    if journal.record.cancelling is not None:
        reason = journal.record.cancelling
        cancel(session, reason)  # the controller before this one has begun to
        if not session.resumed and journal.record.state is RunState.CANCELLED:
            raise RunCancelled(f"run {session.run_dir.run_id} was cancelled: {reason}")
    if journal.record.state in (RunState.PENDING, RunState.PREFLIGHT, RunState.FAILED, RunState.CANCELLED):
        call("preflight", StageName.PREFLIGHT, lambda: preflight(session))
        for rung in due(session):
            call(rung.title, TRIAL, partial(trial, session, rung))
    last = max(journal.record.attempts, default=0)
    if last >= journal.record.first_attempt and journal.record.attempts[last].ended:
        conclude(session, last)  # the controller before this one may have been killed on the way
    while journal.record.state is not RunState.COMPLETED:
        number = max(journal.record.attempts, default=0)
        if number == 0 or journal.record.attempts[number].ended:
            number += 1
        with suppress(AttemptFailed):
            _attempt(session, number, call)
        conclude(session, number)
    if promotion.due(session):
        _release(session)
        try:
            call("promote", StageName.PROMOTE, lambda: promotion.carry_out(session, ask))
        except PromotionFailed as error:
            session.observer.says(str(error))


def _attempt(session: Session, number: int, call: Call) -> None:
    """The stages of one attempt; those that were done before this controller came are left out."""
    steps: list[tuple[StageName, Callable[[Session, int], None]]] = [
        (StageName.ALLOCATE, allocate),
        (StageName.TRAIN, train),
        (StageName.EVALUATE, evaluate),
    ]
    if number not in session.journal.record.attempts:
        _wait_for_back_off(session, number - 1, call)
    for name, step in steps:
        state = session.journal.record.stage_state(name, number)
        if state in (StageState.FAILED, StageState.CANCELLED):
            return
        if state is not StageState.COMPLETED:
            call(title_of(session, name, number), name, partial(step, session, number))


def title_of(session: Session, name: StageName, number: int) -> str:
    """What a stage of an attempt is called, for a person: with the nodes that its attempt goes without."""
    if name is StageName.EVALUATE:
        return "evaluate"
    attempts = session.journal.record.attempts
    if number in attempts:
        without = attempts[number].placement.excluded_nodes
    else:  # not planned yet
        decision = _decision_before(session, number)
        without = decision.excluded_nodes if decision is not None else ()
    return f"{name.value} attempt {number}" + (f" - excluding {', '.join(without)}" if without else "")


# ---------------------------------------------------------------------------------------------------------------------
# The stages


def preflight(session: Session) -> None:
    """Make the static checks.

    Raises:
        PreflightBlocked: the run moves to failed.
    """
    resumed = session.journal.record.attempts
    session.journal.move_run(RunState.PREFLIGHT, "resumed" if resumed else "started")
    with _stage(session, StageName.PREFLIGHT, 0, "preflight"):
        around = Surroundings(
            inventory=session.scheduler.inventory(),
            scheduler=session.scheduler.name,
            compute_python=session.site.compute_python,
            runs_dir=session.site.runs_dir,
            code_path=session.run_dir.code / "snapshot",
            resume=session.run_dir.newest_checkpoint(),
            stored_version=session.stored.package_version,
            site_slurm=session.site.slurm,
            job_secrets=session.site.job_secrets,
            baseline=look_back(session.store, session.spec, session.observer.says, session.run_dir.run_id),
        )
        results = make_checks(session.spec, around, session.check)
        session.journal.append(ChecksMade(results=results))
        for result in results:
            if result.status is CheckStatus.WARNING:
                session.observer.says(f"warning {result.id}: {result.found}; expected {result.expected}")
        session.record()
        if blocking(results):  # perhaps only now, after a controller before this one began with the trials
            cancel_trials(session, "its run is blocked", cancel)
        require_passed(results)


def trial(session: Session, rung: Rung) -> None:
    """Try the run out in small, as a run of its own that comes before it.

    Raises:
        PreflightBlocked: the trial failed; the run moves to failed.
    """
    with _stage(session, StageName.PREFLIGHT, 0, rung.title, said=rung.title):
        verdict = carry_out(session, rung, drive)
        session.journal.append(ChecksMade(results=(*session.journal.record.checks, verdict)))
        session.record()
        require_passed([verdict])


def allocate(session: Session, number: int) -> None:
    """Plan an attempt, submit it once, and wait until it has its nodes."""
    journal = session.journal
    if number not in journal.record.attempts:
        journal.move_run(RunState.QUEUED, f"attempt {number}")
    with _stage(session, StageName.ALLOCATE, number, title_of(session, StageName.ALLOCATE, number)):
        if number not in journal.record.attempts:
            _plan(session, number)
        if journal.record.attempts[number].state is AttemptState.PLANNED:
            _submit(session, number)
        _watch_until(session, number, lambda look: look.verdict.state is not AttemptState.SUBMITTED)


def train(session: Session, number: int) -> None:
    """Watch the trainer until the evaluator begins.

    Raises:
        AttemptFailed: the attempt ended before that.
    """
    with _stage(session, StageName.TRAIN, number, title_of(session, StageName.TRAIN, number)):
        look = _watch_until(session, number, lambda look: look.evaluating)
        if look.ended and look.verdict.state is not AttemptState.COMPLETED and not look.evaluating:
            raise AttemptFailed(look.verdict)


def evaluate(session: Session, number: int) -> None:
    """Watch the evaluator until the attempt ends.

    Raises:
        AttemptFailed: it did not end well.
    """
    if session.journal.record.state in (RunState.QUEUED, RunState.TRAINING):
        session.journal.move_run(RunState.EVALUATING, f"training of attempt {number} is done")
    with _stage(session, StageName.EVALUATE, number, "evaluate"):
        look = _watch_until(session, number, lambda look: False)
        if look.verdict.state is not AttemptState.COMPLETED:
            raise AttemptFailed(look.verdict)


def _decision_before(session: Session, number: int) -> Decision | None:
    """What was decided about the attempt before this one."""
    before = session.journal.record.attempts.get(number - 1)
    return before.decision if before is not None else None


def _plan(session: Session, number: int) -> None:
    inventory = session.scheduler.inventory()
    before = session.journal.record.attempts.get(number - 1)
    decision = _decision_before(session, number)
    if decision is not None and decision.resume_checkpoint:
        session.run_dir.put_aside_newer_than(decision.resume_checkpoint, number - 1)
    placement = plan(
        session.spec,
        inventory,
        attempt=number,
        resume_from=session.run_dir.newest_checkpoint(),
        excluded_nodes=_exclusions(session, inventory, number),
        config_diff={
            **(before.placement.config_diff if before is not None else {}),
            **(decision.config_diff if decision is not None else {}),
        },
        longest_gaps_s=_longest_gaps_s(session),
        usual_speeds=_usual_speeds(session),
    )
    if placement.resume_checkpoint:
        session.observer.says(f"attempt {number} goes on from step {placement.resumed_from_step}")
    record_plan(session.run_dir, placement, session.journal)


def _exclusions(session: Session, inventory: Inventory, number: int) -> dict[str, str]:
    """Nodes to go without, and why: those that all runs of the history speak against, and what was decided about the
    attempt before; of these, the newest suspects as long as it can still be placed."""
    decision = _decision_before(session, number)
    decided = dict.fromkeys(decision.excluded_nodes, decision.reason) if decision is not None else {}
    # The run's own suspects come last, and so are kept longest.
    kept = {node: why for node, why in _left_alone(session).items() if node not in decided} | decided
    spared = []
    while kept and shortages(session.spec.resources, inventory, tuple(kept)):
        spared.append(next(iter(kept)))
        del kept[spared[-1]]
    if spared:
        names = ", ".join(spared)
        session.observer.says(f"{names} is suspect but not excluded: without it there are too few nodes")
    return kept


def _longest_gaps_s(session: Session) -> dict[str, float]:
    if not session.spec.supervise.learn_from_history:
        return {}
    try:
        return queries.longest_gaps(session.store, shape_key(session.spec))
    except HistoryError:
        return {}  # they are learned anew then


def _usual_speeds(session: Session) -> dict[str, dict[str, dict[str, float]]]:
    if not session.spec.preflight.probe:
        return {}
    try:
        return queries.usual_speeds(session.store, utc_now() - REMEMBERED)
    except HistoryError:
        return {}  # each node is then held against the others only


def _left_alone(session: Session) -> dict[str, str]:
    """Nodes that the ledger leaves alone for now, and why; a machine that is its own scheduler has no ledger."""
    if session.scheduler.name == "local":
        return {}
    try:
        known = node_standings(session.store, utc_now(), session.site.runs_dir)
    except HistoryError as error:
        session.observer.says(f"the history does not answer, so nodes are taken as they come: {error}")
        return {}
    return {
        one.node: f"strikes in all runs: {one.num_strikes}, the last {one.last_kind}; until {one.excluded_until:%F %R}"
        for one in reversed(known)
        if one.excluded_until is not None
    }


def _submit(session: Session, number: int) -> None:
    journal = session.journal
    placement = journal.record.attempts[number].placement
    site = session.site
    first = max(journal.record.first_attempt, session.resumed_at)
    limit_s = attempt_caps.time_limit_s(session.spec, _used(session, first))
    request = job_request(session.run_dir, session.spec, placement, site.compute_python, site.slurm, site.job_secrets)
    request = replace(request, time_limit_s=limit_s)
    try:
        submit_once(session.run_dir, request, session.scheduler, journal, session.require_lease)
    except SubmissionFailed as error:
        verdict = AttemptVerdict(AttemptState.FAILED, str(error), FailureKind.CONFIG)
        journal.move_attempt(number, verdict.state, verdict.cause, verdict.failure_kind)
        raise AttemptFailed(verdict) from error


def _watch_until(session: Session, number: int, enough: Callable[[AttemptSnapshot], bool]) -> AttemptSnapshot:
    """Look again and again until the attempt has ended, or ``enough`` says so; moves states on the way."""
    journal, watcher = session.journal, session.watcher(number)
    while True:
        look = watcher.poll()
        if (
            look.verdict.state is AttemptState.RUNNING
            and journal.record.attempts[number].state is AttemptState.SUBMITTED
        ):
            nodes = ", ".join(look.job.nodes)
            journal.move_attempt(number, AttemptState.RUNNING, f"on {nodes}" if nodes else "its job runs")
            if journal.record.state is RunState.QUEUED:
                journal.move_run(RunState.TRAINING, f"attempt {number} runs")
            watcher.record()
        session.observer.looked(look)
        if session.lacks_directory():
            session.wait(session.poll_s)
            continue
        if look.ended or enough(look):
            return look
        session.wait(session.poll_s)


def _wait_for_back_off(session: Session, failed: int, call: Call) -> None:
    """Wait until the decision about the last attempt says; what passed since it was made counts."""
    last = session.journal.record.attempts.get(failed)
    if last is None or last.decision is None or failed == session.resumed_at:
        return
    _wait_for_the_cluster(session, failed + 1, call)
    due = last.decision.decided_at + timedelta(seconds=last.decision.delay_s)
    rest = min((due - utc_now()).total_seconds(), last.decision.delay_s)
    if rest > 0:
        session.observer.says(f"attempt {failed + 1} begins in {rest:.0f} s: {last.decision.reason}")
        title = f"wait {rest:.0f} s before attempt {failed + 1} - {last.decision.reason}"
        call(title, WAIT, partial(session.wait, rest))


def _wait_for_the_cluster(session: Session, number: int, call: Call) -> None:
    """While too many jobs of all runs come back, it is not this run that is at fault: wait until fewer do."""
    most = session.site.max_restarts_per_hour
    while (recent := _restarts_in_the_last_hour(session)) > most:
        why = f"{recent} restarts of all runs in the last hour, {most} allowed on this site (max_restarts_per_hour)"
        session.observer.says(f"attempt {number} waits: {why}")
        call(f"wait before attempt {number} - {why}", WAIT, partial(session.wait, CLUSTER_PAUSE_S))


def _restarts_in_the_last_hour(session: Session) -> int:
    try:
        return queries.restarts_since(session.store, utc_now() - timedelta(hours=1))
    except HistoryError:
        return 0  # a lost database holds nothing up


@contextmanager
def _stage(session: Session, name: StageName, attempt: int, title: str, said: str = "") -> Iterator[None]:
    """Time a stage and record how it went. What is no end of the stage (a lost lease, a bug) leaves it open.

    Args:
        said: what there is to say about it when it went well.
    """
    index = session.journal.begin_stage(name, attempt)
    session.record()
    session.observer.begins(title)
    try:
        yield
    except AttemptFailed as error:
        state = StageState.CANCELLED if error.cancelled else StageState.FAILED
        session.journal.end_stage(index, state, str(error))
        raise
    except BadInput as error:
        session.journal.end_stage(index, StageState.FAILED, str(error))
        session.journal.move_run(RunState.FAILED, str(error).partition("\n")[0])
        raise
    session.journal.end_stage(index, StageState.COMPLETED, said)
    session.record()


def _release(session: Session) -> None:
    """See the job of the last attempt gone: nodes must not wait for a person. It ends by itself a moment after its
    outcome is written; one that does not is ended."""
    last = session.journal.record.last_attempt
    if last is None or last.submission is None:
        return
    deadline = session.clock() + RELEASE_PATIENCE_S
    while session.clock() < deadline:
        status = session.scheduler.status([last.submission])[last.submission.job_id]
        if status.state is JobState.ENDED:
            return
        session.wait(session.poll_s)
    _end_job(session, last.submission)


# ---------------------------------------------------------------------------------------------------------------------
# How an attempt ended, and what follows


def conclude(session: Session, number: int) -> None:
    """Write down how an attempt ended, decide what follows, and move the run. Harmless when it was done before.

    Raises:
        RunFailed: the decision is to stop.
        PreflightBlocked: likewise, for what the probe of the nodes has found.
        RunCancelled: somebody ended the job.
        CancelAsked: somebody asked to end the run.
    """
    journal = session.journal
    attempt = journal.record.attempts[number]
    session.await_directory()
    look = _final_look(session, number, attempt)
    match look.verdict.state:
        case AttemptState.COMPLETED:
            journal.move_attempt(number, AttemptState.COMPLETED, look.verdict.cause or "every role ended well")
            if journal.record.state in (RunState.QUEUED, RunState.TRAINING):
                journal.move_run(RunState.EVALUATING, f"training of attempt {number} is done")
            journal.move_run(RunState.COMPLETED, f"attempt {number} completed")
        case AttemptState.CANCELLED:
            journal.move_attempt(number, AttemptState.CANCELLED, look.verdict.cause, FailureKind.USER_CANCEL)
            journal.move_run(RunState.CANCELLED, look.verdict.cause or "its job was cancelled")
            session.record()
            raise RunCancelled(f"run {session.run_dir.run_id} was cancelled: {look.verdict.cause}")
        case _:
            _raise_if_asked_to_end(session)
            _after_failure(session, number, attempt, look)
    session.record()


def _raise_if_asked_to_end(session: Session) -> None:
    """A job that was ended on request has not failed, whatever its agents and its scheduler say.

    Raises:
        CancelAsked: somebody asked to end the run, and may have ended its job without waiting for this controller.
    """
    request = read_model(session.run_dir.cancel_request, AgentCommand)
    if request is not None:
        raise CancelAsked(request.reason or "rlhf cancel")


def _final_look(session: Session, number: int, attempt: AttemptRecord) -> AttemptSnapshot:
    look = session.watcher(number).poll()
    if attempt.ended:
        # As it was concluded. Its job may have been cancelled since, which is not what ended it.
        return replace(look, verdict=AttemptVerdict(attempt.state, attempt.cause, attempt.failure_kind))
    return look


def _after_failure(session: Session, number: int, attempt: AttemptRecord, look: AttemptSnapshot) -> None:
    journal = session.journal
    first = max(journal.record.first_attempt, session.resumed_at)
    failure = explain(
        session.run_dir,
        look,
        session.spec,
        first_attempt=first,
        rolled_back=_went_back_in_vain(session, first, number),
    )
    # Each line may be the last one written before a kill: what stands is not written again.
    if failure.found_here and failure.incident is not None and attempt.incident is None:
        journal.append(IncidentFound(incident=failure.incident))
    if attempt.decision is None:
        failure = replace(failure, decision=_within_caps(session, _placeable(session, failure), first))
        journal.append(DecisionMade(decision=failure.decision))
    decision = attempt.decision or failure.decision
    journal.move_attempt(number, look.verdict.state, failure.message, failure.kind)
    session.record()
    if decision.action is not Action.NEW_ATTEMPT:
        if look.verdict.state is AttemptState.LOST and look.job.state is not JobState.ENDED:
            _end_job(session, attempt.submission)  # agents that are silent may only be stopped
        journal.move_run(RunState.FAILED, failure.message or failure.kind.value)
        session.record()
        ended = PreflightBlocked if _is_blocked_by_probe(session.run_dir, number) else RunFailed
        raise ended(diagnosis(session.run_dir, number, failure, decision))
    # Two attempts of one run must never be at work at the same time: they would write the same checkpoints.
    _end_job(session, attempt.submission)
    session.observer.says(f"attempt {number} ended: {failure.kind.value}. {decision.reason}")
    journal.move_run(RunState.QUEUED, decision.reason)
    session.record()


def _placeable(session: Session, failure: AttemptFailure) -> Decision:
    """What was decided; or to stop, where it takes another node in place of an unfit one, and there is none.

    Other suspects are used again where nobody can take their place: they may have been unlucky. This one would only be
    found unfit again.
    """
    decision = failure.decision
    if failure.kind is not FailureKind.NODE_UNFIT or decision.action is not Action.NEW_ATTEMPT:
        return decision
    try:
        lacks = shortages(session.spec.resources, session.scheduler.inventory(), decision.excluded_nodes)
    except SchedulerError:
        return decision  # nobody knows; the next attempt will find out
    if not lacks:
        return decision
    reason = f"no other node can take the place of {', '.join(decision.excluded_nodes)}: {'; '.join(lacks)}"
    return decision.model_copy(update={"action": Action.STOP, "reason": reason, "delay_s": 0.0, "excluded_nodes": ()})


def _within_caps(session: Session, decision: Decision, first: int) -> Decision:
    """The decision; to stop, where all attempts together have used what the run may use."""
    refused = attempt_caps.refusal(session.spec, _used(session, first))
    if decision.action is not Action.NEW_ATTEMPT or not refused:
        return decision
    return decision.model_copy(update={"action": Action.STOP, "reason": refused, "delay_s": 0.0, "excluded_nodes": ()})


def _used(session: Session, first: int) -> attempt_caps.Used:
    """Use of the attempts from ``first`` on: they count from where a person last started or resumed the run."""
    attempts = {number: one for number, one in session.journal.record.attempts.items() if number >= first}
    seconds = (allocated_s(session.run_dir.attempt(n), one.ended_at or utc_now()) for n, one in attempts.items())
    return attempt_caps.Used(len(attempts), sum(seconds))


def _is_blocked_by_probe(run_dir: RunDir, number: int) -> bool:
    report = read_model(run_dir.attempt(number).probe_report, ProbeReport)
    return report is not None and any(result.status is CheckStatus.BLOCKED for result in report.results)


def _went_back_in_vain(session: Session, first: int, number: int) -> bool:
    """Whether an attempt went back to an older checkpoint, and none has got further since than training was then."""
    newest = session.run_dir.newest_checkpoint()
    reached = newest.step if newest is not None else 0
    return any(
        before.decision is not None
        and bool(before.decision.resume_checkpoint)
        and reached <= session.run_dir.newest_put_aside(past)
        for past, before in session.journal.record.attempts.items()
        if first <= past < number
    )


def diagnosis(run_dir: RunDir, number: int, failure: AttemptFailure, decision: Decision) -> str:
    """What went wrong, for a tired person: what, who, where to look, why it was not tried again."""
    incident = failure.incident
    lines = [f"run {run_dir.run_id} failed in attempt {number}: {failure.kind.value}", f"  {failure.message}"]
    if incident is not None and incident.message not in failure.message:
        lines.append(f"  {incident.message}")
    if incident is not None and incident.step is not None:
        lines.append(f"  at step {incident.step}" + (f", phase {incident.phase}" if incident.phase else ""))
    if incident is not None and incident.suspect_ranks:
        on = f" on {', '.join(incident.suspect_nodes)}" if incident.suspect_nodes else ""
        lines.append(f"  suspect ranks: {', '.join(map(str, incident.suspect_ranks))}{on}")
    if incident is not None and incident.evidence_dir:
        lines.append(f"  evidence: {run_dir.root / incident.evidence_dir}")
    lines.append(f"  not tried again: {decision.reason}")
    lines.append(f"  logs: rlhf logs {run_dir.run_id}    go on after mending it: rlhf resume {run_dir.run_id}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Cancelling


def order_to_end(reason: str, *, save: bool) -> AgentCommand:
    """The order to end, with a checkpoint first or without."""
    return AgentCommand(kind="stop_after_step" if save else "cancel", reason=reason, time=utc_now())


def cancel(session: Session, reason: str, *, save: bool = False) -> None:
    """End the run's job, prove it, and write it down. The run's lease must be held.

    Args:
        save: write a checkpoint first, if the workers can within ``SAVE_PATIENCE_S``.

    Raises:
        SchedulerError: something of the job is still there.
    """
    journal = session.journal
    if journal.record.ended:
        return
    if journal.record.cancelling is None:
        journal.append(CancelStarted(reason=reason))
    cancel_trials(session, reason, cancel)
    number = max(journal.record.attempts, default=0)
    attempt = journal.record.attempts.get(number)
    if attempt is not None and not attempt.ended:
        # Of a job that waits for nodes there is nothing to save.
        save = save and session.watcher(number).poll().verdict.state is AttemptState.RUNNING
        session.observer.says(f"{'saving, then ' if save else ''}cancelling attempt {number}")
        _order(session.run_dir, number, order_to_end(reason, save=save))
        submission = attempt.submission or session.scheduler.find(session.run_dir.run_id, number)
        deadline = session.clock() + (SAVE_PATIENCE_S if save else CANCEL_PATIENCE_S)
        while submission is not None and not session.watcher(number).poll().ended and session.clock() < deadline:
            session.lease.keep()
            session.sleep(0.2)
        _end_job(session, submission, wait_for_database=False)
        if session.watcher(number).poll().verdict.state is AttemptState.COMPLETED:
            conclude(session, number)  # it was faster than the order
            return
        journal.move_attempt(number, AttemptState.CANCELLED, reason, FailureKind.USER_CANCEL)
    stage = journal.record.open_stage()
    if stage is not None:
        journal.end_stage(stage.index, StageState.CANCELLED, reason)
    journal.move_run(RunState.CANCELLED, reason)
    session.run_dir.cancel_request.unlink(missing_ok=True)
    session.record()


def _end_job(session: Session, submission: Submission | None, *, wait_for_database: bool = True) -> None:
    """See a job gone. The run's lease is asked first: another controller may have adopted the job.

    Args:
        wait_for_database: do nothing while nobody knows whose run it is. A person who asks to end it means the job of
            any controller.
    """
    if submission is None:
        return
    if wait_for_database:
        session.require_lease()
    else:
        with suppress(DatabaseUnavailable):
            session.lease.require()
    if not session.scheduler.cancel(submission):
        raise SchedulerError(
            f"job {submission.job_id} of {session.run_dir.run_id} could not be ended: something of it is still at work "
            f"on {submission.host or 'its nodes'}. End it there, then `rlhf cancel {session.run_dir.run_id}` again"
        )


def _order(run_dir: RunDir, number: int, command: AgentCommand) -> None:
    """Give agent 0 an order: the next numbered file in its folder."""
    folder = run_dir.attempt(number).commands
    taken = [int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()] if folder.is_dir() else []
    write_model(folder / f"{max(taken, default=0) + 1}.json", command)
