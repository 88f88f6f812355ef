"""Polling for cancelled flow runs, so that a worker still learns of cancellations after a server outage.

Prefect 3.7.7's worker learns of cancellations over a websocket. When the server is gone, it tries ten times to
reconnect, then falls back to polling every ten seconds, and gives up for good after three failed polls: it logs that,
keeps working, and never cancels anything again. It also misses any cancellation made between two connections.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.runner import Runner

from flows.queries import PAGE, in_states
from rlhf_core.condition_log import ConditionLog
from rlhf_core.survival import Survived

POLL_INTERVAL_S = 3.0
"""Seconds between two polls for cancelled flow runs."""

POLL_TIMEOUT_S = 120.0
"""Age at which a poll counts as hung: Prefect's client retries for a minute."""


class Cancellations:
    """Polls for cancellations and hands them to Prefect's runner, which ignores duplicates."""

    def __init__(self, runner: Runner, log: Callable[[str], None]) -> None:
        """Replace the runner's own cancellation observer, which gives up during an outage.

        Args:
            runner: The worker's runner, already started.
            log: Called with a description of each failure.
        """
        self._runner = runner
        self._polled_at = time.monotonic()
        self._problems = ConditionLog(log)
        self._ending: dict[UUID, asyncio.Task[None]] = {}
        observer = runner._cancelling_observer
        assert observer is not None, "the runner has begun"
        observer._check_for_cancelled_flow_runs = _nothing  # type: ignore[method-assign]

    @property
    def is_alive(self) -> bool:
        """True while the polling loop is running, even if the server is down."""
        return time.monotonic() - self._polled_at < POLL_TIMEOUT_S

    async def watch(self) -> None:
        """Poll until cancelled."""
        while True:
            with Survived() as failed:  # whatever Prefect's client raises, the next poll retries
                await self._poll()
                self._problems.end()
            if failed.error is not None:
                kind = type(failed.error).__name__
                self._problems.log_change(f"which flow runs to cancel is not known, asking again: {kind}")
            self._polled_at = time.monotonic()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _poll(self) -> None:
        here: dict[UUID, Any] = self._runner._flow_run_process_map
        wanted = [flow_run_id for flow_run_id in here if flow_run_id not in self._ending]
        if not wanted:
            return
        cancelling = FlowRunFilter(id=FlowRunFilterId(any_=wanted), state=in_states([StateType.CANCELLING]))
        # One page: the next poll picks up the rest.
        for flow_run in await self._runner._client.read_flow_runs(flow_run_filter=cancelling, limit=PAGE):
            self._ending[flow_run.id] = asyncio.create_task(self._end(flow_run))

    async def _end(self, flow_run: FlowRun) -> None:
        try:
            with Survived() as failed:  # the server may go down in between; the next poll picks up the rest
                await self._runner._cancel_run(flow_run)
            if failed.error is not None:
                line = f"flow run {flow_run.id} could not be cancelled, trying again: {failed.problem}"
                self._problems.log_once(line, flow_run.id)
            else:
                self._problems.end(flow_run.id)
        finally:
            del self._ending[flow_run.id]


async def _nothing() -> None:
    """No-op that replaces the polling of Prefect's observer, so that it cannot fail."""
