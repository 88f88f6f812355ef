"""Configs that Prefect refers to: the snapshot of a deployment or an unfinished flow run must not be removed."""

from collections.abc import Iterator

from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType

from flows.server.clients import api_client, rows_of_pages

_PAGE = 200
"""Prefect's page size."""


def configs() -> Iterator[str]:
    """Configs of deployments, and of flow runs that may still start or be retried.

    Raises Prefect's own errors if the server does not answer.
    """
    restartable = [one for one in StateType if one is not StateType.COMPLETED]
    open_ones = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=restartable)))
    with api_client() as client:
        # Pages overlap by half: a flow run that ends during the read shifts all later ones, and none may be missed.
        deployments = rows_of_pages(
            lambda offset: client.read_deployments(limit=_PAGE, offset=offset), _PAGE, _PAGE // 2
        )
        flow_runs = rows_of_pages(
            lambda offset: client.read_flow_runs(flow_run_filter=open_ones, limit=_PAGE, offset=offset),
            _PAGE,
            _PAGE // 2,
        )
        yield from (str(one.parameters.get("config") or "") for rows in (deployments, flow_runs) for one in rows)
