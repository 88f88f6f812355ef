"""One look at one attempt: is it alive, how far is it, did it end, and what now.

The controller's loop is ``look`` again and again. Nothing here waits, and nothing here acts.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_core.diagnosis.classify import Evidence, classify
from rlhf_core.diagnosis.policy import decide_next
from rlhf_core.errors import HistoryError, SchedulerError
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir import RunDir, read_tail
from rlhf_core.scheduler.base import JobState, JobStatus, Scheduler
from rlhf_core.schemas.attempts import ATTEMPT_ENDS, AttemptState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, DecidedBy, Decision, FailureKind, Incident
from rlhf_core.schemas.reports import AgentEvent, AttemptOutcome
from rlhf_core.schemas.resources import Placement, Role, Submission
from rlhf_core.schemas.run import SuperviseSpec
from rlhf_core.watchdog import evidence
from rlhf_core.watchdog.ingest import sync

LOST_AFTER_S = 5.0
"""How long after its job has ended an attempt may still bring its outcome (a shared file system shows files late)."""

LOG_TAIL_BYTES = 16 << 10
"""How much of the end of a lost job's log is looked at."""


@dataclass(frozen=True)
class Verdict:
    """Where an attempt stands, and why."""

    state: AttemptState
    cause: str
    failure_kind: FailureKind | None = None


@dataclass(frozen=True)
class Look:
    """What one look showed."""

    attempt: int
    verdict: Verdict
    job: JobStatus
    role: Role | None
    restart: int
    restarts_made: int
    step: int
    phase: str
    loop: str
    metrics: Mapping[str, float]
    evaluating: bool
    events: Sequence[AgentEvent]
    outcome: AttemptOutcome | None
    history_behind: str
    """Why the history could not be brought up to date; empty when it was."""

    @property
    def ended(self) -> bool:
        """Whether the attempt has come to its end."""
        return self.verdict.state in ATTEMPT_ENDS


@dataclass(frozen=True)
class Failure:
    """A bad end, and what to do about it."""

    kind: FailureKind
    message: str
    incident: Incident | None
    """The last incident of the attempt, from its agents or, when they left none, from here."""
    found_here: bool
    """Whether the incident is the controller's own finding, to be written into the journal."""
    decision: Decision


class Watcher:
    """Looks at one attempt.

    Args:
        submission: its job; None when the job is known to have ended without ever having been recorded.
        store: the history, brought up to date at every look; None leaves it alone.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run_dir: RunDir,
        placement: Placement,
        submission: Submission | None,
        scheduler: Scheduler,
        store: HistoryStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = run_dir.attempt(placement.attempt)
        self._submission = submission
        self._scheduler = scheduler
        self._store = store
        self._clock = clock
        self._progress = evidence.Progress(self._attempt, step=placement.resumed_from_step)
        self._last_job = JobStatus(JobState.PENDING if submission else JobState.ENDED)
        self._ended_since: float | None = None
        self.history_behind = ""

    def look(self) -> Look:
        """Look once: scheduler, files, history. Raises nothing for a scheduler or a database that does not answer."""
        job = self._job()
        # The outcome is read after the job's state: an attempt that ended in between is not taken for lost.
        self._progress.update()
        outcome = evidence.read_outcome(self._attempt)
        verdict = judge(job, outcome, self._ended_for_s(job))
        self.record()
        progress = self._progress
        return Look(
            attempt=self._attempt.number,
            verdict=verdict,
            job=job,
            role=progress.role,
            restart=progress.restart,
            restarts_made=progress.restarts_made,
            step=progress.step,
            phase=progress.phase,
            loop=progress.loop,
            metrics=dict(progress.metrics),
            evaluating=progress.evaluating,
            events=tuple(progress.events),
            outcome=outcome,
            history_behind=self.history_behind,
        )

    def record(self) -> None:
        """Bring the history up to date with the run directory; a database that does not answer is tolerated."""
        self.history_behind = record(self._run_dir, self._store)

    def _job(self) -> JobStatus:
        """The job's state; what the scheduler does not know leaves it as it was last known."""
        if self._submission is None:
            return self._last_job
        try:
            status = self._scheduler.status([self._submission]).get(self._submission.job_id)
        except SchedulerError as error:
            status = JobStatus(JobState.UNKNOWN, str(error))
        if status is None or status.state is JobState.UNKNOWN:
            reason = status.reason if status else "the scheduler did not mention the job"
            return replace(self._last_job, reason=f"state unknown: {reason}")
        self._last_job = status
        return status

    def _ended_for_s(self, job: JobStatus) -> float:
        if job.state is not JobState.ENDED:
            self._ended_since = None
            return 0.0
        now = self._clock()
        self._ended_since = now if self._ended_since is None else self._ended_since
        return now - self._ended_since


