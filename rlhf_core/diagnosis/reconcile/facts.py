"""Facts about runs, flow runs, task runs and jobs: input of the reconciler's decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from rlhf_core.schemas.attempts import RUN_ENDS, RunState, StageState

START_S = 300.0
"""Time that a flow run may count as starting or running without a known process."""


class LeaseState(StrEnum):
    """State of the lease of a run."""

    FREE = "free"
    """Never taken, or released."""
    DEAD = "dead"
    """Held by a process of this machine that is gone."""
    SILENT = "silent"
    """Held by a process of another machine that has not renewed it in time, or by one of this machine that is stopped
    or hangs."""
    LIVING = "living"
    """Held by a running controller."""


class ProcessState(StrEnum):
    """State of the process of a flow run."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


class FlowState(StrEnum):
    """State types of a flow run, with Prefect's names."""

    SCHEDULED = "SCHEDULED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CRASHED = "CRASHED"


FLOW_ENDS = frozenset({FlowState.CANCELLED, FlowState.COMPLETED, FlowState.FAILED, FlowState.CRASHED})
"""Final states of a flow run."""


@dataclass(frozen=True)
class RunFacts:
    """State of one run in its journal and in the history, and its controller."""

    run_id: str
    state: RunState
    """State in its journal."""
    recorded: str
    """State in the history; empty if the history lacks the run."""
    holder: LeaseState = LeaseState.FREE
    owner: str = ""
    """Name of the controller, for display."""
    undriven_s: float = 0.0
    """Minimum time without a controller, in seconds."""
    silent_s: float = 0.0
    """Time for which the reconciler has watched its controller be silent, in seconds. An outage of the database or a
    suspension of the machine does not count: after it, a controller needs a moment to renew its lease."""
    num_controllers: int = 0
    """Number of controllers that took it within the last hour."""
    controller_started_at: datetime | None = None
    """Start of the newest of its controllers."""
    flow_run_id: str = ""
    """Flow run of that controller; empty if it was none."""
    attempt: int = 0
    """Newest attempt; 0 before the first."""
    jobs: Mapping[int, str] = field(default_factory=dict)
    """Scheduler's job id of each attempt, if the scheduler's answer is known."""
    ended_s: float = 0.0
    """Time since its end, in seconds."""
    cancel_requested: str = ""
    """Reason given to `rlhf cancel`; empty if cancellation was not requested, or with a checkpoint first. That may take
    an hour, so a controller carries it out and not the reconciler."""
    trial_of: str = ""
    """Run that it is a trial of; empty if it is not a trial."""
    promotion_due: bool = False
    """True if the run is completed and its promotion needs a controller: to start it, wait for approval, or write the
    model."""
    unpublished: int = 0
    """Number of events and artifacts of an ended run that Prefect lacks because its server was unreachable at the
    end."""
    foreign_owner: str = ""
    """User whom its directory belongs to, if that is another one and this process cannot write it; empty otherwise."""
    missing_s: float = 0.0
    """Time that its directory has been missing, in seconds; 0 if it exists or nothing is known."""

    @property
    def ended(self) -> bool:
        """True if it is in a final state."""
        return self.state in RUN_ENDS

    @property
    def needs_controller(self) -> bool:
        """True if it still needs a controller; a promotion may follow the end."""
        return not self.ended or self.promotion_due


@dataclass(frozen=True)
class FlowRunFacts:
    """State of one flow run of a run in Prefect."""

    flow_run_id: str
    run_id: str
    """Run that it drives; empty if unknown (it may never have created one)."""
    state: FlowState
    changed_at: datetime
    """Time of the last change of state."""
    state_s: float
    """Time since that change, in seconds."""
    created_at: datetime
    process: ProcessState = ProcessState.UNKNOWN
    begun: bool = True
    """True if it has had a process; False if it was only requested."""
    suspended: bool = False
    """True if it is suspended in Prefect and waits without a process."""
    attended: bool = True
    """True if a Prefect worker manages its process and cancels it on request, or if that is unknown."""

    @property
    def is_lost(self) -> bool:
        """True if it is active in Prefect but has no process."""
        if self.state in FLOW_ENDS or self.state is FlowState.SCHEDULED or self.suspended:
            return False
        if self.process is ProcessState.UNKNOWN:
            return self.state is FlowState.PENDING and self.state_s > START_S
        return self.process is ProcessState.GONE

    @property
    def may_drive(self) -> bool:
        """True if it drives its run, or soon will."""
        if self.state in FLOW_ENDS or self.is_lost:
            return False
        waits = self.state in (FlowState.SCHEDULED, FlowState.PENDING) or self.suspended
        # On another machine, only the lease is known: a controller takes it soon after its start.
        return waits or self.process is not ProcessState.UNKNOWN or self.state_s <= START_S


@dataclass(frozen=True)
class TaskRunFacts:
    """Task run that is active in Prefect although its flow run has ended."""

    task_run_id: str
    flow_run_id: str
    stage: StageState | None = None
    """End of its stage in the journal; None if the journal has none, or it is not a stage."""


@dataclass(frozen=True)
class JobFacts:
    """Active job of this user in the scheduler's queue."""

    job_id: str
    run_id: str
    attempt: int


@dataclass(frozen=True)
class World:
    """State of history, Prefect and scheduler."""

    runs: Mapping[str, RunFacts]
    """Runs of this site that have not ended, and those that a job or a flow run refers to."""
    flow_runs: Sequence[FlowRunFacts] = ()
    task_runs: Sequence[TaskRunFacts] = ()
    jobs: Sequence[JobFacts] = ()
    """Also empty if the scheduler does not respond: then nothing is known, and nothing is done."""
    prefect_away_s: float = 0.0
    """Time since Prefect last responded, in seconds; infinite if the site has no Prefect."""
