"""Messages between the agents of an attempt while it runs. None of them is stored."""

from typing import Literal

from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.looks import RankLook
from rlhf_core.schemas.reports import RankStatus, WorkerOutcome


class Step(Schema):
    """Next step of all agents."""

    action: Literal["start", "again", "restart", "next_role", "end"]
    """Next action: start the role that was agreed; measure once more; start the workers again; start the next role;
    end the attempt."""
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
    store: str = ""
    """``host:port`` of the store in which the workers of this start meet; empty where there is one node only."""


class NodeState(Schema):
    """State of a node, published several times a second."""

    wall_s: float
    """Time of publication, by the node's own clock, in seconds since the epoch; its change is the sign of life."""
    restart: int
    """Restart that the node is at."""
    started: bool = False
    """True once its workers were started."""
    failed: bool = False
    """True if a worker has ended badly, or the agent has ended them."""
    ended_by: str = ""
    """Signal that ends this agent from outside."""
    broken: str = ""
    """Fault that keeps this agent from continuing, in a sentence."""
    broken_kind: FailureKind = FailureKind.UNKNOWN
    ranks: tuple[RankStatus, ...] = ()
    """Its living workers."""
    published: int = 0
    """Readings of the telemetry so far."""
    telemetry: dict[str, float] = {}
    """The last of them."""
    look_number: int = 0
    """Last observation of its workers that agent 0 requested; 0 for none."""
    looks: tuple[RankLook, ...] = ()
    """Findings of it."""


class LookOrder(Schema):
    """Observation of all workers that agent 0 requests."""

    number: int = 0
    """Number of the order; 0 for none."""
    collectives: bool = False
    """True if to ask the workers for the collective they are in, too."""


class Orders(Schema):
    """Current orders of agent 0 to all agents."""

    cancel: str = ""
    """The user ends the run: why."""
    stop: str = ""
    """Save and end: who asked."""
    saves: int = 0
    """Number of requests so far to save and go on."""
    kill: int = -1
    """Restart whose workers are to be ended."""
    collect: int = 0
    """Number of requests so far to collect evidence."""
    look: LookOrder = LookOrder()
    """Observation of all workers."""
    over: Step | None = None
    """The attempt ends now."""


class Ready(Schema):
    """A node has come so far: no more is to be said."""


class Collected(Schema):
    """A node's evidence is saved; this is how its workers stood afterwards."""

    ranks: tuple[RankStatus, ...]


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
