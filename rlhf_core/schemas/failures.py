"""Failures, their incidents, and the decisions about them."""

from enum import StrEnum

from pydantic import JsonValue

from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import Finite, Int32, Int64, Label, Message, Moment, Schema


class FailureKind(StrEnum):
    """Kind of failure. The sentence of each member is part of docs/failures.md."""

    PREEMPTION = "preemption"
    """The scheduler reclaimed the nodes."""
    NO_NODES = "no_nodes"
    """The nodes of the job did not start, as when a cloud has no capacity."""
    TIME_LIMIT = "time_limit"
    """The job reached its time limit."""
    NODE_UNFIT = "node_unfit"
    """A node did not pass the checks before training: slow, broken, or different from the others."""
    NODE_LOST = "node_lost"
    """A node was lost: down, drained or unreachable."""
    GPU_HARDWARE = "gpu_hardware"
    """A GPU failed: ECC error, XID, or fell off the bus."""
    COLLECTIVE_HANG = "collective_hang"
    """A collective timed out, or a rank never entered it."""
    COLLECTIVE_MISMATCH = "collective_mismatch"
    """Ranks entered different collectives, or the same one with different shapes, types or metrics: a bug in the
    code."""
    NETWORK = "network"
    """A connection between ranks broke, and the responsible side is unknown."""
    HANG = "hang"
    """A worker stopped sending heartbeats outside a collective: endless loop, stopped process, blocked file system."""
    WORKER_KILLED = "worker_killed"
    """A worker was ended by a signal without a cause in the job (SIGKILL from outside)."""
    AGENT_KILLED = "agent_killed"
    """The agent of a node and its workers ended without an outcome."""
    CUDA_OOM = "cuda_oom"
    """The GPU ran out of memory."""
    ILLEGAL_ACCESS = "illegal_access"
    """A CUDA kernel accessed memory illegally, or an assertion on the device failed."""
    HOST_OOM = "host_oom"
    """The operating system or the scheduler killed a process for using too much main memory."""
    NON_FINITE = "non_finite"
    """Loss, gradient norm or a log-probability of the policy became NaN or infinite."""
    DEGENERATE_RL = "degenerate_rl"
    """Training no longer learns anything: no gradient, identical completions."""
    DISK_FULL = "disk_full"
    """A file system has no free space or inodes."""
    FILE_SYSTEM = "file_system"
    """A file system did not respond, is read-only, or lost a file handle."""
    IMPORT_ERROR = "import_error"
    """A package is missing or has an incompatible version."""
    CONFIG = "config"
    """A setting is wrong in a way that only became apparent at run time."""
    SHAPE = "shape"
    """The shapes of tensors do not match."""
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    """A checkpoint is damaged (a wrong checksum, a missing or unreadable file) or does not match this run."""
    DATA = "data"
    """A data file is missing or malformed."""
    RENDEZVOUS = "rendezvous"
    """The ranks did not find each other: a port in use, an unknown address, or a late node."""
    ENGINE = "engine"
    """A rollout engine failed."""
    REWARD_FUNCTION = "reward_function"
    """A reward function raised an error or returned something that is not a reward, or a tool or an environment
    failed."""
    INCOMPLETE = "incomplete"
    """An external trainer ended without an error before its last step, or started from scratch instead of resuming from
    its checkpoint."""
    USER_CANCEL = "user_cancel"
    """The user cancelled the run."""
    UNKNOWN = "unknown"
    """No rule matched; the fingerprint shows whether the failure was seen before."""


NODE_FAILURES = frozenset(
    {
        FailureKind.NODE_LOST,
        FailureKind.NODE_UNFIT,
        FailureKind.GPU_HARDWARE,
        FailureKind.COLLECTIVE_HANG,
        FailureKind.NETWORK,
        FailureKind.HANG,
        FailureKind.ILLEGAL_ACCESS,
        FailureKind.FILE_SYSTEM,
        FailureKind.WORKER_KILLED,
        FailureKind.AGENT_KILLED,
    }
)
"""Failures that count against the suspected nodes. The others are caused by the code, the config or the user."""


