"""Polling of one attempt: its state, its progress, its end, and the next action.

The controller's loop calls :meth:`Watcher.poll`. Nothing here waits, and nothing here acts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from rlhf_core.diagnosis.classify import SCHEDULER_STATES
from rlhf_core.errors import HistoryError, JournalDamaged, SchedulerError
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState, JobStatus, Scheduler
from rlhf_core.schemas.attempts import ATTEMPT_ENDS, AttemptState
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentEvent, AttemptOutcome
from rlhf_core.schemas.resources import Placement, Role, Submission
from rlhf_core.watchdog import evidence
from rlhf_core.watchdog.ingest import sync
from rlhf_core.watchdog.silence import Silence, SilenceClock

OUTCOME_TIMEOUT_S = 2.0
"""Time after a bad end of its job in which an attempt may still bring its outcome (a shared file system shows files
late)."""
COMPLETED_OUTCOME_TIMEOUT_S = 30.0
"""The same where the scheduler says that the job ended well: then there is an outcome."""
SCHEDULER_REASON_TIMEOUT_S = 15.0
"""Time that the scheduler has to say why it ended a job whose agents had time to save."""
COMPLETING_TIMEOUT_S = 120.0
"""The same where a signal has ended the agents and Slurm says COMPLETING: it says why as soon as the last process is
gone, which ``KillWait`` (30 s by default), an epilog or a busy node delays. A new attempt before that could be one of a
job that its user has cancelled."""

LEADER_LOST_TIMEOUT_S = 8.0
"""Time that an outcome, or a word of agent 0 against another node, may still take after all other agents have lost it.
A scheduler notices a lost node much later: Slurm after ``SlurmdTimeout``, five minutes by default."""
OUTCOME_LEAD = timedelta(seconds=7.5)
"""An outcome that is this much older than the loss of agent 0 is how the attempt ended: half of the time after which an
agent takes agent 0 for lost, so that the clocks of nodes may differ by as much."""

_PAUSED = ("SUSPENDED", "STOPPED", "COMPLETING")
_ASK_WHY = (
    FailureKind.AGENT_KILLED,
    FailureKind.COLLECTIVE_HANG,
    FailureKind.NETWORK,
    FailureKind.PREEMPTION,
    FailureKind.WORKER_KILLED,
)
"""Kinds of failure that agents may report when in fact the scheduler has ended their job."""


@dataclass(frozen=True)
class AttemptVerdict:
    """State of an attempt, and its cause."""

    state: AttemptState
    cause: str
    failure_kind: FailureKind | None = None
    nodes: tuple[str, ...] = ()
    """Nodes to blame, where their agents have not said so themselves."""


@dataclass(frozen=True)
class AttemptSnapshot:
    """Result of one poll of an attempt."""

    attempt: int
    verdict: AttemptVerdict
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
    """Reason why the history could not be updated; empty if it was."""

    @property
    def ended(self) -> bool:
        """True if the attempt has ended."""
        return self.verdict.state in ATTEMPT_ENDS


class Watcher:
    """Poller of one attempt.

    Args:
        submission: its job; None when the job is known to have ended without ever having been recorded.
        store: the history, updated at every poll; None leaves it alone.
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
        self._progress = evidence.AttemptProgress(self._attempt, step=placement.resumed_from_step)
        self._last_job = JobStatus(JobState.PENDING if submission else JobState.ENDED)
        self._ended_since: float | None = None
        self._deserted_since: float | None = None
        self._told_since: float | None = None
        self._answered = False
        self._given_up: Silence | None = None
        self._silences = SilenceClock(clock())
        self.history_behind = ""

    def poll(self) -> AttemptSnapshot:
        """Poll scheduler and files, and update the history. An unavailable scheduler or database raises nothing."""
        job = self._job()
        # The outcome is read after the job's state: an attempt that ended in between is not taken for lost.
        self._progress.update()
        outcome = evidence.read_outcome(self._attempt)
        verdict = judge(
            job,
            outcome,
            self._ended_for_s(job),
            self._told_for_s(outcome),
            self._silent(job),
            self._deserted(job, outcome),
        )
        self.record()
        progress = self._progress
        return AttemptSnapshot(
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
        self._answered = status is not None and status.state is not JobState.UNKNOWN
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

    def _deserted(self, job: JobStatus, outcome: AttemptOutcome | None) -> AttemptVerdict | None:
        """Verdict where the agents of all other nodes have lost agent 0; None where they have not.

        They know it from the network, within seconds. An agent 0 that was only stopped may wake up when Slurm ends the
        job, and write an outcome that knows nothing of that.
        """
        said = self._progress.leader_lost_at
        if not job.nodes[1:] or not set(job.nodes[1:]) <= said.keys():
            self._deserted_since = None
            return None
        now = self._clock()
        self._deserted_since = now if self._deserted_since is None else self._deserted_since
        is_over = self._ended_for_s(job) >= OUTCOME_TIMEOUT_S  # Slurm has ended it: nothing more is written
        if outcome is None and now - self._deserted_since <= LEADER_LOST_TIMEOUT_S and not is_over:
            return None
        if outcome is not None:
            came_first = outcome.time + OUTCOME_LEAD < min(said[node] for node in job.nodes[1:])
            if came_first or outcome.state is AttemptState.COMPLETED:
                return None
        first, others = job.nodes[0], job.nodes[1:]
        if len(others) == 1 and self._progress.given_up.get(first) == others[0]:
            cause = f"the agents of {first} and {others[0]} have lost each other, and both were alive"
            return AttemptVerdict(AttemptState.LOST, cause, FailureKind.NETWORK, job.nodes)
        cause = f"the agents of all other nodes have lost that of {first}"
        return AttemptVerdict(AttemptState.LOST, cause, FailureKind.NODE_LOST, (first,))

    def _silent(self, job: JobStatus) -> Silence | None:
        """Return the agents that have been silent for too long while their job ran and this process was reading.

        The result is kept, for the job is given up: no later poll may find it alive between the verdict and its end.
        """
        # What the scheduler last said of it does not count here: it may be away together with the file system.
        runs = self._answered and job.state is JobState.RUNNING and job.scheduler_state not in _PAUSED
        silence = self._silences.observe(self._clock(), self._progress.published, counts=runs)
        if silence is not None and self._given_up is None and evidence.can_be_written(self._attempt):
            self._given_up = silence
        return self._given_up

    def _told_for_s(self, outcome: AttemptOutcome | None) -> float:
        if outcome is None:
            return 0.0
        now = self._clock()
        self._told_since = now if self._told_since is None else self._told_since
        return now - self._told_since


def record(run_dir: RunDir, store: HistoryStore | None) -> str:
    """Update the history from a run directory. Returns the reason if it could not be updated, or an empty text.

    The run directory has everything: a database that is away, or a file system that does not answer for a moment, costs
    nothing but a view that is behind. So does a journal that was damaged while its controller runs: the controller
    knows what it wrote, and the next reader raises an error.
    """
    if store is None:
        return ""
    try:
        sync(run_dir, store)
    except (HistoryError, JournalDamaged, OSError) as error:
        return str(error)
    return ""


def judge(
    job: JobStatus,
    outcome: AttemptOutcome | None,
    ended_for_s: float,
    told_for_s: float = SCHEDULER_REASON_TIMEOUT_S,
    silence: Silence | None = None,
    deserted: AttemptVerdict | None = None,
) -> AttemptVerdict:
    """Derive the state of an attempt. Pure.

    Args:
        job: the scheduler's last known answer.
        outcome: outcome that agent 0 wrote, if it did.
        ended_for_s: time for which the job has been known to have ended, in seconds.
        told_for_s: time for which the outcome has been known, in seconds.
        silence: agents of a running job that have been silent for too long.
        deserted: verdict if all other agents have lost agent 0.
    """
    if deserted is not None and job.scheduler_state != "CANCELLED":
        return deserted
    if outcome is not None:
        return _with_the_schedulers_word(job, outcome, told_for_s)
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
    """Verdict on silent agents. If all are silent, no single node is to blame; if some are, the file system still
    works."""
    of = "its agents have" if silence.of_all else f"the agents of {', '.join(silence.nodes)} have"
    cause = f"{of} said nothing for {silence.seconds:.0f} s, although the scheduler says that it runs"
    if silence.of_all:
        return AttemptVerdict(AttemptState.LOST, cause, FailureKind.AGENT_KILLED)
    return AttemptVerdict(AttemptState.LOST, f"{cause} and the others go on", FailureKind.NODE_LOST, silence.nodes)


_CANCELLED = "its job was cancelled at the scheduler"


def _with_the_schedulers_word(job: JobStatus, outcome: AttemptOutcome, told_for_s: float) -> AttemptVerdict:
    """Combine the agents' outcome with the scheduler's reason: agents cannot know why they were told to end."""
    kind = outcome.failure_kind
    if outcome.state is AttemptState.PREEMPTED:
        kind = kind or FailureKind.PREEMPTION
    own = AttemptVerdict(outcome.state, outcome.message, kind)
    asks = outcome.state is not AttemptState.COMPLETED and (bool(outcome.ended_by) or kind in _ASK_WHY)
    if not asks or not job.scheduler_state:
        return own
    if job.state is not JobState.ENDED:
        waiting = AttemptVerdict(AttemptState.RUNNING, "its agents have ended; waiting for the scheduler to say why")
        was_ended = bool(outcome.ended_by) and job.scheduler_state == "COMPLETING"
        return waiting if told_for_s < (COMPLETING_TIMEOUT_S if was_ended else SCHEDULER_REASON_TIMEOUT_S) else own
    if job.scheduler_state == "CANCELLED":
        return AttemptVerdict(AttemptState.CANCELLED, _CANCELLED, FailureKind.USER_CANCEL)
    if job.scheduler_state == "FAILED" and outcome.state is AttemptState.PREEMPTED:
        # Agents that have saved exit with 0. One has not, and Slurm ended the others by the signal that also announces
        # a preemption.
        cause = f"{job.reason}: an agent ended badly, and the others with it; {outcome.message}"
        return AttemptVerdict(AttemptState.FAILED, cause, FailureKind.AGENT_KILLED)
    told = SCHEDULER_STATES.get(job.scheduler_state)
    if told is None:
        return own
    state = AttemptState.FAILED if told[0] is FailureKind.NODE_LOST else outcome.state
    return AttemptVerdict(state, f"{job.reason}; {outcome.message}", told[0])