def record(run_dir: RunDir, store: HistoryStore | None) -> str:
    """Bring the history up to date with a run directory; why it could not be, or an empty text.

    The run directory has everything: a database that is away, or a file system that does not answer for a moment,
    costs nothing but a view that is behind.
    """
    if store is None:
        return ""
    try:
        sync(run_dir, store)
    except (HistoryError, OSError) as error:
        return str(error)
    return ""


def judge(job: JobStatus, outcome: AttemptOutcome | None, ended_for_s: float) -> Verdict:
    """Where an attempt stands. Pure.

    Args:
        job: the scheduler's last known answer.
        outcome: what agent 0 wrote, if it did.
        ended_for_s: how long the job is known to have ended, in seconds.
    """
    if outcome is not None:
        return Verdict(outcome.state, outcome.message, outcome.failure_kind)
    match job.state:
        case JobState.PENDING | JobState.UNKNOWN:
            return Verdict(AttemptState.SUBMITTED, job.reason)
        case JobState.RUNNING:
            return Verdict(AttemptState.RUNNING, job.reason)
        case JobState.ENDED:
            if ended_for_s < LOST_AFTER_S:
                return Verdict(AttemptState.RUNNING, "its job has ended; waiting for its outcome")
            cause = f"its job ended without an outcome ({job.reason or 'no reason given'})"
            return Verdict(AttemptState.LOST, cause, FailureKind.AGENT_KILLED)


def explain(
    run_dir: RunDir,
    look: Look,
    spec: SuperviseSpec,
    *,
    first_attempt: int,
    chance: Callable[[], float] = random.random,
) -> Failure:
    """What went wrong in an attempt that ended badly, and what to do about it.

    Args:
        first_attempt: first attempt since a person last started or resumed the run; the budget counts from here.
        chance: number in [0, 1) that spreads the back-off.
    """
    attempt = run_dir.attempt(look.attempt)
    found = evidence.incidents(attempt)
    own = _incident_of_a_lost_job(run_dir, look) if look.verdict.state is AttemptState.LOST else None
    incident = own or (found[-1] if found else None)
    kind = own.failure_kind if own else look.verdict.failure_kind or FailureKind.UNKNOWN
    past = evidence.look_back(run_dir, look.attempt, first_attempt, incident.fingerprint if incident else "")
    choice = decide_next(kind, past.attempts_without_progress, past.same_fingerprint_before, spec, chance())
    return Failure(
        kind=kind,
        message=own.message if own else look.verdict.cause,
        incident=incident,
        found_here=own is not None,
        decision=Decision(
            attempt=look.attempt,
            restart=max(look.restart, 0),
            action=choice.action,
            reason=choice.reason,
            decided_by=DecidedBy.CONTROLLER,
            decided_at=utc_now(),
            delay_s=choice.delay_s if choice.action is Action.NEW_ATTEMPT else 0.0,
        ),
    )


def _incident_of_a_lost_job(run_dir: RunDir, look: Look) -> Incident:
    attempt = run_dir.attempt(look.attempt)
    log = evidence.scheduler_log(attempt)
    # An agent that was at work may have printed failures it has recovered from: its log says nothing about its own end.
    # One that never began (no claim) printed why.
    text = "" if log is None or attempt.claim.exists() else read_tail(log, LOG_TAIL_BYTES)
    diagnosis = classify(Evidence(agent_vanished=True, agent_log=text))
    lines = text.strip().splitlines()
    said = f" The last line of {log}: {lines[-1].strip()[:300]}" if lines else ""
    return Incident(
        attempt=look.attempt,
        restart=max(look.restart, 0),
        failure_kind=diagnosis.kind,
        message=f"The job of attempt {look.attempt} is gone and left no outcome. {diagnosis.message}{said}",
        phase=look.phase,
        step=look.step or None,
        seen_at=utc_now(),
        fingerprint=diagnosis.fingerprint,
        evidence_dir=str(attempt.scheduler_dir.relative_to(run_dir.root)),
    )
