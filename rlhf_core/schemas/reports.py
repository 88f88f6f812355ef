"""Reports of workers and agents on themselves, in files of the run directory."""

from enum import StrEnum
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, AliasChoices, Field, JsonValue

from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.base import (
    Finite,
    Int32,
    Int64,
    Label,
    Message,
    Moment,
    Schema,
)
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.resources import Role

STOPPED_STATES = frozenset("Tt")
"""Letters of ``/proc/<pid>/stat`` for a process that was stopped (SIGSTOP, or a debugger)."""


class Phase(StrEnum):
    """Activity of a worker. The order of members is the number written into its heartbeat slot: append only."""

    SETUP = "setup"
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"
    WEIGHT_SYNC = "weight_sync"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"


class SpokenFor(Schema):
    """A process that a worker beats for: a rank of a trainer that it has started, for instance."""

    pid: Int64
    """Process id on the node of the worker."""
    process_state: Label
    """As that of the worker."""


class RankStatus(Schema):
    """One worker as its agent sees it."""

    role: Role
    """Its role."""
    node: Label = ""
    """Its node."""
    rank: Int32
    """Rank in its role's process group; -1 before it is known. Ranks are dealt anew at every restart."""
    local_rank: Int32
    """Index on its node."""
    pid: Int64
    """Process id on its node."""
    sequence: Int64
    """Beats so far; a growing number is the sign of life."""
    collectives: Int64
    """Collectives entered so far."""
    in_collective: bool
    """True if it is inside one."""
    step: Int32
    """Training step it is at."""
    phase: Phase
    """Its activity."""
    age_s: float
    """Seconds since its last beat, by its node's monotonic clock."""
    process_state: Label
    """State letter from ``/proc/<pid>/stat``: R, S, D, T, Z; ``-`` when the process is gone."""
    speaks_for: tuple[SpokenFor, ...] = ()
    """Other processes whose progress its beats show."""
    warm: bool = False
    """True if it has been through its present phase before: compilation and the like are behind it."""
    collective: Label = ""
    """Collective that it entered last by its flight recorder, for instance ``gloo:all_reduce``; empty when there is
    none."""
    collective_sequence: Int64 | None = None
    """Number of that collective in its process group, from the flight recorder."""
    collective_shape: Message = ""
    """Types and shapes of what it brought to it, from the flight recorder."""

    @property
    def is_stopped(self) -> bool:
        """True if it, or a process that it speaks for, was stopped by a signal or a debugger."""
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
    """Publications so far; the reader judges silence by when it last saw this change."""
    role: Role
    """Role whose workers are running."""
    ranks: tuple[RankStatus, ...]
    """Its workers."""
    telemetry: dict[str, float] = {}
    """Node figures: ``cpu_percent``, ``memory_used_gb``, ``workers_rss_gb`` ..."""
    longest_gaps_s: dict[str, float] = {}
    """Longest gaps between beats that ended well so far, in seconds: ``role/phase`` to gap. Agent 0 knows all."""
    findings: tuple[Message, ...] = ()
    """Findings of the telemetry of the nodes, in sentences for a person: imbalance, a spinning collective."""


class TelemetryLine(Schema):
    """One line of ``telemetry-<node>.jsonl``: means of the figures of a node over some seconds."""

    time: Moment
    """End of these seconds (UTC), by the clock of the node."""
    seconds: Finite
    """Their duration in seconds."""
    figures: dict[str, float]
    """As ``AgentStatus.telemetry``, without what does not change (totals, limits)."""


MetricName = Annotated[str, Field(min_length=1, max_length=400)]
"""Name of a metric, as ``group/name``."""


def _with_printable_names(metrics: dict[str, float]) -> dict[str, float]:
    # Refused and not made storable: two names that differ must not become one. All at once, for there are many lines.
    if not "".join(metrics).isprintable():
        raise ValueError("found a name of a metric with control characters")
    return metrics


class MetricsLine(Schema):
    """One line of ``metrics.jsonl``: all metrics of one optimizer step, already reduced over the ranks."""

    step: Int32
    """Optimizer step of the run, from 1, counted over the warm start and the main algorithm together."""
    time: Moment
    """Time at which the step ended (UTC)."""
    loop: Label = Field(validation_alias=AliasChoices("loop", "stage"))
    """Algorithm of the loop that made the step. Lines of rlhf-flows 0.1 have it under ``stage``."""
    metrics: Annotated[dict[MetricName, float], Field(max_length=2_000), AfterValidator(_with_printable_names)]
    """Name to value. Names are ``group/name``; names under ``time/`` and ``speed/`` depend on the machine, all others
    only on the spec."""


class TrainerWarning(Schema):
    """One line of ``warnings.jsonl``: a finding of a trainer about its own training that leaves the run going."""

    time: Moment
    """Time of the finding (UTC)."""
    failure_kind: FailureKind
    """Kind that it would be as a failure."""
    message: Message
    """Sentence with the finding, the expectation, and the advice."""
    step: Int32
    """Optimizer step it was found at."""
    health_rule: Label = ""
    """Rule of ``[health]`` that has found it; empty of other findings."""


