"""Reports of workers and agents, in files of the run directory."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field, JsonValue

from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.base import Finite, Int32, Int64, Label, Message, Moment, Schema
from rlhf_core.schemas.failures import FailureKind

STOPPED_STATES = frozenset("Tt")
"""Letters of ``/proc/<pid>/stat`` for a process that was stopped (SIGSTOP, or a debugger)."""


class Phase(StrEnum):
    """Activity of a worker. The index of a member is written into the heartbeat slot, so members may only be
    appended."""

    SETUP = "setup"
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"
    WEIGHT_SYNC = "weight_sync"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"


class RepresentedProcess(Schema):
    """A process represented by a worker's heartbeats, for instance a rank of a trainer that it has started."""

    pid: Int64
    """Process id on the node of the worker."""
    process_state: Label
    """State of the process, as for the worker."""


class GroupPlace(Schema):
    """Position of a rank in the collectives of one of its process groups, from its flight recorder.

    Collectives are numbered from 1, in the order in which the rank entered them.
    """

    name: Label
    """Name of the group, the same on all of its ranks."""
    description: Label = ""
    """Description by the program, for instance ``default_pg``; empty without one."""
    backend: Label = ""
    """Backend of the collectives, for instance ``nccl``, each with its own numbers; empty if there were none."""
    entered: Int64 = 0
    """Number of the last collective that the rank has entered; 0 for none."""
    waits_in: Int64 | None = None
    """Number of the first collective that it has entered and not left; None if it has left all."""
    operation: Label = ""
    """That collective, or the last one if it waits in none: for instance ``gloo:all_reduce``."""
    shape: Message = ""
    """Types and shapes of its inputs to that collective."""
    members: tuple[Int32, ...] = ()
    """Ranks of the group if it waits in a collective; empty for a group of all ranks."""
    peers: tuple[Int32, ...] = ()
    """Ranks that it sends something to or receives something from, as long as that is not complete."""

    @property
    def group(self) -> str:
        """The group in words."""
        return f"process group {self.name}" + (f" ({self.description})" if self.description else "")


class RankStatus(Schema):
    """State of one worker, observed by its agent."""

    role: Role
    """Its role."""
    node: Label = ""
    """Its node."""
    rank: Int32
    """Rank in its role's process group; -1 before it is known. Ranks are reassigned at every restart."""
    local_rank: Int32
    """Index on its node."""
    pid: Int64
    """Process id on its node."""
    sequence: Int64
    """Number of heartbeats so far."""
    collectives: Int64
    """Number of collectives entered so far."""
    in_collective: bool
    """True if it is inside a collective."""
    step: Int32
    """Current training step."""
    phase: Phase
    """Its activity."""
    age_s: float
    """Seconds since its last heartbeat, by its node's monotonic clock."""
    process_state: Label
    """State letter from ``/proc/<pid>/stat``: R, S, D, T, Z; ``-`` if the process is gone."""
    speaks_for: tuple[RepresentedProcess, ...] = ()
    """Other processes represented by its heartbeats."""
    warm: bool = False
    """True if it has completed its current phase before, so that compilation and so on are done."""
    collective: Label = ""
    """Last collective in its flight recorder, for instance ``gloo:all_reduce``; empty without one."""
    collective_sequence: Int64 | None = None
    """Number of that collective in its process group."""
    collective_shape: Message = ""
    """Types and shapes of its inputs to that collective."""
    process_groups: tuple[GroupPlace, ...] = ()
    """Its positions in its process groups, the one entered last first; empty without a flight recorder."""

    @property
    def is_stopped(self) -> bool:
        """True if it, or a process that it represents, was stopped by a signal or a debugger."""
        return bool({self.process_state, *(one.process_state for one in self.speaks_for)} & STOPPED_STATES)


class AgentStatus(Schema):
    """Report that one agent publishes every two seconds (``agents/<node>.json``)."""

    node: Label
    """Name of the node."""
    node_index: Int32
    """Index of the node in the allocation, from 0."""
    attempt: Int32
    """Attempt, from 1."""
    restart: Int32
    """Restart, from 0."""
    sequence: Int64
    """Number of publications so far; a reader measures silence since its last change."""
    role: Role
    """Role whose workers are running."""
    ranks: tuple[RankStatus, ...]
    """Its workers."""
    telemetry: dict[str, float] = {}
    """Node figures: ``cpu_percent``, ``memory_used_gb``, ``workers_rss_gb`` ..."""
    longest_gaps_s: dict[str, float] = {}
    """Longest gaps between heartbeats that ended well so far, in seconds: ``role/phase`` to gap. Agent 0 has those of
    all."""
    findings: tuple[Message, ...] = ()
    """Findings from the telemetry of the nodes, as sentences for the user: imbalance, a spinning collective."""


class TelemetryLine(Schema):
    """One line of ``telemetry-<node>.jsonl``: means of the figures of a node over some seconds."""

    time: Moment
    """End of the interval (UTC), by the clock of the node."""
    seconds: Finite
    """Length of the interval in seconds."""
    figures: dict[str, float]
    """As ``AgentStatus.telemetry``, without constants (totals, limits)."""


MetricName = Annotated[str, Field(min_length=1, max_length=400)]
"""Name of a metric, as ``group/name``."""


def _with_printable_names(metrics: dict[str, float]) -> dict[str, float]:
    # Rejected instead of converted, because two different names must not become one. All at once, for speed.
    if not "".join(metrics).isprintable():
        raise ValueError("found a metric name with control characters")
    return metrics


