"""Messages between the agents of a running attempt. They are not stored."""

from typing import Literal

from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.inspections import Inspection
from rlhf_core.schemas.reports import RankStatus, WorkerOutcome


class AgreedStep(Schema):
    """Next step of all agents."""

    action: Literal["start", "again", "restart", "next_role", "end"]
    """In order: start the next part now; measure once more; restart the workers; continue with the next role; end the
    attempt."""
    state: AttemptState = AttemptState.FAILED
    """Final state of the attempt."""
    message: str = ""
    """Reason for the end, in a sentence."""
    kind: FailureKind | None = None
    """Kind of failure."""
    ended_by: str = ""
    """Signal that ended it from outside."""
    num_restarts: int = 0
    """Restarts in place so far."""
    damaged: tuple[str, ...] = ()
    """Checkpoints that the workers must not resume from."""
    generations: dict[Role, int] = {}
    """Newest generation so far of each group other than the one with counted restarts."""
    store: str = ""
    """``host:port`` of the rendezvous store of the workers of this start; empty on a single node."""


class WorkerReport(Schema):
    """End of one worker, or of one that never started."""

    rank: int
    local_rank: int
    code: int | None = None
    """Exit code, negative for a signal; null if it has not ended."""
    by_agent: bool = False
    """True if it ended after the agent had started to end the workers."""
    ended_s: float = 0.0
    """Time of the end, by the node's clock, in seconds since the epoch."""
    last: RankStatus | None = None
    """Last observed activity."""
    outcome: WorkerOutcome | None = None
    """Outcome written by the worker itself."""
    log_tail: str = ""
    """The end of its log."""


class NodeEnd(Schema):
    """End of one start of the workers on one node."""

    num_workers: int
    """Expected number of workers."""
    workers: tuple[WorkerReport, ...] = ()
    problem: str = ""
    """Traceback of the error that prevented their start."""
    oom_kills: int = 0
    """Processes that the kernel's OOM killer ended meanwhile."""
    num_left: int = 0
    """Number of processes that have not ended although they were killed."""


class WorkerExit(Schema):
    """End of one worker that is restarted alone."""

    generation: int
    """Generation of its start."""
    pid: int
    """Its process id on its node; 0 if it could not be started."""
    end: NodeEnd
    """End of a start with this single worker."""


class GroupState(Schema):
    """State of the workers of one group on one node."""

    role: Role
    """Role of the group."""
    start: int
    """Start of the workers: generation of a group that is restarted together, phase of one restarted alone."""
    started: bool = False
    """True once its workers have started."""
    failed: bool = False
    """True if a worker has failed or the agent has ended them."""
    ranks: tuple[RankStatus, ...] = ()
    """Its running workers."""
    inspection_number: int = 0
    """Last inspection of its workers that agent 0 has requested; 0 for none."""
    inspections: tuple[Inspection, ...] = ()
    """Results of that inspection."""
    exits: tuple[WorkerExit, ...] = ()
    """Workers that have ended and were not restarted, in a group whose workers are restarted alone."""


class NodeState(Schema):
    """State of a node, sent several times a second."""

    wall_s: float
    """Time of sending by the node's clock, in seconds since the epoch; its changes are the heartbeat."""
    groups: tuple[GroupState, ...] = ()
    """Groups of the current phase."""
    ended_by: str = ""
    """Signal that ends this agent from outside."""
    broken: str = ""
    """Fault that prevents this agent from continuing, in a sentence."""
    broken_kind: FailureKind = FailureKind.UNKNOWN
    published: int = 0
    """Number of telemetry readings so far."""
    telemetry: dict[str, float] = {}
    """Last telemetry reading."""

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """Running workers of all groups."""
        return tuple(rank for group in self.groups for rank in group.ranks)


class InspectionOrder(Schema):
    """Inspection of all workers, requested by agent 0."""

    number: int = 0
    """Number of the order; 0 for none."""
    collectives: bool = False
    """True to also query the workers for their current collective."""


class WorkerStartOrder(Schema):
    """Order to restart a single worker."""

    node_index: int
    local_rank: int
    generation: int
    """Generation of this start, unique in its group."""


class WorkerEndOrder(Schema):
    """Order to end a single worker."""

    node_index: int
    pid: int
    """Its process id on that node."""


class NewestStep(Schema):
    """Newest step of the workers of a group that is restarted together."""

    generation: int = -1
    """Generation of these workers: a restart may begin at an earlier step."""
    step: int = 0


class GroupOrders(Schema):
    """Orders of agent 0 about one group."""

    kill: int = -1
    """Generation of the workers to end, in a group that is restarted together."""
    start_workers: tuple[WorkerStartOrder, ...] = ()
    """All starts of single workers so far, in order, in a group whose workers are restarted alone."""
    end_workers: tuple[WorkerEndOrder, ...] = ()
    """All ends of single workers so far."""
    collect: int = 0
    """Number of requests for evidence so far."""
    collect_ranks: tuple[int, ...] = ()
    """Ranks in the last request for evidence; empty for all."""
    inspect: InspectionOrder = InspectionOrder()
    """Inspection of all workers."""
    newest: NewestStep = NewestStep()
    """Newest step of any worker, to be shown to all: some see no steps themselves."""


class Orders(Schema):
    """Orders of agent 0 to all agents."""

    cancel: str = ""
    """Reason if the user cancels the run."""
    stop: str = ""
    """Requester if the run is to save and end."""
    groups: dict[Role, GroupOrders] = {}
    """Orders by the role of the group, for the current phase."""
    over: AgreedStep | None = None
    """Set if the attempt ends now."""


class Ready(Schema):
    """Signal that a node has reached this point, without further data."""


class Collected(Schema):
    """State of a node's workers after its evidence was saved."""

    ranks: tuple[RankStatus, ...]
