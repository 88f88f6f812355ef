"""Requests in Prefect without a run, because they are waiting or were refused. Stored in a file for `rlhf runs`.

The site daemon writes the file in each of its rounds, so `rlhf runs` can show it quickly and without Prefect.
"""

from datetime import datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId, FlowRunFilter, FlowRunFilterEndTime
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort

from flows.flow_runs.driving import requested_at
from flows.flow_runs.links import page
from flows.queries import in_states, of_flow
from flows.server.clients import api_client
from rlhf_core.config.site import Site
from rlhf_core.files.whole import write_model
from rlhf_core.history.queries import open_runs
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.site import Request, Requests, requests_file

RECENT = timedelta(days=1)
"""Time for which a refused request is shown, from its end."""

_WAITING = [StateType.SCHEDULED, StateType.PENDING]
_REFUSED = [StateType.FAILED, StateType.CANCELLED, StateType.CRASHED]
_AT_MOST = 100

_MEANINGS = {
    "Scheduled": "waits for its time or for a worker",
    "Late": "due, and no worker has taken it: `rlhf up --status` says whether one is there",
    "Pending": "a worker has taken it",
    "AwaitingConcurrencySlot": "waits for its turn: the limit of its deployment is reached",
}
"""States of a waiting flow run, in words."""


def keep(site: Site, store: HistoryStore, flow: str, now: datetime) -> Requests:
    """Query Prefect and write the file.

    Raises:
        HistoryError: the history does not answer; Prefect's own errors if the server does not.
    """
    with api_client() as client:
        # The earliest first, because the times that schedules have planned may be more than are read.
        early = _flow_runs(client, flow, _WAITING, FlowRunSort.EXPECTED_START_TIME_ASC)
        waiting = [one for one in reversed(early) if not (one.auto_scheduled and _is_ahead(one, now))]
        # By their end, because a request may have waited for days.
        recent = FlowRunFilterEndTime(after_=now - RECENT)
        refused = _flow_runs(client, flow, _REFUSED, FlowRunSort.END_TIME_DESC, recent)
        driven = open_runs.runs_of_flow_runs(store, {str(one.id) for one in refused})
        without_run = [
            one for one in refused if str(one.id) not in driven and RunDir.find(site.runs_dir, one.name) is None
        ]
        found = [one for one in (*waiting, *without_run) if not one.parameters.get("run_id")]
        names = _deployments(client, found)
    requests = Requests(as_of=now, requests=tuple(_request(site, one, names) for one in found))
    write_model(requests_file(site.home), requests)
    return requests


def _flow_runs(
    client: SyncPrefectClient,
    flow: str,
    types: list[StateType],
    order: FlowRunSort,
    ended: FlowRunFilterEndTime | None = None,
) -> list[FlowRun]:
    """The first flow runs in an order."""
    return client.read_flow_runs(
        flow_filter=of_flow(flow),
        flow_run_filter=FlowRunFilter(state=in_states(types), end_time=ended),
        sort=order,
        limit=_AT_MOST,
    )


def _is_ahead(flow_run: FlowRun, now: datetime) -> bool:
    """True if it is only planned by a schedule."""
    return flow_run.expected_start_time is not None and flow_run.expected_start_time > now


def _deployments(client: SyncPrefectClient, flow_runs: list[FlowRun]) -> dict[UUID, str]:
    ids = {one.deployment_id for one in flow_runs if one.deployment_id is not None}
    if not ids:
        return {}
    found = client.read_deployments(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=list(ids))))
    return {one.id: one.name for one in found}


def _request(site: Site, flow_run: FlowRun, deployments: dict[UUID, str]) -> Request:
    state = flow_run.state
    name = (state.name if state is not None else "") or ""
    waits = state is None or state.type in _WAITING
    why = _MEANINGS.get(name, "") if waits else (state.message if state is not None else "") or ""
    return Request(
        run_id=flow_run.name,
        flow_run_id=str(flow_run.id),
        deployment=deployments.get(flow_run.deployment_id, "") if flow_run.deployment_id else "",
        state="waiting" if waits else "refused" if name == "Failed" else name.lower(),
        owner=str(flow_run.parameters.get("owner") or ""),
        asked_at=requested_at(flow_run) or flow_run.expected_start_time,
        due_at=flow_run.expected_start_time,
        why=why,
        url=page(site, "runs/flow-run", flow_run.id),
    )
