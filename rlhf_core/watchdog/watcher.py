"""Polling of one attempt: its state, its progress, its end, and the next action.

The controller's loop calls :meth:`Watcher.poll`. This module neither waits nor acts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from rlhf_core.diagnosis.classify import SCHEDULER_STATES
from rlhf_core.errors import HistoryError, JournalDamaged, SchedulerError
from rlhf_core.files.lookups import is_there
from rlhf_core.files.whole import read_model
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState, JobStatus, Scheduler
from rlhf_core.schemas.attempts import ATTEMPT_ENDS, AttemptState
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentEvent, AttemptOutcome
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.watchdog import evidence
from rlhf_core.watchdog.ingest import sync
from rlhf_core.watchdog.silence import Silence, SilenceClock

OUTCOME_TIMEOUT_S = 2.0
"""Time after a job's bad end in which its outcome may still appear (a shared file system shows files late)."""
COMPLETED_OUTCOME_TIMEOUT_S = 30.0
"""The same for a job that the scheduler reports as completed: an outcome must exist."""
SCHEDULER_REASON_TIMEOUT_S = 15.0
"""Time that the scheduler has to give its reason for ending a job whose agents had time to save."""
COMPLETING_TIMEOUT_S = 300.0
"""The same if a signal ended the agents, or had them save and end, and Slurm reports COMPLETING: Slurm gives the reason
once the last process is gone, which ``KillWait`` (30 s by default), an epilog or a busy node delays. A new attempt, for
which the job must be gone anyway, could otherwise restart a job that its user has cancelled."""

LEADER_LOST_TIMEOUT_S = 8.0
"""Time in which an outcome, or agent 0's report against another node, may still appear after all other agents have lost
agent 0. A scheduler notices a lost node much later: Slurm after ``SlurmdTimeout``, five minutes by default."""
OUTCOME_LEAD = timedelta(seconds=7.5)
"""Age difference at which an outcome older than the loss of agent 0 counts as the end of the attempt. It is half the
time after which an agent declares agent 0 lost, so node clocks may differ by as much."""

_PAUSED = ("SUSPENDED", "STOPPED", "COMPLETING")
_NEED_REASON = (
    FailureKind.AGENT_KILLED,
    FailureKind.COLLECTIVE_HANG,
    FailureKind.NETWORK,
    FailureKind.PREEMPTION,
    FailureKind.WORKER_KILLED,
)
"""Failure kinds that agents may report although the scheduler ended their job."""


@dataclass(frozen=True)
class AttemptVerdict:
    """State of an attempt, and its cause."""

    state: AttemptState
    cause: str
    failure_kind: FailureKind | None = None
    nodes: tuple[str, ...] = ()
    """Nodes to blame, if their agents have not reported it themselves."""


@dataclass(frozen=True)
class AttemptSnapshot:
    """Result of one poll of an attempt."""

    attempt: int
    verdict: AttemptVerdict
    job: JobStatus
    progress: evidence.AttemptProgress
    events: Sequence[AgentEvent]
    outcome: AttemptOutcome | None
    history_behind: str
    """Reason why the history could not be updated; empty if it was updated."""

    @property
    def ended(self) -> bool:
        """True if the attempt has ended."""
        return self.verdict.state in ATTEMPT_ENDS