class Action(StrEnum):
    """Responses to an incident: the rungs of the recovery ladder, from the bottom."""

    CONTINUE = "continue"
    """Do nothing, because enough workers are still running or the incident is only a warning."""
    RESTART_WORKERS = "restart_workers"
    """Restart only the failed workers of a group; all others keep running."""
    RESTART_IN_PLACE = "restart_in_place"
    """Restart the workers within the same allocation."""
    NEW_ATTEMPT = "new_attempt"
    """Submit a new job that resumes from the last complete checkpoint."""
    STOP = "stop"
    """End the run with the diagnosis."""

    @property
    def leaves_running(self) -> bool:
        """True if the attempt continues with the running workers."""
        return self in (Action.CONTINUE, Action.RESTART_WORKERS)


class DecidedBy(StrEnum):
    """Decision maker: agent 0 inside an allocation, the controller between allocations."""

    AGENT = "agent"
    CONTROLLER = "controller"


class Incident(Schema):
    """One failure or warning (``incidents/<n>.json``)."""

    attempt: Int32
    """Attempt, from 1."""
    restart: Int32
    """Restart, from 0."""
    number: Int32 = 0
    """Number among the attempt's incidents, from 1; 0 if the controller found it, and in version 0.1."""
    role: Role | None = None
    """Role of the affected group; null if it concerns a node or the whole attempt."""
    failure_kind: FailureKind
    """Kind of the failure."""
    message: Message
    """One or two sentences with the finding, the place, and the remedy."""
    phase: Label = ""
    """Phase of the first suspect; empty if unknown."""
    step: Int32 | None = None
    """Training step; null if unknown."""
    suspect_ranks: tuple[Int32, ...] = ()
    """Suspected ranks; empty if no single rank is."""
    suspect_nodes: tuple[Label, ...] = ()
    """Their nodes."""
    collective: Label = ""
    """Collective in which ranks hung or disagreed, for instance ``gloo:all_reduce``; empty if none is known."""
    collective_sequence: Int64 | None = None
    """Number of that collective in its process group."""
    detected_after_s: Finite | None = None
    """Seconds from the last heartbeat to the detection."""
    damaged_checkpoint: Label = ""
    """Checkpoint folder that was found damaged."""
    health_rule: Label = ""
    """Rule of ``[health]`` that found it; empty for other failures."""
    is_undecided: bool = False
    """True if the kind is not proven: it rests only on the text of a log or an error, for instance."""
    seen_at: Moment
    """Time of its detection (UTC)."""
    fingerprint: Label = ""
    """Hash of the error without its numbers; equal for the same fault."""
    evidence_dir: Message = ""
    """Folder with the evidence, relative to the run directory."""


class Decision(Schema):
    """Response to an incident. Always written before it is executed (``incidents/<n>.decision.json``)."""

    attempt: Int32
    """Attempt, from 1."""
    restart: Int32
    """Restart, from 0."""
    number: Int32 = 0
    """Number of the incident; 0 for an incident without one."""
    action: Action
    """Rung of the ladder."""
    reason: Message
    """Reason, as a sentence."""
    decided_by: DecidedBy
    """Agent 0 or the controller."""
    decided_at: Moment
    """Time of the decision (UTC)."""
    delay_s: Finite = 0.0
    """Back-off before acting, in seconds."""
    excluded_nodes: tuple[Label, ...] = ()
    """Nodes to exclude from the next attempt."""
    config_diff: dict[str, JsonValue] = {}
    """Settings changed for the next attempt: dotted name to new value."""
    resume_checkpoint: Label = ""
    """Checkpoint folder to resume from; empty for the newest complete one."""


class NodeCleared(Schema):
    """Statement of a user that a node is repaired: earlier strikes no longer count."""

    node: Label
    time: Moment
    by: Label
    """Name of the user, with the operating system's user in brackets."""
    reason: Message
