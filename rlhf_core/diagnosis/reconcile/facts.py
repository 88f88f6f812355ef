"""Facts about runs, flow runs, task runs and jobs from which the reconciler decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from rlhf_core.schemas.attempts import RUN_ENDS, RunState, StageState

START_S = 300.0
"""Time that a flow run may count as starting or running while no process is known for it."""


class LeaseState(StrEnum):
    """State of the lease of a run."""

    FREE = "free"
    """Never taken, or given back."""
    DEAD = "dead"
    """A process of this machine that is gone."""
    SILENT = "silent"
    """A process of another machine, which has not renewed it in time."""
    LIVING = "living"
    """A running controller."""


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
    """State in the history; empty if it does not know the run."""
    holder: LeaseState = LeaseState.FREE
    owner: str = ""
    """Name of the controller, for display."""
    undriven_s: float = 0.0
    """Time without a controller, at least; in seconds."""
    num_controllers: int = 0
    """Number of controllers that took it within the last hour."""
    controller_started_at: datetime | None = None
    """Start of the newest of its controllers."""
    flow_run_id: str = ""
    """Flow run of that controller; empty where it was none."""
    attempt: int = 0
    """Newest attempt; 0 before the first."""
    jobs: Mapping[int, str] = field(default_factory=dict)
    """Scheduler's id of the job of each attempt, where the scheduler's answer is known."""
    ended_s: float = 0.0
    """Time since its end, in seconds."""
    cancel_asked: str = ""
    """Reason given to `rlhf cancel`; empty if cancellation was not requested."""
    trial_of: str = ""
    """Run whose trial it is; empty if it is not a trial."""
    promotion_due: bool = False
    """True if the run is completed and a controller has to act on its promotion: begin it, wait for the answer, or
    write the model."""
    unpublished: int = 0
    """Number of events and artifacts of an ended run that Prefect lacks because its server was away at the end."""
    missing_s: float = 0.0
    """Time for which its directory has been known to be gone, in seconds; 0 if it is there or nothing is known."""

    @property
    def ended(self) -> bool:
        """True if nothing of it is active."""
        return self.state in RUN_ENDS

    @property
    def wants_controller(self) -> bool:
        """True if a controller has something left to do; a promotion may come after the end."""
        return not self.ended or self.promotion_due


@dataclass(frozen=True)
class FlowRunFacts:
    """State of one flow run of a run in Prefect."""

    flow_run_id: str
    run_id: str
    """Run that it drives; empty if unknown (it may never have made one)."""
    state: FlowState
    changed_at: datetime
    """Time of the last change of state."""
    state_s: float
    """Time since that change, in seconds."""
    created_at: datetime
    process: ProcessState = ProcessState.UNKNOWN
    suspended: bool = False
    """True if it waits without a process, as Prefect allows."""
    attended: bool = True
    """True if a Prefect worker holds its process and cancels it on request, or if that is unknown."""

    @property
    def is_lost(self) -> bool:
        """True if Prefect takes it for alive although nothing of it is."""
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
        # On another machine only the lease tells: a controller takes it soon after it starts.
        return waits or self.process is not ProcessState.UNKNOWN or self.state_s <= START_S


@dataclass(frozen=True)
class TaskRunFacts:
    """Task run that Prefect takes for alive although its flow run has ended."""

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
    """Empty also if the scheduler does not answer: then nothing is known, and nothing is done."""
    prefect_away_s: float = 0.0
    """Time since Prefect last answered, in seconds; infinite if the site has no Prefect."""
    watched_s: float = 0.0
    """Time for which the history has answered without a break: after an outage, leases have expired that are still
    renewed."""
