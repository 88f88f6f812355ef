"""Events that the controller of a run records before they take effect (``control.jsonl``).

The database is an index of the run directory: every row can be rebuilt from files. Data of the control plane (states,
stages, checks, attempts, its decisions) is therefore written to this journal first, and ingested into the database like
everything else.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.schemas.attempts import AttemptState, PromotionState, RunState, StageName, StageState
from rlhf_core.schemas.base import Int32, Int64, Label, Message, Moment, Schema
from rlhf_core.schemas.checks import CheckResult
from rlhf_core.schemas.failures import Decision, FailureKind, Incident
from rlhf_core.schemas.resources import Placement, Submission

JOURNAL_VERSION = 1
"""Version of written lines; increased if readers of the previous version would misread them."""


class RunCreated(Schema):
    """A run was requested; its spec is in ``spec.json``."""

    kind: Literal["run_created"] = "run_created"
    name: Label
    """Name from the spec."""
    owner: Label
    """User who requested it, as given."""
    owner_account: Label = ""
    """Operating system's user of the request (``rlhf_core.machine.accounts``); missing in lines of rlhf-flows 0.1."""
    config_source: Message
    """Config file, as given."""


class RunMoved(Schema):
    """The run changed its state."""

    kind: Literal["run_moved"] = "run_moved"
    state: RunState
    """The new state."""
    cause: Message
    """Reason, as a sentence for the user."""


class StageStarted(Schema):
    """A stage started."""

    kind: Literal["stage_started"] = "stage_started"
    stage_index: Int32
    """Number of the stage in the run, from 0; stages repeat with further attempts."""
    name: StageName
    """Name of the stage."""
    attempt: Int32
    """Attempt of the stage; 0 for preflight."""


class StageEnded(Schema):
    """A stage ended."""

    kind: Literal["stage_ended"] = "stage_ended"
    stage_index: Int32
    """Number of the stage in the run."""
    state: StageState
    """State at its end."""
    message: Message = ""
    """Remark on its end."""


class ChecksMade(Schema):
    """Preflight findings of one round."""

    kind: Literal["checks_made"] = "checks_made"
    results: tuple[CheckResult, ...]
    """The findings."""


class TrialPlanned(Schema):
    """A trial of this run has an id. Written before the trial is created, so that it is created only once."""

    kind: Literal["trial_planned"] = "trial_planned"
    check_id: Label
    """The check that it decides: ``trial.one_node`` or ``trial.all_nodes``."""
    run_id: Label
    """Id of the trial, which is a separate run."""


class AttemptPlanned(Schema):
    """An attempt has a placement. Written before it is submitted."""

    kind: Literal["attempt_planned"] = "attempt_planned"
    placement: Placement
    """Its placement."""


class AttemptSubmitted(Schema):
    """The scheduler accepted the attempt."""

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
    """Reason, as a sentence for the user."""
    failure_kind: FailureKind | None = None
    """Kind of the failure, if it failed."""


class IncidentFound(Schema):
    """The controller itself found an incident (agents write theirs into the incident folder)."""

    kind: Literal["incident_found"] = "incident_found"
    incident: Incident
    """The incident."""


class DecisionMade(Schema):
    """The controller decided something."""

    kind: Literal["decision_made"] = "decision_made"
    decision: Decision
    """The decision."""


class ControllerStarted(Schema):
    """A controller took the run."""

    kind: Literal["controller_started"] = "controller_started"
    controller: Label
    """Its name: user, machine, process."""
    flow_run_id: Label = ""
    """Its Prefect flow run; empty without Prefect."""
    flow_run_url: Message = ""
    """Page of that flow run, for browsers of the site."""
    resumed: bool = False
    """True if a user resumed the run: its budgets count from the newest attempt on."""


class CodeTaken(Schema):
    """The user's code was copied again, for the attempts from here on."""

    kind: Literal["code_taken"] = "code_taken"
    copy_number: Int32
    """Number of the copy, from 2 (``code-<copy>/``)."""
    revision: Label = ""
    """Git revision of its folder, with ``-dirty`` if it had changes; empty outside a repository."""
    changed: tuple[Message, ...] = ()
    """Files that differ from the copy before, or the first of them."""
    by: Label
    """User who asked for it."""


class CancelStarted(Schema):
    """The controller starts to end the run. Written before agents and scheduler are notified, so that no later
    controller takes their end for a failure."""

    kind: Literal["cancel_started"] = "cancel_started"
    reason: Message
    """Reason, as a sentence for the user."""


class PromotionMoved(Schema):
    """The promotion of the run's model started or changed its state."""

    kind: Literal["promotion_moved"] = "promotion_moved"
    state: PromotionState
    """The new state."""
    checkpoint_step: Int32
    """Step of the checkpoint to promote."""
    by: Label = ""
    """User who decided, with the operating system's user in brackets; empty before the decision."""
    reason: Message = ""
    """Reason, as a sentence for the user."""
    path: Message = ""
    """Folder of the model, once it exists."""


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
    | CodeTaken
    | CancelStarted
    | PromotionMoved,
    Field(discriminator="kind"),
]


class JournalLine(Schema):
    """One line of ``control.jsonl``."""

    version: Int32 = JOURNAL_VERSION
    """Version of the journal's format. Missing in lines of rlhf-flows 0.1, which have version 1."""
    sequence: Int64
    """Number of the line in the run, from 0."""
    token: Int64
    """Fencing token of its writer's lease; 0 for the line that creates the run."""
    time: Moment
    """Time of the event (UTC)."""
    event: ControlEvent
    """The event."""
