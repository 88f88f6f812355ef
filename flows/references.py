"""Configs that Prefect refers to: the snapshot of a deployment or an unfinished flow run must not be removed."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType

from flows.server.clients import api_client

_Row = TypeVar("_Row")

_PAGE = 200
"""Prefect's page size."""


def configs() -> Iterator[str]:
    """Configs of deployments, and of flow runs that may still start or be retried.

    Raises Prefect's own errors if the server does not answer.
    """
    restartable = [one for one in StateType if one is not StateType.COMPLETED]
    open_ones = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=restartable)))
    with api_client() as client:
        for page in _overlapping(lambda offset: client.read_deployments(limit=_PAGE, offset=offset)):
            yield from (str(one.parameters.get("config") or "") for one in page)
        for runs in _overlapping(
            lambda offset: client.read_flow_runs(flow_run_filter=open_ones, limit=_PAGE, offset=offset)
        ):
            yield from (str(one.parameters.get("config") or "") for one in runs)


def _overlapping(read: Callable[[int], Sequence[_Row]]) -> Iterator[Sequence[_Row]]:
    """Pages that overlap by half: a flow run that ends during the read shifts all later ones, and none may be
    missed."""
    offset = 0
    while True:
        page = read(offset)
        yield page
        if len(page) < _PAGE:
            return
        offset += _PAGE // 2
