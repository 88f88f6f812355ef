"""Failures, the incidents that show them, and the decisions about these."""

from enum import StrEnum

from pydantic import JsonValue

from rlhf_core.schemas.base import Finite, Int32, Int64, Label, Message, Moment, Schema
from rlhf_core.schemas.resources import Role


class FailureKind(StrEnum):
    """Reason why something ended that should not have. One sentence per member; docs/failures.md is made from them."""

    PREEMPTION = "preemption"
    """The scheduler took the nodes back."""
    TIME_LIMIT = "time_limit"
    """The job reached its time limit."""
    NODE_UNFIT = "node_unfit"
    """A node did not pass the checks before training: slow, broken, or different from the others."""
    NODE_LOST = "node_lost"
    """A node went away: down, drained, unreachable."""
    GPU_HARDWARE = "gpu_hardware"
    """A GPU failed: ECC, XID, fell off the bus."""
    COLLECTIVE_HANG = "collective_hang"
    """A collective timed out, or a rank never entered it."""
    COLLECTIVE_MISMATCH = "collective_mismatch"
    """Ranks entered different collectives, or the same one with other shapes, types or metrics: a bug in the code."""
    NETWORK = "network"
    """A connection between ranks broke, and nothing shows which side was to blame."""
    HANG = "hang"
    """A worker stopped beating outside a collective: endless loop, stopped process, blocked file system."""
    WORKER_KILLED = "worker_killed"
    """A worker was ended by a signal that nothing in the job explains (SIGKILL from outside)."""
    AGENT_KILLED = "agent_killed"
    """The agent of a node ended without an outcome, and its workers with it."""
    CUDA_OOM = "cuda_oom"
    """The GPU ran out of memory."""
    ILLEGAL_ACCESS = "illegal_access"
    """A CUDA kernel touched memory it must not, or an assertion on the device failed."""
    HOST_OOM = "host_oom"
    """The operating system or the scheduler killed a process for using too much main memory."""
    NON_FINITE = "non_finite"
    """Loss or gradient norm became NaN or infinite."""
    DEGENERATE_RL = "degenerate_rl"
    """Training no longer learns anything: no gradient, identical completions."""
    DISK_FULL = "disk_full"
    """A file system has no room or no inodes left."""
    FILE_SYSTEM = "file_system"
    """A file system did not answer, is read-only, or lost a file handle."""
    IMPORT_ERROR = "import_error"
    """A package is missing or has an incompatible version."""
    CONFIG = "config"
    """A setting is wrong in a way that only became apparent at run time."""
    SHAPE = "shape"
    """The shapes of tensors do not match."""
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    """A checkpoint is damaged (a wrong checksum, a missing or unreadable file), or does not fit this run."""
    DATA = "data"
    """A data file is missing or malformed."""
    RENDEZVOUS = "rendezvous"
    """The ranks did not find each other: the port was taken, an address unknown, or a node too late."""
    ENGINE = "engine"
    """A rollout engine failed."""
    REWARD_FUNCTION = "reward_function"
    """A reward function raised an error or returned something that is not a reward."""
    INCOMPLETE = "incomplete"
    """A trainer of another project ended without an error before its last step, or started over instead of resuming
    from its checkpoint."""
    USER_CANCEL = "user_cancel"
    """The user cancelled the run."""
    UNKNOWN = "unknown"
    """No rule matched; the fingerprint shows whether the failure was seen before."""


class Action(StrEnum):
    """Answers to an incident: the rungs of the recovery ladder, from the bottom."""

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
        """True if the attempt goes on with the workers that are at work."""
        return self in (Action.CONTINUE, Action.RESTART_WORKERS)


class DecidedBy(StrEnum):
    """The one that decides: agent 0 inside an allocation, the controller between allocations."""

    AGENT = "agent"
    CONTROLLER = "controller"


class Incident(Schema):
    """One thing that went wrong (``incidents/<n>.json``)."""

    attempt: Int32
    """Attempt it happened in, from 1."""
    restart: Int32
    """Restart it happened in, from 0."""
    number: Int32 = 0
    """Place among the attempt's incidents, from 1; 0 where the controller found it, and in those of version 0.1."""
    role: Role | None = None
    """Role of the group it happened in; null when it is about a node or the whole attempt."""
    failure_kind: FailureKind
    """Kind of the failure."""
    message: Message
    """One or two sentences: what was seen, where, and what to do."""
    phase: Label = ""
    """Phase of the first suspect; empty when not known."""
    step: Int32 | None = None
    """Training step it happened at; null when not known."""
    suspect_ranks: tuple[Int32, ...] = ()
    """Ranks to blame; empty when no single one is."""
    suspect_nodes: tuple[Label, ...] = ()
    """Their nodes."""
    collective: Label = ""
    """The collective it hung in or disagreed about, for instance ``gloo:all_reduce``; empty when none is known."""
    collective_sequence: Int64 | None = None
    """Number of that collective in its process group."""
    detected_after_s: Finite | None = None
    """Seconds from the last sign of life to detection."""
    damaged_checkpoint: Label = ""
    """Checkpoint folder that was found damaged."""
    health_rule: Label = ""
    """Rule of ``[health]`` that has found it; empty of other failures."""
    is_undecided: bool = False
    """Only the words of a log or of an error say what it was, and nothing proves it."""
    seen_at: Moment
    """Time of its detection (UTC)."""
    fingerprint: Label = ""
    """Hash of the error with its numbers removed: the same fault gives the same fingerprint."""
    evidence_dir: Message = ""
    """Folder with the evidence, relative to the run directory."""


class Decision(Schema):
    """Answer to an incident. Written before it is acted on, always
    (``incidents/<n>.decision.json``)."""

    attempt: Int32
    """Attempt it is about, from 1."""
    restart: Int32
    """Restart it is about, from 0."""
    number: Int32 = 0
    """Number of the incident it is about; 0 for one without."""
    action: Action
    """The rung of the ladder."""
    reason: Message
    """The reason, in a sentence."""
    decided_by: DecidedBy
    """Agent 0 or the controller."""
    decided_at: Moment
    """Time of the decision (UTC)."""
    delay_s: Finite = 0.0
    """Back-off before acting, in seconds."""
    excluded_nodes: tuple[Label, ...] = ()
    """Nodes that the next attempt must not get."""
    config_diff: dict[str, JsonValue] = {}
    """Settings that the next attempt changes: dotted name to new value."""
    resume_checkpoint: Label = ""
    """Checkpoint folder to go on from; empty for the newest complete one."""


class NodeCleared(Schema):
    """Statement of a user that a node is repaired: what came up against it until then no longer counts."""

    node: Label
    time: Moment
    by: Label
    """Name of the person who said so, with the operating system's user in brackets."""
    reason: Message
