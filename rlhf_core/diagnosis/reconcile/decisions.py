"""Reconciliation of run directories (and the history built from them), Prefect and the scheduler's queue.

:func:`decide` takes the state of each and returns the actions that make them agree. Pure: the same facts give the same
actions, and after their execution, the next round has nothing to do. A state missing from a source is unknown, and
unknown never counts as dead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlhf_core.diagnosis.reconcile.facts import (
    FLOW_ENDS,
    FlowRunFacts,
    FlowState,
    JobFacts,
    LeaseState,
    ProcessState,
    RunFacts,
    TaskRunFacts,
    World,
)
from rlhf_core.text.formatting import THROUGH_PREFECT

ADOPT_AFTER_S = 30.0
"""Time without a controller after which a run is adopted; a run with a dead controller is adopted at once."""

NEW_RUN_S = 120.0
"""Time that a new run may wait for its first controller: `rlhf run` may have to start a Prefect server first."""

RETRY_INTERVAL_S = 15.0
"""Pause before the adoption of a run that had two controllers within an hour; doubled with each further one."""

RECENT_S = 3600.0
"""Period over which controllers and flow runs are counted for this pause."""

LONGEST_PAUSE_S = 600.0
"""Maximum of this pause."""

PREFECT_TIMEOUT_S = 120.0
"""Time that Prefect must be unreachable before a run is adopted without it: usually its server is only restarting."""

CANCEL_TIMEOUT_S = 60.0
"""Time that Prefect has to cancel a flow run before the run is ended without it."""

UNATTENDED_S = 5.0
"""The same if no worker manages its process: its worker was killed, or it was started in a terminal."""

JOB_GRACE_S = 60.0
"""Time that the job of an ended run has to disappear."""

PUBLISH_AFTER_S = 30.0
"""Time after the end of a run before its end is published instead of its controller, which may still do so."""

TASK_GRACE_S = 30.0
"""Time after the end of a flow run until the ends of its task runs are known: Prefect gets them from delayed events."""

MISSING_S = 600.0
"""Time that a run directory must be missing before the run is closed and its jobs are ended."""


class ActionKind(StrEnum):
    """Kinds of action."""

    INGEST = "ingest"
    """Read the run directory into the history."""
    ADOPT = "adopt"
    """Start a controller for a run that has none."""
    CANCEL_RUN = "cancel_run"
    """End a run and its job on request."""
    CLOSE_RUN = "close_run"
    """Close a run in the history after its directory has disappeared."""
    CANCEL_JOB = "cancel_job"
    """Cancel a job that no run needs."""
    END_FLOW_RUN = "end_flow_run"
    """Set the final state of a flow run without a process."""
    END_TASK_RUN = "end_task_run"
    """Set the final state of a task run whose flow run has ended."""
    PUBLISH = "publish"
    """Publish to Prefect what its controller could no longer publish."""
    REMOVE_CHECKPOINT = "remove_checkpoint"
    """Remove a checkpoint that the retention rules of the site no longer keep."""
    REMOVE_PUT_ASIDE = "remove_put_aside"
    """Remove checkpoints that were put aside because they were damaged or discarded, or are left of an interrupted save
    or removal."""
    NOTE = "note"
    """Report something without acting on it."""


@dataclass(frozen=True)
class ReconcileAction:
    """One action, with its reason."""

    kind: ActionKind
    run_id: str
    reason: str
    attempt: int = 0
    job_id: str = ""
    flow_run_id: str = ""
    task_run_id: str = ""
    flow_state: FlowState | None = None
    """New state of the flow run or task run."""
    step: int = 0
    """Step of the checkpoint."""
    folder: str = ""
    """Folder of checkpoints that were put aside, within the run's checkpoints."""

    @property
    def subject(self) -> str:
        """The run, and the part of it that this action concerns, for the log."""
        parts = [self.run_id, self.job_id and f"job {self.job_id}", self.flow_run_id]
        parts.append(f"task run {self.task_run_id}" if self.task_run_id else "")
        parts.append(f"checkpoint {self.step}" if self.step else "")
        return " ".join(part for part in parts if part)


