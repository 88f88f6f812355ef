"""Scheduled flow runs to skip: their schedule was paused, or the last run of their deployment is still running.

Prefect removes the planned flow runs of a paused schedule, but not those that are already due and queued: they would
start hours later. Nor can its schedules skip a time.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, FlowRunFilterNextScheduledStartTime
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from flows.publishing.events import flow_run_resource
from flows.queries import in_states, of_flow, rows_of_pages
from flows.server.clients import api_client
from rlhf_core.control.driving_flow_run import DrivingFlowRun
from rlhf_core.errors import RlhfError
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir

SKIP_IF_BUSY = "rlhf-skip-if-busy"
"""Tag of deployments, and so of their flow runs, whose schedule skips a time while their last run is still running."""

EVENT = "rlhf.schedule.skipped"

_AT_WORK = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_PERHAPS_AT_WORK = [StateType.CRASHED, StateType.PAUSED]
"""States in which a run may go on: its flow run will be adopted, or was paused in the UI. A flow run that waits for an
approval is paused too, and its run has ended."""


def is_to_be_skipped(flow_run: FlowRun) -> bool:
    """True if it may start only if its deployment is idle. Flow runs that a user started or retried always start."""
    return flow_run.auto_scheduled and SKIP_IF_BUSY in flow_run.tags and flow_run.run_count <= 1


def busy_with(client: SyncPrefectClient, flow_run: FlowRun, runs_dir: Path) -> str:
    """The run of the same deployment that is still running; empty if there is none.

    A run whose flow run crashed or was paused counts until the run itself has ended, because its job is running. Of
    scheduled flow runs that may themselves be skipped and have not made a run yet, only earlier ones count: two that
    were due at once, after an outage for instance, must not both be skipped in favour of the other.
    """
    if flow_run.deployment_id is None:
        return ""
    for states in (_AT_WORK, _PERHAPS_AT_WORK):  # these cost a look at their runs
        for other in _flow_runs(client, flow_run.deployment_id, states):
            if other.id != flow_run.id and _precedes(other, flow_run, runs_dir):
                return other.name
    return ""


def _flow_runs(client: SyncPrefectClient, deployment: UUID, states: list[StateType]) -> Iterator[FlowRun]:
    """All flow runs of a deployment in some states, the newest first."""
    which = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]), state=in_states(states))
    newest_first = FlowRunSort.EXPECTED_START_TIME_DESC
    return rows_of_pages(partial(client.read_flow_runs, flow_run_filter=which, sort=newest_first))


def skipped_for(flow_run: FlowRun, runs_dir: Path) -> str:
    """Reason for skipping a scheduled flow run, also emitted as a Prefect event; empty if it starts.

    Raises Prefect's own errors if the server does not answer.
    """
    with api_client() as client:
        busy = busy_with(client, flow_run, runs_dir)
    if not busy:
        return ""
    why = _still_running(busy)
    emit_skipped(flow_run, why)
    return why


def _still_running(busy: str) -> str:
    return f"run {busy} of the same deployment is still running"


def _precedes(other: FlowRun, flow_run: FlowRun, runs_dir: Path) -> bool:
    if other.state_type in _PERHAPS_AT_WORK:
        return _goes_on(other, runs_dir)
    if not is_to_be_skipped(other) or _order(other) < _order(flow_run):
        return True
    return DrivingFlowRun(str(other.id)).run_dir(runs_dir) is not None


def _order(flow_run: FlowRun) -> tuple[datetime, UUID]:
    return flow_run.expected_start_time or datetime.max.replace(tzinfo=UTC), flow_run.id


def _goes_on(flow_run: FlowRun, runs_dir: Path) -> bool:
    """True if the run of a crashed or paused flow run has not ended."""
    try:
        run_dir = RunDir.find(runs_dir, flow_run.name)
        return run_dir is not None and not read_record(run_dir).ended
    except (RlhfError, OSError):
        return False


def cancel_skipped(runs_dir: Path) -> list[tuple[FlowRun, str]]:
    """Cancel the due flow runs that must not start, and emit an event for each. Returns each with the reason.

    Raises Prefect's own errors if the server does not answer.
    """
    skipped = []
    with api_client() as client:
        for flow_run in _due(client):
            why = _why_not(client, flow_run, runs_dir)
            if why:
                client.set_flow_run_state(flow_run.id, Cancelled(message=f"skipped: {why}"))
                emit_skipped(flow_run, why)
                skipped.append((flow_run, why))
    return skipped


def emit_skipped(flow_run: FlowRun, why: str) -> None:
    """Emit a Prefect event, for automations, about a scheduled flow run that was skipped."""
    emit_event(
        EVENT,
        resource={
            "prefect.resource.id": f"prefect.deployment.{flow_run.deployment_id}",
            "prefect.resource.role": "deployment",
        },
        related=[flow_run_resource(flow_run.id, flow_run.name)],
        payload={"why": why, "due": f"{flow_run.expected_start_time or ''}"},
    )


def _due(client: SyncPrefectClient) -> list[FlowRun]:
    """All that schedules have planned and that are due; read as a whole, because cancelling some moves the pages."""
    waiting = FlowRunFilter(
        state=in_states([StateType.SCHEDULED]),
        next_scheduled_start_time=FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC)),
    )
    earliest_first = FlowRunSort.EXPECTED_START_TIME_ASC
    found = rows_of_pages(
        partial(client.read_flow_runs, flow_filter=of_flow(), flow_run_filter=waiting, sort=earliest_first)
    )
    return [one for one in found if one.auto_scheduled and one.run_count == 0]


def _why_not(client: SyncPrefectClient, flow_run: FlowRun, runs_dir: Path) -> str:
    schedule = flow_run.created_by.id if flow_run.created_by and flow_run.created_by.type == "SCHEDULE" else None
    if schedule is not None and flow_run.deployment_id is not None and not _is_active(client, flow_run, schedule):
        return "it was due, had not begun, and its schedule was paused or removed since"
    busy = busy_with(client, flow_run, runs_dir) if is_to_be_skipped(flow_run) else ""
    return _still_running(busy) if busy else ""


def _is_active(client: SyncPrefectClient, flow_run: FlowRun, schedule: UUID) -> bool:
    assert flow_run.deployment_id is not None
    try:
        deployment = client.read_deployment(flow_run.deployment_id)
    except ObjectNotFound:
        return True  # Prefect itself removes the flow runs of a deleted schedule
    return not deployment.paused and any(one.id == schedule and one.active for one in deployment.schedules)
