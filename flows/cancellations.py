"""Cancellations of the flow runs of a worker, polled so that no outage of the server makes it deaf to them.

Prefect 3.7.7's worker is told of them over a websocket. Without a server it tries ten times to connect again, then asks
every ten seconds instead, and after three questions without an answer it gives up for good; it logs that, works on, and
cancels nothing any more. What is cancelled between two connections it does not hear of either.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.runner import Runner

from rlhf_core.survival import Survived

POLL_INTERVAL_S = 3.0
"""Seconds between two polls for flow runs that are to be cancelled."""

POLL_TIMEOUT_S = 120.0
"""Time from which on a poll counts as hung: Prefect's client tries for a minute."""


_AT_MOST = 200
"""As many as Prefect gives at a time; the others are asked for again."""


class Cancellations:
    """Has Prefect's runner cancel what is to be cancelled. The runner itself does nothing twice."""

    def __init__(self, runner: Runner, say: Callable[[str], None]) -> None:
        """Take over from the runner's own observer what it would give up.

        Args:
            runner: Of the worker; it has begun.
            say: Told what could not be done.
        """
        self._runner = runner
        self._say = say
        self._asked_at = time.monotonic()
        self._said = ""
        self._ending: dict[UUID, asyncio.Task[None]] = {}
        observer = runner._cancelling_observer
        assert observer is not None, "the runner has begun"
        observer._check_for_cancelled_flow_runs = _nothing  # type: ignore[method-assign]

    @property
    def is_alive(self) -> bool:
        """True if cancellations are asked for, be the server away or not."""
        return time.monotonic() - self._asked_at < POLL_TIMEOUT_S

    async def watch(self) -> None:
        """Ask for ever."""
        while True:
            with Survived() as failed:  # whatever Prefect's client raises: it is asked again
                await self._ask()
                self._said = ""
            if failed.error is not None:
                self._say_once(f"which flow runs to cancel is not known, asking again: {type(failed.error).__name__}")
            self._asked_at = time.monotonic()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _ask(self) -> None:
        here: dict[UUID, Any] = self._runner._flow_run_process_map
        wanted = [flow_run_id for flow_run_id in here if flow_run_id not in self._ending]
        if not wanted:
            return
        cancelling = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLING]))
        found = await self._runner._client.read_flow_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=wanted), state=cancelling), limit=_AT_MOST
        )
        for flow_run in found:
            self._ending[flow_run.id] = asyncio.create_task(self._end(flow_run))

    def _say_once(self, text: str) -> None:
        """Once per outage."""
        if text != self._said:
            self._said = text
            self._say(text)

    async def _end(self, flow_run: FlowRun) -> None:
        try:
            with Survived() as failed:  # the server may go away meanwhile: what is left is asked for again
                await self._runner._cancel_run(flow_run)
            if failed.error is not None:
                self._say(f"flow run {flow_run.id} could not be cancelled, trying again: {failed.problem}")
        finally:
            del self._ending[flow_run.id]


async def _nothing() -> None:
    """Stand-in for the observer of Prefect's that asks: it does nothing that could fail."""