def decide(world: World) -> list[ReconcileAction]:
    """Decide the actions, in order."""
    actions: list[ReconcileAction] = []
    for run in world.runs.values():
        about = _about_run(run, [one for one in world.flow_runs if one.run_id == run.run_id], world)
        actions += (_as_permitted(one, run) for one in about)
    for flow_run in world.flow_runs:
        actions += _about_flow_run(flow_run, world.runs.get(flow_run.run_id), world)
    ends = {one.flow_run_id: one.flow_state for one in actions if one.kind is ActionKind.END_FLOW_RUN}
    for task_run in world.task_runs:
        actions += _about_task_run(task_run, world.flow_runs, ends)
    for job in world.jobs:
        run_of_job = world.runs.get(job.run_id)
        if run_of_job is not None:  # otherwise it belongs to another site
            actions += _about_job(job, run_of_job, world.jobs)
    return actions


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def _about_run(run: RunFacts, flow_runs: Sequence[FlowRunFacts], world: World) -> Iterator[ReconcileAction]:
    if run.missing_s:
        # A running controller detects it itself, much sooner.
        if run.missing_s > MISSING_S and not run.ended and run.holder is not LeaseState.LIVING:
            yield ReconcileAction(ActionKind.CLOSE_RUN, run.run_id, "the directory of this run is gone")
        return
    if run.recorded != run.state:
        difference = f"its state is {run.recorded or 'missing'} in the history, {run.state.value} in its journal"
        yield ReconcileAction(ActionKind.INGEST, run.run_id, difference)
    if run.unpublished and run.holder is not LeaseState.LIVING and run.ended_s > PUBLISH_AFTER_S:
        reason = f"its controller ended before it had published {run.unpublished} of its events and pages to Prefect"
        yield ReconcileAction(ActionKind.PUBLISH, run.run_id, reason)
    # A request to go on with a run, withdrawn because the run has a controller, must not end the run.
    concerned = [one for one in flow_runs if one.begun or run.holder is not LeaseState.LIVING]
    newest = max(concerned, key=lambda one: one.created_at, default=None)
    if not run.needs_controller:
        return
    cancellation = "" if run.ended else _cancellation(run, newest)
    if cancellation:
        yield ReconcileAction(ActionKind.CANCEL_RUN, run.run_id, cancellation, run.attempt)
    elif run.holder is LeaseState.LIVING:
        if newest is not None and newest.state in FLOW_ENDS and not run.ended:
            reason = (
                f"its flow run is {newest.state.value.lower()} in Prefect, but its controller {run.owner} is running"
            )
            yield ReconcileAction(ActionKind.NOTE, run.run_id, reason, flow_run_id=newest.flow_run_id)
    elif run.trial_of:
        parent = world.runs.get(run.trial_of)
        if (parent is None or parent.ended) and run.undriven_s > NEW_RUN_S:
            yield ReconcileAction(
                ActionKind.CANCEL_RUN, run.run_id, f"it is a trial of {run.trial_of}, which has ended"
            )
    elif _is_to_be_adopted(run, flow_runs, world) and not any(_may_drive(one, run) for one in flow_runs):
        yield ReconcileAction(ActionKind.ADOPT, run.run_id, _why_undriven(run), run.attempt)


def _as_permitted(action: ReconcileAction, run: RunFacts) -> ReconcileAction:
    """Return the action, or only a note if the action would write to the directory of another user."""
    if not run.foreign_owner or action.kind not in (ActionKind.ADOPT, ActionKind.CANCEL_RUN):
        return action
    advice = (
        f"it needs a controller, but only {run.foreign_owner} can write its directory: `rlhf resume` continues it, "
        "`rlhf cancel` ends it"
    )
    return ReconcileAction(ActionKind.NOTE, run.run_id, advice)


