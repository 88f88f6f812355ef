"""Configs that Prefect refers to: the snapshot of a deployment or an unfinished flow run must not be removed."""

from collections.abc import Iterator
from functools import partial

from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType

from flows.queries import in_states, rows_of_pages
from flows.server.clients import api_client


def configs() -> Iterator[str]:
    """Configs of deployments, and of flow runs that may still start or be retried.

    Raises Prefect's own errors if the server does not answer.
    """
    restartable = FlowRunFilter(state=in_states(one for one in StateType if one is not StateType.COMPLETED))
    with api_client() as client:
        deployments = rows_of_pages(client.read_deployments, overlaps=True)
        flow_runs = rows_of_pages(partial(client.read_flow_runs, flow_run_filter=restartable), overlaps=True)
        yield from (str(one.parameters.get("config") or "") for rows in (deployments, flow_runs) for one in rows)
