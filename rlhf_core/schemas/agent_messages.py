"""Messages between the agents of an attempt while it runs. None of them is stored."""

from typing import Literal

from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.inspections import Inspection
from rlhf_core.schemas.reports import RankStatus, WorkerOutcome
from rlhf_core.schemas.resources import Role


class AgreedStep(Schema):
    """Next step of all agents."""

    action: Literal["start", "again", "restart", "next_role", "end"]
    """Go on: start what comes next now; measure once more; start the workers again; go on with the next role; end the
    attempt."""
    state: AttemptState = AttemptState.FAILED
    """State in which the attempt ends."""
    message: str = ""
    """Reason for the end, in a sentence."""
    kind: FailureKind | None = None
    """Kind of failure."""
    ended_by: str = ""
    """Signal that ended it from outside."""
    num_restarts: int = 0
    """Restarts in place until then."""
    damaged: tuple[str, ...] = ()
    """Checkpoints that the workers must not go on from."""
    generations: dict[Role, int] = {}
    """Newest generation so far of each group beside the one whose restarts are counted."""
    store: str = ""
    """``host:port`` of the store in which the workers of this start meet; empty where there is one node only."""


class WorkerReport(Schema):
    """End of one worker, or the fact that it never started."""

    rank: int
    local_rank: int
    code: int | None = None
    """Exit code, negative: the signal. Null: it has not ended."""
    by_agent: bool = False
    """After the agent had begun to end the workers."""
    ended_s: float = 0.0
    """Time of the end, by the node's own clock, in seconds since the epoch."""
    last: RankStatus | None = None
    """Last observed activity."""
    outcome: WorkerOutcome | None = None
    """Outcome that the worker wrote about itself."""
    log_tail: str = ""
    """The end of its log."""


class NodeEnd(Schema):
    """End of one start of the workers on one node."""

    num_workers: int
    """Expected number of workers."""
    workers: tuple[WorkerReport, ...] = ()
    problem: str = ""
    """Traceback of what kept them from being started."""
    oom_kills: int = 0
    """Processes that the kernel killed for want of memory meanwhile."""


class WorkerExit(Schema):
    """The end of one worker that is restarted alone."""

    generation: int
    """Its start."""
    pid: int
    """Its process id on its node."""
    end: NodeEnd
    """The end of a start with this one worker."""


class GroupState(Schema):
    """Workers of one group on one node, as they stand."""

    role: Role
    """Role of the group."""
    start: int
    """Start that they belong to: generation of a group restarted together, phase of one restarted alone."""
    started: bool = False
    """True once its workers were started."""
    failed: bool = False
    """True if a worker has ended badly, or the agent has ended them."""
    ranks: tuple[RankStatus, ...] = ()
    """Its living workers."""
    inspection_number: int = 0
    """Inspection of its workers that agent 0 has asked for last; 0 for none."""
    inspections: tuple[Inspection, ...] = ()
    """Findings of it."""
    exits: tuple[WorkerExit, ...] = ()
    """Workers that have ended and were not started again; of a group that is restarted alone."""


class NodeState(Schema):
    """State of a node, sent several times a second."""

    wall_s: float
    """Time of sending by the node's own clock, in seconds since the epoch; that it changes is the sign of life."""
    groups: tuple[GroupState, ...] = ()
    """Groups of the present phase."""
    ended_by: str = ""
    """Signal that ends this agent from outside."""
    broken: str = ""
    """Fault that keeps this agent from continuing, in a sentence."""
    broken_kind: FailureKind = FailureKind.UNKNOWN
    published: int = 0
    """Readings of the telemetry so far."""
    telemetry: dict[str, float] = {}
    """The last of them."""

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """The living workers of all groups."""
        return tuple(rank for group in self.groups for rank in group.ranks)


class InspectionOrder(Schema):
    """A look at all workers that agent 0 asks for."""

    number: int = 0
    """Number of the order; 0 for none."""
    collectives: bool = False
    """True if to ask the workers for the collective they are in, too."""


class WorkerStartOrder(Schema):
    """A worker that is started again alone."""

    node_index: int
    local_rank: int
    generation: int
    """Of this start; no other start of its group has it."""


class WorkerEndOrder(Schema):
    """A worker that is ended alone."""

    node_index: int
    pid: int
    """Its process id on that node."""


class GroupOrders(Schema):
    """Orders of agent 0 about one group."""

    kill: int = -1
    """Generation whose workers are ended; of a group that is restarted together."""
    start_workers: tuple[WorkerStartOrder, ...] = ()
    """All starts of single workers so far, in order; of a group that is restarted alone."""
    end_workers: tuple[WorkerEndOrder, ...] = ()
    """All ends of single workers so far."""
    collect: int = 0
    """Number of requests for evidence so far."""
    collect_ranks: tuple[int, ...] = ()
    """Ranks whose evidence the last request wants; empty for all."""
    inspect: InspectionOrder = InspectionOrder()
    """Inspection of all workers."""


class Orders(Schema):
    """Orders of agent 0 to all agents."""

    cancel: str = ""
    """The user ends the run: why."""
    stop: str = ""
    """Save and end: who asked."""
    saves: int = 0
    """Number of requests to save and go on so far."""
    groups: dict[Role, GroupOrders] = {}
    """By the role of the group, for the present phase."""
    over: AgreedStep | None = None
    """The attempt ends now."""


class Ready(Schema):
    """A node has come so far: no more is to be said."""


class Collected(Schema):
    """A node's evidence is saved; this is how its workers stood afterwards."""

    ranks: tuple[RankStatus, ...]