def _cancellation(run: RunFacts, newest: FlowRunFacts | None) -> str:
    """Reason why the reconciler must end an active run; empty if it must not."""
    if run.cancel_requested and run.holder is not LeaseState.LIVING:
        return run.cancel_requested  # a running controller reads the request itself
    if newest is None or newest.state not in (FlowState.CANCELLED, FlowState.CANCELLING):
        return ""
    if run.controller_started_at is not None and newest.created_at < run.controller_started_at > newest.changed_at:
        return ""  # the run has been resumed since
    is_being_cancelled = newest.state is FlowState.CANCELLING and newest.process is not ProcessState.GONE
    if is_being_cancelled and newest.state_s < (CANCEL_TIMEOUT_S if newest.attended else UNATTENDED_S):
        return ""
    return f"its flow run was cancelled in Prefect ({THROUGH_PREFECT})"


def _is_to_be_adopted(run: RunFacts, flow_runs: Sequence[FlowRunFacts], world: World) -> bool:
    if 0 < world.prefect_away_s < PREFECT_TIMEOUT_S:
        return False
    # Flow runs that ended before they became controllers also count: new ones would end in the same way.
    tried_s = [one.state_s for one in flow_runs if one.state in FLOW_ENDS and one.state_s < RECENT_S]
    if min([run.undriven_s, *tried_s]) < _pause(max(run.num_controllers, len(tried_s))):
        return False
    undriven_s = min(run.undriven_s, run.silent_s) if run.holder is LeaseState.SILENT else run.undriven_s
    return undriven_s >= grace_s(run.holder, was_driven=run.controller_started_at is not None)


def grace_s(holder: LeaseState, *, was_driven: bool) -> float:
    """Time that a run may be without a controller, in seconds, before it gets another one."""
    if holder is LeaseState.DEAD:
        return 0.0
    return NEW_RUN_S if holder is LeaseState.FREE and not was_driven else ADOPT_AFTER_S


def _may_drive(flow_run: FlowRunFacts, run: RunFacts) -> bool:
    """True if a flow run drives its run, or soon will. The process of a silent controller, if it exists, says
    nothing."""
    is_silent = run.holder is LeaseState.SILENT and flow_run.flow_run_id == run.flow_run_id
    return (replace(flow_run, process=ProcessState.UNKNOWN) if is_silent else flow_run).may_drive


def _pause(num_controllers: int) -> float:
    """Pause before the next adoption. It grows with the number of controllers, because the run itself may kill them."""
    return 0.0 if num_controllers < 2 else min(RETRY_INTERVAL_S * 2.0 ** min(num_controllers - 2, 10), LONGEST_PAUSE_S)


def _why_undriven(run: RunFacts) -> str:
    match run.holder:
        case LeaseState.DEAD:
            return f"its controller {run.owner} is gone"
        case LeaseState.SILENT:
            return f"its controller {run.owner} has not renewed its lease for {run.undriven_s:.0f} s"
        case _:
            return f"it has had no controller for {run.undriven_s:.0f} s"


# ---------------------------------------------------------------------------------------------------------------------
# Flow runs

_ENDS_AS: Mapping[str, FlowState] = {
    "completed": FlowState.COMPLETED,
    "failed": FlowState.FAILED,
    "cancelled": FlowState.CANCELLED,
}
"""Final state of a flow run or task run, by that of its run or stage."""


def _about_flow_run(flow_run: FlowRunFacts, run: RunFacts | None, world: World) -> Iterator[ReconcileAction]:
    if flow_run.is_lost or _waits_needlessly(flow_run, run):
        end, reason = _end_of(flow_run, run, world)
    elif run is not None and _ended_unreported(flow_run, run):
        end, reason = _ENDS_AS[run.state], f"its end was not reported to Prefect; its run is {run.state.value}"
    else:
        return
    yield ReconcileAction(
        ActionKind.END_FLOW_RUN, flow_run.run_id, reason, flow_run_id=flow_run.flow_run_id, flow_state=end
    )


