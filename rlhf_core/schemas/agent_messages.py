"""What the agents of an attempt tell each other while it runs. Nothing of it is kept."""

from typing import Literal

from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.inspections import Inspection
from rlhf_core.schemas.reports import RankStatus, WorkerOutcome


class Step(Schema):
    """What all agents do next."""

    action: Literal["start", "again", "restart", "next_role", "end"]
    """Go on: start what comes next now; measure once more; start the workers again; go on with the next role; end the
    attempt."""
    state: AttemptState = AttemptState.FAILED
    """How the attempt ends."""
    message: str = ""
    """Why it ends, in a sentence for a person."""
    kind: FailureKind | None = None
    """What went wrong."""
    ended_by: str = ""
    """Signal that ended it from outside."""
    num_restarts: int = 0
    """Restarts in place until then."""
    damaged: tuple[str, ...] = ()
    """Checkpoints that the workers must not go on from."""
    store: str = ""
    """``host:port`` of the store in which the workers of this start meet; empty where there is one node only."""


class NodeState(Schema):
    """How a node stands, several times a second."""

    wall_s: float
    """When it was told, by the node's own clock, in seconds since the epoch; that it changes is the sign of life."""
    restart: int
    """Restart that the node is at."""
    started: bool = False
    """Whether its workers were started."""
    failed: bool = False
    """Whether a worker has ended badly, or the agent has ended them."""
    ended_by: str = ""
    """Signal that ends this agent from outside."""
    broken: str = ""
    """What keeps this agent from going on, in a sentence for a person."""
    broken_kind: FailureKind = FailureKind.UNKNOWN
    ranks: tuple[RankStatus, ...] = ()
    """Its living workers."""
    published: int = 0
    """Readings of the telemetry so far."""
    telemetry: dict[str, float] = {}
    """The last of them."""
    inspection_number: int = 0
    """Look at its workers that agent 0 has asked for last; 0 for none."""
    inspections: tuple[Inspection, ...] = ()
    """Findings of it."""


class InspectionOrder(Schema):
    """A look at all workers that agent 0 asks for."""

    number: int = 0
    """Which; 0 for none."""
    collectives: bool = False
    """True if to ask the workers for the collective they are in, too."""


class Orders(Schema):
    """What agent 0 wants of all agents just now."""

    cancel: str = ""
    """The user ends the run: why."""
    stop: str = ""
    """Save and end: who asked."""
    saves: int = 0
    """How often to save and go on was asked."""
    kill: int = -1
    """Restart whose workers are to be ended."""
    collect: int = 0
    """How often evidence was asked for."""
    inspect: InspectionOrder = InspectionOrder()
    """Look at all workers."""
    over: Step | None = None
    """The attempt ends now."""


class Ready(Schema):
    """A node has come so far: no more is to be said."""


class Collected(Schema):
    """A node's evidence is saved; this is how its workers stood afterwards."""

    ranks: tuple[RankStatus, ...]


class WorkerReport(Schema):
    """How one worker ended, or that it never started."""

    rank: int
    local_rank: int
    code: int | None = None
    """Exit code, negative: the signal. Null: it has not ended."""
    by_agent: bool = False
    """After the agent had begun to end the workers."""
    ended_s: float = 0.0
    """When, by the node's own clock, in seconds since the epoch."""
    last: RankStatus | None = None
    """What it was last seen doing."""
    outcome: WorkerOutcome | None = None
    """What it wrote about itself."""
    log_tail: str = ""
    """The end of its log."""


class NodeEnd(Schema):
    """How one start of the workers ended on one node."""

    num_workers: int
    """How many there should have been."""
    workers: tuple[WorkerReport, ...] = ()
    problem: str = ""
    """Traceback of what kept them from being started."""
    oom_kills: int = 0
    """Processes that the kernel killed for want of memory meanwhile."""
