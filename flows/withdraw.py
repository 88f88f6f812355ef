"""Takes back a run that was asked for in Prefect and that no worker has begun: it has no directory, and no history."""

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Cancelling


def withdraw(run_id: str, reason: str) -> bool:
    """Cancel the flow run that would make a run; False where Prefect knows none that has not begun.

    One that a worker has just taken is cancelled by its worker, which ends the process.
    """
    waiting = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED, StateType.PENDING]))
    asked = FlowRunFilter(name=FlowRunFilterName(any_=[run_id]), state=waiting)
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=asked)
        for flow_run in found:
            taken = flow_run.state is not None and flow_run.state.type is StateType.PENDING
            client.set_flow_run_state(flow_run.id, Cancelling(message=reason) if taken else Cancelled(message=reason))
    return bool(found)