class MetricsLine(Schema):
    """One line of ``metrics.jsonl``: all metrics of one optimizer step, already reduced over the ranks."""

    step: Int32
    """Optimizer step of the run, from 1, counted over the warm start and the main algorithm together."""
    time: Moment
    """Time at which the step ended (UTC)."""
    loop: Label = Field(validation_alias=AliasChoices("loop", "stage"))
    """Algorithm of the loop of this step; ``stage`` in lines of rlhf-flows 0.1."""
    metrics: Annotated[dict[MetricName, float], Field(max_length=2_000), AfterValidator(_with_printable_names)]
    """Name to value. Names are ``group/name``; names under ``time/`` and ``speed/`` depend on the machine, all others
    only on the spec."""


class TrainerWarning(Schema):
    """One line of ``warnings.jsonl``: a finding of a trainer about its training that does not stop the run."""

    time: Moment
    """Time of the finding (UTC)."""
    failure_kind: FailureKind
    """Kind of the corresponding failure."""
    message: Message
    """Sentence with the finding, the expectation, and the advice."""
    step: Int32
    """Optimizer step of the finding."""
    health_rule: Label = ""
    """Rule of ``[health]`` that found it; empty for other findings."""


class AgentEvent(Schema):
    """One line of ``events-<node>.jsonl``."""

    time: Moment
    """Time of writing (UTC)."""
    kind: Literal[
        "agent_waiting",  # for the agents of other nodes
        "agent_started",
        "probe",
        "prebuild",  # only in rlhf-flows 0.1, which compiled an operation of DeepSpeed
        "role_started",
        "workers_started",
        "role_ended",
        "worker_exited",
        "suspect",
        "evidence",
        "verdict",
        "peer",
        "telemetry",
        "incident",
        "decision",
        "checkpoint",
        "file",
        "killed",
        "command",
        "save_requested",
        "agent_ended",
    ]
    """Kind of the event."""
    node: Label
    """Name of the node."""
    message: Message
    """Sentence for the user."""
    role: Role | None = None
    """Role of the event, if any."""
    data: dict[str, JsonValue] = {}
    """Details."""


class SampleLine(Schema):
    """One completion sampled in training, kept for inspection (``samples.jsonl``)."""

    step: Int32
    """Optimizer step that it was sampled for."""
    prompt_uid: Label
    """Id of the prompt: a hash of its content, the number of earlier occurrences of that content in the data and, for a
    row that the step takes again, the number of the repetition."""
    sample_index: Int32
    """Index of the sample in its group, from 0."""
    seed: Int64
    """Its sampling seed."""
    weight_version: Int32
    """Number of optimizer steps of the sampling weights."""
    prompt: str
    """Text of the prompt."""
    completion: str
    """Text of the completion."""
    answer: str
    """The reference answer."""
    reward: float
    """Its reward."""
    advantage: float
    """Its advantage within its group."""


class WorkerOutcome(Schema):
    """End of one worker (``outcomes/<role>-<node>-<local>.json``); written by the worker itself if possible."""

    role: Role
    """Its role."""
    rank: Int32
    """Its rank."""
    node: Label
    """Its node."""
    ok: bool
    """True if it completed its work."""
    stopped_early: bool = False
    """True if it saved and ended on request."""
    error_type: Label = ""
    """Class of the exception, with its module."""
    message: Message = ""
    """Its message."""
    traceback: Message = ""
    """Its traceback as text."""
    damaged_checkpoint: Label = ""
    """Damaged checkpoint folder that it could not resume from."""
    health_rule: Label = ""
    """Rule of ``[health]`` that ended it."""
    step: Int32 = 0
    """Last step."""
    phase: Phase = Phase.SETUP
    """Its activity at the end."""
    time: Moment
    """Time of its end (UTC)."""


class AttemptOutcome(Schema):
    """End of an attempt (``attempts/<n>/outcome.json``): written once, last, by agent 0."""

    attempt: Int32
    """Attempt, from 1."""
    state: AttemptState
    """State at its end."""
    failure_kind: FailureKind | None = None
    """Kind of the failure, if there was one."""
    message: Message = ""
    """Sentence for the user."""
    num_restarts: Int32 = 0
    """Number of restarts in place."""
    last_step: Int32 = 0
    """Last step in ``metrics.jsonl``."""
    ended_by: Label = ""
    """Signal that ended agent 0 from outside, for instance ``SIGTERM``; the scheduler has the reason."""
    time: Moment
    """Time of writing (UTC)."""


class AgentCommand(Schema):
    """Command of the control plane to agent 0 (``commands/<k>.json``)."""

    kind: Literal["cancel", "stop_after_step"]
    """``cancel``: end at once. ``stop_after_step``: write a checkpoint and end."""
    reason: Message = ""
    """Reason, as a sentence for the user."""
    time: Moment
    """Time of the command (UTC)."""


class ReconcileNote(Schema):
    """One line of ``housekeeping.jsonl``: an action of the site daemon on the run."""

    time: Moment
    """Time of writing (UTC)."""
    kind: Label
    """Action, for instance ``adopt``."""
    message: Message
    """Reason and outcome."""
    attempt: Int32 | None = None
    """Attempt of the action."""
    data: dict[str, Message] = {}
    """Job, flow run or checkpoint of the action."""
