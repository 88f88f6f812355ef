"""Events that the controller of a run writes down before they count (``control.jsonl``).

The database is an index of the run directory: every row can be made again from files. What only the control plane knows
(states, stages, checks, attempts, its own decisions) therefore goes into this journal first, and reaches the database
by the same ingestion as everything else.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.schemas.attempts import AttemptState, PromotionState, RunState, StageName, StageState
from rlhf_core.schemas.base import Int32, Int64, Label, Message, Moment, Schema
from rlhf_core.schemas.checks import CheckResult
from rlhf_core.schemas.failures import Decision, FailureKind, Incident
from rlhf_core.schemas.resources import Placement, Submission

JOURNAL_VERSION = 1
"""Version of the lines that are written; raised when readers of the version before would misread them."""


class RunCreated(Schema):
    """A run was asked for; its spec lies in ``spec.json``."""

    kind: Literal["run_created"] = "run_created"
    name: Label
    """Name from the spec."""
    owner: Label
    """Name of the person who asked, as was said."""
    owner_account: Label = ""
    """The operating system's user that said so (``rlhf_core.machine.accounts``). Lines of rlhf-flows 0.1 do not say
    it."""
    config_source: Message
    """The config file it came from, as given."""


class RunMoved(Schema):
    """The run changed its state."""

    kind: Literal["run_moved"] = "run_moved"
    state: RunState
    """The new state."""
    cause: Message
    """Reason, in a sentence for a person."""


class StageStarted(Schema):
    """A stage began."""

    kind: Literal["stage_started"] = "stage_started"
    stage_index: Int32
    """Running number of the stage within the run, from 0: stages repeat when there is more than one attempt."""
    name: StageName
    """Name of the stage."""
    attempt: Int32
    """Attempt it belongs to; 0 for preflight."""


class StageEnded(Schema):
    """A stage ended."""

    kind: Literal["stage_ended"] = "stage_ended"
    stage_index: Int32
    """Its running number."""
    state: StageState
    """State at its end."""
    message: Message = ""
    """Remark about it."""


class ChecksMade(Schema):
    """Preflight findings of one round."""

    kind: Literal["checks_made"] = "checks_made"
    results: tuple[CheckResult, ...]
    """The findings."""


class TrialPlanned(Schema):
    """A trial of this run has an id. Written before the trial is made, so that it is made once."""

    kind: Literal["trial_planned"] = "trial_planned"
    check_id: Label
    """The check that its end will be the verdict of: ``trial.one_node`` or ``trial.all_nodes``."""
    run_id: Label
    """Identity of the trial, which is a run of its own."""


class AttemptPlanned(Schema):
    """An attempt has a placement. Written before it is submitted."""

    kind: Literal["attempt_planned"] = "attempt_planned"
    placement: Placement
    """Its placement."""


class AttemptSubmitted(Schema):
    """The scheduler took the attempt."""

    kind: Literal["attempt_submitted"] = "attempt_submitted"
    submission: Submission
    """Answer of the scheduler."""


class AttemptMoved(Schema):
    """The attempt changed its state."""

    kind: Literal["attempt_moved"] = "attempt_moved"
    attempt: Int32
    """Number of the attempt, from 1."""
    state: AttemptState
    """The new state."""
    cause: Message
    """Reason, in a sentence for a person."""
    failure_kind: FailureKind | None = None
    """Kind of the failure, when it ended badly."""


class IncidentFound(Schema):
    """The controller itself found an incident (agents write theirs into the incident folder)."""

    kind: Literal["incident_found"] = "incident_found"
    incident: Incident
    """Incident that was found."""


class DecisionMade(Schema):
    """The controller decided something."""

    kind: Literal["decision_made"] = "decision_made"
    decision: Decision
    """Decision that was made."""


class ControllerStarted(Schema):
    """A controller took the run."""

    kind: Literal["controller_started"] = "controller_started"
    controller: Label
    """Text that names it: user, machine, process."""
    flow_run_id: Label = ""
    """Prefect flow run that it is; empty without Prefect."""
    flow_run_url: Message = ""
    """Page of that flow run, as a browser of that site reaches it."""


class CancelStarted(Schema):
    """The controller sets out to end the run. Written before agents and scheduler are told, so that what they do then
    is never taken for a failure, whoever goes on with the run."""

    kind: Literal["cancel_started"] = "cancel_started"
    reason: Message
    """Reason, in a sentence for a person."""


class PromotionMoved(Schema):
    """The promotion of the run's model began or changed its state."""

    kind: Literal["promotion_moved"] = "promotion_moved"
    state: PromotionState
    """The new state."""
    checkpoint_step: Int32
    """Checkpoint that is to become the model."""
    by: Label = ""
    """Name of the person who decided, with the operating system's user in brackets; empty while nobody has."""
    reason: Message = ""
    """Reason, in a sentence for a person."""
    path: Message = ""
    """Folder of the model, once it is there."""


ControlEvent = Annotated[
    RunCreated
    | RunMoved
    | StageStarted
    | StageEnded
    | ChecksMade
    | TrialPlanned
    | AttemptPlanned
    | AttemptSubmitted
    | AttemptMoved
    | IncidentFound
    | DecisionMade
    | ControllerStarted
    | CancelStarted
    | PromotionMoved,
    Field(discriminator="kind"),
]


class JournalLine(Schema):
    """One line of ``control.jsonl``."""

    version: Int32 = JOURNAL_VERSION
    """Version of the journal's form. Lines of rlhf-flows 0.1 do not say it; they have the form of version 1."""
    sequence: Int64
    """Running number within the run, from 0."""
    token: Int64
    """Fencing token of the lease its writer held; 0 for the line that creates the run."""
    time: Moment
    """Time of the event (UTC)."""
    event: ControlEvent
    """Event that was written down."""