class Watcher:
    """Poller of one attempt.

    Args:
        submission: its job; None if the job is known to have ended without ever being recorded.
        store: the history, updated at every poll; None for no updates.
        clock: monotonic seconds.
        join_s: ``supervise.join_s``.
    """

    def __init__(
        self,
        run_dir: RunDir,
        placement: Placement,
        submission: Submission | None,
        scheduler: Scheduler,
        store: HistoryStore | None,
        clock: Callable[[], float] = time.monotonic,
        join_s: float = SuperviseSpec().join_s,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = run_dir.attempt(placement.attempt)
        self._submission = submission
        self._scheduler = scheduler
        self._store = store
        self._clock = clock
        self._reader = evidence.AttemptReader(self._attempt, placement.resumed_from_step)
        self._last_job = JobStatus(JobState.PENDING if submission else JobState.ENDED)
        self._since: dict[str, float] = {}
        self._answered = False
        self._given_up: Silence | None = None
        self._read_from = 1
        self._silences = SilenceClock(clock(), join_s)

    def poll(self) -> AttemptSnapshot:
        """Poll scheduler and files, and update the history. Does not raise if the scheduler or database is
        unavailable.

        Raises:
            OSError: the file system of the run directory does not respond.
        """
        job = self._job()
        # Read the outcome after the job's state, so that an attempt that ends in between does not count as lost.
        self._reader.update()
        outcome = read_model(self._attempt.outcome, AttemptOutcome)
        ended_for_s = self._lasts_s("ended", job.state is JobState.ENDED)
        verdict = judge(
            job,
            outcome,
            ended_for_s,
            self._lasts_s("outcome", outcome is not None),
            self._silent(job),
            self._deserted(job, outcome, ended_for_s) or self._not_met(outcome),
        )
        return AttemptSnapshot(
            attempt=self._attempt.number,
            verdict=verdict,
            job=job,
            progress=self._reader.progress,
            events=self._reader.events,
            outcome=outcome,
            history_behind=self._record(),
        )

    def _job(self) -> JobStatus:
        """The job's state; if the scheduler does not know it, the last known one."""
        if self._submission is None:
            return self._last_job
        try:
            status = self._scheduler.status([self._submission]).get(self._submission.job_id)
        except SchedulerError as error:
            status = JobStatus(JobState.UNKNOWN, str(error))
        self._answered = status is not None and status.state is not JobState.UNKNOWN
        if status is None or status.state is JobState.UNKNOWN:
            reason = status.reason if status else "the scheduler did not list the job"
            return replace(self._last_job, reason=f"state unknown: {reason}", needs_action=False)
        if status.scheduler_state == "COMPLETING":
            # Slurm then names only the nodes that are not done yet, the first of which need not be that of agent 0.
            status = replace(status, nodes=self._last_job.nodes)
        self._last_job = status
        return status

    def _lasts_s(self, what: str, is_so: bool) -> float:
        """Seconds for which something has been so at every poll; 0 if it is not."""
        now = self._clock()
        if not is_so:
            self._since.pop(what, None)
            return 0.0
        return now - self._since.setdefault(what, now)

    def _deserted(self, job: JobStatus, outcome: AttemptOutcome | None, ended_for_s: float) -> AttemptVerdict | None:
        """Verdict if the agents of all other nodes have lost agent 0; otherwise None.

        They notice over the network within seconds. An agent 0 that was only suspended may wake up when Slurm ends the
        job, and write an outcome that ignores this.
        """
        lost_at = self._reader.leader_lost_at
        is_deserted = bool(job.nodes[1:]) and set(job.nodes[1:]) <= lost_at.keys()
        deserted_for_s = self._lasts_s("deserted", is_deserted)
        is_over = ended_for_s >= OUTCOME_TIMEOUT_S  # Slurm has ended it: nothing more will be written
        if not is_deserted or (outcome is None and deserted_for_s <= LEADER_LOST_TIMEOUT_S and not is_over):
            return None
        if outcome is not None:
            is_earlier = outcome.time + OUTCOME_LEAD < min(lost_at[node] for node in job.nodes[1:])
            if is_earlier or outcome.state is AttemptState.COMPLETED:
                return None
        first, others = job.nodes[0], job.nodes[1:]
        if len(others) == 1 and self._reader.given_up.get(first) == others[0]:
            cause = f"the agents of {first} and {others[0]} lost their connection although both were alive"
            return AttemptVerdict(AttemptState.LOST, cause, FailureKind.NETWORK, job.nodes)
        cause = f"the agents of all other nodes lost contact with the agent of {first}"
        return AttemptVerdict(AttemptState.LOST, cause, FailureKind.NODE_LOST, (first,))

    def _not_met(self, outcome: AttemptOutcome | None) -> AttemptVerdict | None:
        """Verdict if an agent reported that agent 0 did not appear in time; otherwise None.

        That agent exits, and the job ends with it. If agent 0 appears after all, it only knows that it was ended.
        """
        report = self._reader.not_met
        if report is None or (outcome is not None and outcome.time < report.time):
            return None
        return AttemptVerdict(AttemptState.LOST, report.message, FailureKind.RENDEZVOUS, report.nodes)

    def _silent(self, job: JobStatus) -> Silence | None:
        """Return the agents that have been silent for too long while their job ran and this process was reading.

        The result is kept, because the job is given up: no later poll may report it alive before it has ended.
        """
        # The scheduler's last answer does not count here: scheduler and file system may be down together.
        runs = self._answered and job.state is JobState.RUNNING and job.scheduler_state not in _PAUSED
        started = self._reader.progress.restart >= 0 or is_there(self._attempt.claim)
        silence = self._silences.observe(self._clock(), self._reader.published, counts=runs, started=started)
        if silence is not None and self._given_up is None and evidence.can_be_written(self._attempt):
            self._given_up = silence
        return self._given_up

    def _record(self) -> str:
        """Update the history. After the first poll without the attempts before the last two, whose files only late
        lines could change: these are read when this attempt is concluded. A poll must not cost as much as all of
        them."""
        behind = record(self._run_dir, self._store, self._read_from)
        if not behind:
            self._read_from = max(1, self._attempt.number - 1)
        return behind


def record(run_dir: RunDir, store: HistoryStore | None, first_attempt: int = 1) -> str:
    """Update the history from a run directory. Returns the reason if that failed, otherwise an empty string.

    The run directory has everything, so an unavailable database or a file system that briefly does not answer only
    delays the history. The same holds for a journal that is damaged while its controller runs: the controller knows
    what it wrote, and the next reader raises an error.

    Args:
        first_attempt: as in :func:`sync`.
    """
    if store is None:
        return ""
    try:
        sync(run_dir, store, first_attempt)
    except (HistoryError, JournalDamaged, OSError) as error:
        return str(error)
    return ""


def judge(
    job: JobStatus,
    outcome: AttemptOutcome | None,
    ended_for_s: float,
    outcome_age_s: float = SCHEDULER_REASON_TIMEOUT_S,
    silence: Silence | None = None,
    deserted: AttemptVerdict | None = None,
) -> AttemptVerdict:
    """Derive the state of an attempt. Pure.

    Args:
        job: the scheduler's last known answer.
        outcome: outcome that agent 0 wrote, if any.
        ended_for_s: seconds since the job was first known to have ended.
        outcome_age_s: seconds since the outcome was first known.
        silence: agents of a running job that have been silent for too long.
        deserted: verdict if the other agents have lost agent 0, or never met it.
    """
    if deserted is not None and job.scheduler_state != "CANCELLED":
        return deserted
    if outcome is not None:
        return _with_scheduler_reason(job, outcome, outcome_age_s)
    match job.state:
        case JobState.PENDING | JobState.UNKNOWN:
            return AttemptVerdict(AttemptState.SUBMITTED, job.reason)
        case JobState.RUNNING if silence is not None:
            return _given_up(silence)
        case JobState.RUNNING:
            return AttemptVerdict(AttemptState.RUNNING, job.reason)
        case JobState.ENDED:
            if job.scheduler_state == "CANCELLED":
                return AttemptVerdict(AttemptState.CANCELLED, _CANCELLED, FailureKind.USER_CANCEL)
            if ended_for_s < (COMPLETED_OUTCOME_TIMEOUT_S if job.scheduler_state == "COMPLETED" else OUTCOME_TIMEOUT_S):
                return AttemptVerdict(AttemptState.RUNNING, "its job has ended; waiting for its outcome")
            cause = f"its job ended without an outcome ({job.reason or 'no reason given'})"
            return AttemptVerdict(AttemptState.LOST, cause, FailureKind.AGENT_KILLED)


def _given_up(silence: Silence) -> AttemptVerdict:
    """Verdict on silent agents. If all are silent, no single node is to blame; if only some are, the file system still
    works."""
    if not silence.nodes:
        cause = (
            f"no agent has started for {silence.seconds:.0f} s, although the scheduler reports the job as running. If "
            "the nodes need longer, raise supervise.join_s"
        )
        return AttemptVerdict(AttemptState.LOST, cause, FailureKind.RENDEZVOUS)
    of = "its agents have" if silence.of_all else f"the agents of {', '.join(silence.nodes)} have"
    cause = f"{of} been silent for {silence.seconds:.0f} s, although the scheduler reports the job as running"
    if silence.of_all:
        return AttemptVerdict(AttemptState.LOST, cause, FailureKind.AGENT_KILLED)
    return AttemptVerdict(AttemptState.LOST, f"{cause} and the others continue", FailureKind.NODE_LOST, silence.nodes)


_CANCELLED = "its job was cancelled at the scheduler"


def _with_scheduler_reason(job: JobStatus, outcome: AttemptOutcome, outcome_age_s: float) -> AttemptVerdict:
    """Combine the agents' outcome with the scheduler's reason: agents cannot know why they were ordered to stop."""
    kind = outcome.failure_kind
    if outcome.state is AttemptState.PREEMPTED:
        kind = kind or FailureKind.PREEMPTION
    own = AttemptVerdict(outcome.state, outcome.message, kind)
    needs_reason = outcome.state is not AttemptState.COMPLETED and (bool(outcome.ended_by) or kind in _NEED_REASON)
    if not needs_reason or not job.scheduler_state:
        return own
    if job.state is not JobState.ENDED:
        waiting = AttemptVerdict(AttemptState.RUNNING, "its agents have ended; waiting for the scheduler's reason")
        was_ended = bool(outcome.ended_by) or outcome.state is AttemptState.PREEMPTED
        is_told_later = was_ended and job.scheduler_state == "COMPLETING"
        limit_s = COMPLETING_TIMEOUT_S if is_told_later else SCHEDULER_REASON_TIMEOUT_S
        return waiting if outcome_age_s < limit_s else own
    if job.scheduler_state == "CANCELLED":
        return AttemptVerdict(AttemptState.CANCELLED, _CANCELLED, FailureKind.USER_CANCEL)
    if job.scheduler_state == "FAILED" and outcome.state is AttemptState.PREEMPTED:
        # Agents that saved exit with 0. One did not, and Slurm ended the others by the signal that also announces
        # a preemption.
        cause = f"{job.reason}: an agent failed, and the others ended with it; {outcome.message}"
        return AttemptVerdict(AttemptState.FAILED, cause, FailureKind.AGENT_KILLED)
    reason = SCHEDULER_STATES.get(job.scheduler_state)
    if reason is None:
        return own
    state = AttemptState.FAILED if reason is FailureKind.NODE_LOST else outcome.state
    return AttemptVerdict(state, f"{job.reason}; {outcome.message}", reason)
