"""The limit of a deployment: a flow run that loses its slot goes on."""

import time
from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import pytest
from prefect import flow, flow_engine
from prefect._internal.concurrency.cancellation import CancelledError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.concurrency import _leases
from prefect.flow_engine import run_flow
from prefect.states import Paused, Pending
from sites import Site

from flows.limits import outlive_slots


@pytest.fixture
def client(server: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    monkeypatch.setattr(_leases, "_RENEWAL_FRACTION", 0.0003)  # of 300 s
    monkeypatch.setattr(_leases, "_RENEWAL_RETRY_BASE_DELAY", 0.01)
    monkeypatch.setattr(flow_engine, "maintain_concurrency_lease", _leases.maintain_concurrency_lease)
    with get_client(sync_client=True) as client:
        yield client


def slots(client: SyncPrefectClient, deployment_id: UUID) -> int:
    limit = client.read_deployment(deployment_id).global_concurrency_limit
    assert limit is not None
    return limit.active_slots


def is_interrupted(client: SyncPrefectClient) -> bool:
    """True if a flow run is interrupted that waits for an approval: it is paused, which gives its slot back."""
    ended, told = [], []

    @flow(name="asks")
    def asks() -> None:
        assert slots(client, deployment_id) == 1
        client.set_flow_run_state(flow_run_id, Paused(timeout_seconds=60), force=True)
        assert slots(client, deployment_id) == 0
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and not told:
            time.sleep(0.01)
        ended.append(True)

    handle = _leases._handle_lease_renewal_failure

    def told_too(*arguments: object) -> None:
        handle(*arguments)  # type: ignore[arg-type]
        told.append(True)

    deployment_id = client.create_deployment(client.create_flow(asks), "limited", concurrency_limit=1)
    flow_run_id = client.create_flow_run_from_deployment(deployment_id).id
    try:
        client.set_flow_run_state(flow_run_id, Pending())
        with pytest.MonkeyPatch.context() as patch, suppress(CancelledError):
            patch.setattr(_leases, "_handle_lease_renewal_failure", told_too)
            run_flow(asks, flow_run=client.read_flow_run(flow_run_id), return_type="state")
        assert told
    finally:
        client.delete_deployment(deployment_id)
    return not ended


def test_a_flow_run_that_waits_for_an_approval_is_not_interrupted(client: SyncPrefectClient) -> None:
    """Control: Prefect itself interrupts it."""
    assert is_interrupted(client)
    outlive_slots()
    assert not is_interrupted(client)