class AgentEvent(Schema):
    """One line of ``events-<node>.jsonl``."""

    time: Moment
    """Time of writing (UTC)."""
    kind: Literal[
        "agent_started",
        "probe",
        "prebuild",  # of rlhf-flows 0.1, which compiled an operation of DeepSpeed's
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
    """A sentence for a person."""
    role: Role | None = None
    """Role it is about, if one."""
    data: dict[str, JsonValue] = {}
    """Details."""


class SampleLine(Schema):
    """One completion made in training, kept for reading (``samples.jsonl``)."""

    step: Int32
    """Optimizer step it was made for."""
    prompt_uid: Label
    """Identity of the prompt: a hash of its content and of how often that content came before in the data."""
    sample_index: Int32
    """Index of the sample in its group, from 0."""
    seed: Int64
    """Its sampling seed."""
    weight_version: Int32
    """Optimizer steps the sampling weights had seen."""
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
    """End of one worker (``outcomes/<role>-<node>-<local>.json``); written by the worker, if it still can."""

    role: Role
    """Its role."""
    rank: Int32
    """Its rank."""
    node: Label
    """Its node."""
    ok: bool
    """True if it did what it was there for."""
    stopped_early: bool = False
    """It saved and ended because it was asked to."""
    error_type: str = ""
    """Class of the exception, with its module."""
    message: str = ""
    """Its message."""
    traceback: str = ""
    """Its traceback as text."""
    damaged_checkpoint: Label = ""
    """Checkpoint folder that it could not go on from, because it is damaged."""
    health_rule: Label = ""
    """Rule of ``[health]`` that has ended it."""
    step: Int32 = 0
    """Step it had reached."""
    phase: Phase = Phase.SETUP
    """Its activity at the end."""
    time: Moment
    """Time of its end (UTC)."""


class AttemptOutcome(Schema):
    """End of an attempt (``attempts/<n>/outcome.json``): once, last, by agent 0."""

    attempt: Int32
    """Attempt, from 1."""
    state: AttemptState
    """State at its end."""
    failure_kind: FailureKind | None = None
    """Kind of the failure, if there was one."""
    message: Message = ""
    """A sentence for a person."""
    num_restarts: Int32 = 0
    """Restarts in place that were made."""
    last_step: Int32 = 0
    """Last step that is in ``metrics.jsonl``."""
    ended_by: Label = ""
    """Signal that ended agent 0 from outside, for instance ``SIGTERM``; why it came is for the scheduler to say."""
    time: Moment
    """Time of writing (UTC)."""


class EvaluationSample(Schema):
    """One scored completion of an evaluation."""

    prompt_uid: Label
    """Identity of the prompt."""
    sample_index: Int32
    """Index of the sample of that prompt, from 0."""
    prompt: str
    """Text of the prompt."""
    completion: str
    """Text of the completion."""
    answer: str
    """The reference answer."""
    score: float
    """Score that the scorer gave it."""


EvaluationName = Literal["greedy", "sampled", "preference"]
"""Kinds of evaluation: of completions that are made greedily or sampled, or of how the model ranks pairs."""
EVALUATIONS: tuple[EvaluationName, ...] = get_args(EvaluationName)
"""All of them, in the order in which they are shown."""


class EvaluationReport(Schema):
    """One evaluation (``evaluations/<when>-<name>.json``)."""

    name: EvaluationName
    """Choice of completions, or `preference` where pairs were ranked."""
    when: Literal["before", "after"]
    """Before the main algorithm (after the warm start), or after training."""
    metric: Label
    """Measure, for instance ``exact_match``."""
    value: float
    """Mean score over all samples."""
    ci_low: float
    """Lower bound of the confidence interval of ``value``."""
    ci_high: float
    """Upper bound."""
    num_prompts: Int32
    """Held-out prompts."""
    num_samples: Int32
    """Completions scored."""
    checkpoint_step: Int32
    """Optimizer steps the weights had seen."""
    seconds: Finite
    """Duration in seconds."""
    time: Moment
    """Time of its end (UTC)."""
    samples: tuple[EvaluationSample, ...]
    """The sample table; at most ``evaluate.keep_samples`` rows, the first by prompt order."""


class AgentCommand(Schema):
    """An order from the control plane to agent 0 (``commands/<k>.json``)."""

    kind: Literal["cancel", "save", "stop_after_step"]
    """``cancel``: end at once. ``save``: write a checkpoint now and go on. ``stop_after_step``: write one and end."""
    reason: Message = ""
    """Reason, in a sentence for a person."""
    time: Moment
    """Time at which it was given (UTC)."""


class ReconcileNote(Schema):
    """One line of ``housekeeping.jsonl``: what the site daemon did about the run."""

    time: Moment
    """Time of writing (UTC)."""
    kind: Label
    """Action, for instance ``adopt``."""
    message: Message
    """Reason and outcome."""
    attempt: Int32 | None = None
    """Attempt that it was about."""
    data: dict[str, Message] = {}
    """Job, flow run or checkpoint that it was about."""
