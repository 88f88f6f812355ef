"""Queries of Prefect's API: shorter filters, and lists that are longer than a page."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType

_Row = TypeVar("_Row")

RUN_FLOW = "rlhf-run"
"""Name of the flow of one run; deployments are called ``rlhf-run/<name>``."""

PAGE = 200
"""Rows of a page: the server's own limit."""


def of_flow(name: str = RUN_FLOW) -> FlowFilter:
    """Filter for the flow of a name."""
    return FlowFilter(name=FlowFilterName(any_=[name]))


def in_states(states: Iterable[StateType]) -> FlowRunFilterState:
    """Filter for states of flow runs."""
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))


def rows_of_pages(read: Callable[..., Sequence[_Row]], *, overlaps: bool = False) -> Iterator[_Row]:
    """All rows of a list that the API returns in pages.

    Args:
        read: reads the page of a ``limit`` and an ``offset``.
        overlaps: True to begin each page in the middle of the one before: a row that disappears during the read shifts
            all later ones, and none may be missed.
    """
    offset = 0
    while True:
        page = read(limit=PAGE, offset=offset)
        yield from page
        if len(page) < PAGE:
            return
        offset += PAGE // 2 if overlaps else PAGE