def _ended_unreported(flow_run: FlowRunFacts, run: RunFacts) -> bool:
    """Return True if it drove its run to the end, could not report that, and counts as crashed.

    Prefect's worker reports a crash if the server was unreachable when the process ended.
    """
    if flow_run.state is not FlowState.CRASHED or flow_run.process is ProcessState.ALIVE:
        return False
    return (
        run.ended
        and not run.promotion_due
        and run.holder is not LeaseState.LIVING
        and run.flow_run_id == flow_run.flow_run_id
    )


def _end_of(flow_run: FlowRunFacts, run: RunFacts | None, world: World) -> tuple[FlowState, str]:
    """Final state of a flow run without a process, with the reason: that of its run if it drove it to its end,
    otherwise its own."""
    if run is not None and run.ended and not run.promotion_due:
        end = _ENDS_AS[run.state]
        later = (one for one in world.flow_runs if one.run_id == run.run_id and one.created_at > flow_run.created_at)
        if any(one.state is end for one in later):
            return FlowState.CRASHED, f"its process is gone; another flow run brought run {run.run_id} to its end"
        return end, f"it no longer has a controller; run {run.run_id} is {run.state.value}"
    if flow_run.state is FlowState.CANCELLING:
        return FlowState.CANCELLED, "it was cancelled and its process is gone"
    if run is None:
        return FlowState.CRASHED, "its process is gone, and it had not started a known run"
    subject = f"the promotion of run {run.run_id}" if run.promotion_due else f"run {run.run_id}"
    if run.holder is LeaseState.LIVING:
        return FlowState.CRASHED, f"its process is gone; {subject} continues under {run.owner}"
    return FlowState.CRASHED, f"its process is gone; {subject} gets another controller"


def _waits_needlessly(flow_run: FlowRunFacts, run: RunFacts | None) -> bool:
    """Return True if it is paused for a decision that has been made elsewhere, and no other machine drives it."""
    if flow_run.state is not FlowState.PAUSED or flow_run.process is ProcessState.ALIVE or flow_run.suspended:
        return False
    return run is not None and run.ended and not run.promotion_due and run.holder is not LeaseState.LIVING


# ---------------------------------------------------------------------------------------------------------------------
# Task runs


def _about_task_run(
    task_run: TaskRunFacts, flow_runs: Sequence[FlowRunFacts], ends: Mapping[str, FlowState | None]
) -> Iterator[ReconcileAction]:
    """End a task run in the final state of its stage, or of its flow run if the journal has no end of the stage."""
    flow_run = next((one for one in flow_runs if one.flow_run_id == task_run.flow_run_id), None)
    if flow_run is None or flow_run.state not in FLOW_ENDS or flow_run.process is ProcessState.ALIVE:
        return
    if flow_run.state_s <= TASK_GRACE_S:
        return
    known = _ENDS_AS.get(task_run.stage) if task_run.stage is not None else None
    yield ReconcileAction(
        ActionKind.END_TASK_RUN,
        flow_run.run_id,
        "its end was not reported to Prefect",
        flow_run_id=flow_run.flow_run_id,
        task_run_id=task_run.task_run_id,
        flow_state=known or ends.get(flow_run.flow_run_id) or flow_run.state,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


def _about_job(job: JobFacts, run: RunFacts, jobs: Sequence[JobFacts]) -> Iterator[ReconcileAction]:
    recorded = run.jobs.get(job.attempt, "")
    is_second = recorded not in ("", job.job_id) and any(other.job_id == recorded for other in jobs)
    if run.missing_s > MISSING_S:
        reason = "the directory of its run is gone"
    elif run.missing_s:
        return
    elif run.ended and run.ended_s > JOB_GRACE_S:
        reason = f"its run is {run.state.value}"
    elif not run.ended and job.attempt < run.attempt:
        reason = f"attempt {job.attempt} was replaced by attempt {run.attempt}"
    elif not run.ended and is_second:
        reason = f"attempt {job.attempt} already has job {recorded}"
    else:
        return
    yield ReconcileAction(ActionKind.CANCEL_JOB, run.run_id, reason, job.attempt, job.job_id)
