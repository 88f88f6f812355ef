"""Cancellations after an outage of the server: our worker still receives them; Prefect's own observer does not."""

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect._internal.observers import FlowRunCancellingObserver
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows import cancellations
from flows.cancellations import Cancellations

NOBODY = "http://127.0.0.1:9/api"


class Runner:
    """The used part of Prefect's runner; its server does not respond to the first five requests."""

    def __init__(self) -> None:
        self.flow_run = SimpleNamespace(id=uuid4())
        self.questions = 0
        self.cancelled: list[UUID] = []
        self._flow_run_process_map = {self.flow_run.id: {}}
        self._cancelling_observer = SimpleNamespace()
        self._client = self

    async def read_flow_runs(self, **asked: Any) -> list[SimpleNamespace]:
        self.questions += 1
        if self.questions <= 5:
            raise httpx.ConnectError("nobody")
        return [self.flow_run]

    async def _cancel_run(self, flow_run: Any) -> None:
        self.cancelled.append(flow_run.id)
        if len(self.cancelled) <= 2:
            raise httpx.ConnectError("it went away again")
        del self._flow_run_process_map[flow_run.id]


def test_cancellations_are_polled_until_they_are_received_and_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellations, "POLL_INTERVAL_S", 0.01)
    runner, messages = Runner(), []

    async def watched() -> None:
        one = Cancellations(runner, messages.append)  # type: ignore[arg-type]
        watching = asyncio.create_task(one.watch())
        while runner._flow_run_process_map:
            assert not watching.done()
            await asyncio.sleep(0.01)
        assert one.is_alive
        watching.cancel()

    asyncio.run(asyncio.wait_for(watched(), 60))
    assert runner.cancelled == [runner.flow_run.id] * 3, "a failed cancellation is retried"
    assert len(messages) == 2, "once per outage and failing cancellation, not every three seconds"


def test_prefects_own_observer_gives_up() -> None:
    """Negative control of the previous test, which shows when our own observer is no longer needed."""

    async def observed() -> None:
        gave_up = asyncio.Event()
        observer = FlowRunCancellingObserver(
            on_cancelling=lambda flow_run_id: None, polling_interval=0.01, on_failure=lambda ids: gave_up.set()
        )
        async with observer:
            await gave_up.wait()

    with temporary_settings({PREFECT_API_URL: NOBODY, PREFECT_CLIENT_MAX_RETRIES: 0}):
        asyncio.run(asyncio.wait_for(observed(), 120))
