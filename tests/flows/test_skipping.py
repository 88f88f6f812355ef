"""Scheduled flow runs that must not start: those of a paused schedule, and those of a busy deployment."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from harness import ControllerHarness
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.exceptions import CancelledRun
from prefect.flow_engine import run_flow
from prefect.states import Completed, Crashed, Paused, Running, Scheduled, State
from process_tools import ASKING_INTERVAL_S, until
from sites import Site

from flows import schedules
from flows.run import rlhf_run
from flows.server.clients import api_client
from rlhf_core.control.driving_flow_run import DrivingFlowRun
from rlhf_core.control.new_run import new_run
from rlhf_core.run_dir.run import RunDir


@pytest.fixture(autouse=True)
def _server(real_prefect: Site, harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RLHF_HOME", str(harness.site.home))
    with real_prefect.in_use():
        yield


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with api_client() as client:
        yield client


def deployed(client: SyncPrefectClient, name: str, *tags: str) -> UUID:
    """A deployment whose schedule is due every day."""
    schedule = IntervalSchedule(interval=timedelta(days=1), anchor_date=datetime.now(UTC))
    return client.create_deployment(
        client.create_flow(rlhf_run),
        name=name,
        schedules=[DeploymentScheduleCreate(schedule=schedule, active=True)],
        tags=list(tags),
        parameter_openapi_schema={"type": "object", "properties": {}},
    )


def due(client: SyncPrefectClient, deployment: UUID) -> FlowRun:
    """A flow run that the schedule of the deployment has planned, with its next start now instead of in a day."""

    def planned() -> list[FlowRun]:
        found = client.read_flow_runs(limit=200)
        return [one for one in found if one.deployment_id == deployment and one.auto_scheduled]

    one: FlowRun = until(planned, "it is planned", interval_s=ASKING_INTERVAL_S)[0]
    client.set_flow_run_state(one.id, Scheduled(scheduled_time=datetime.now(UTC)), force=True)
    return one


def state(client: SyncPrefectClient, flow_run: FlowRun) -> tuple[str, str]:
    now = client.read_flow_run(flow_run.id).state
    assert now is not None
    return now.name or "", now.message or ""


def events(real_prefect: Site, deployment: UUID) -> list[str]:
    wanted = {"filter": {"resource": {"id": [f"prefect.deployment.{deployment}"]}}}
    _, found = real_prefect.ask("/events/filter", wanted)
    return [one["event"] for one in found["events"] if one["event"].startswith("rlhf.")]


def at_work(client: SyncPrefectClient, deployment: UUID, name: str = "") -> FlowRun:
    """An active run of a deployment."""
    made = client.create_flow_run_from_deployment(deployment, name=name or None)
    client.set_flow_run_state(made.id, Running(), force=True)
    return made


def test_waiting_flow_runs_of_a_paused_schedule_or_a_busy_deployment_are_cancelled(
    client: SyncPrefectClient, harness: ControllerHarness, real_prefect: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.queries.PAGE", 2)
    paused, busy, other, idle = (deployed(client, name) for name in ("paused", "busy", "other", "idle"))
    waiting = {one: due(client, one) for one in (paused, busy, other, idle)}
    manual = client.create_flow_run_from_deployment(paused)
    # The tag of the flow runs counts: Prefect copies it from the deployment when it schedules them.
    for one in (busy, idle):
        client.update_flow_run(waiting[one].id, tags=[*waiting[one].tags, schedules.SKIP_IF_BUSY])
    (schedule,) = client.read_deployment_schedules(paused)
    client.update_deployment_schedule(paused, schedule.id, active=False)
    assert state(client, waiting[paused])[0] in ("Scheduled", "Late"), "Prefect leaves what was due"
    for one in (busy, other):
        at_work(client, one)
    found = schedules.cancel_skipped(harness.site.runs_dir)
    assert {flow_run.id for flow_run, _ in found} == {waiting[one].id for one in (paused, busy)}
    name, message = state(client, waiting[paused])
    assert (name, "its schedule was paused" in message) == ("Cancelled", True)
    name, message = state(client, waiting[busy])
    assert (name, "of the same deployment is still running" in message) == ("Cancelled", True)
    for left in (waiting[other], waiting[idle], manual):
        assert state(client, left)[0] in ("Scheduled", "Late")
    until(lambda: events(real_prefect, paused) == [schedules.EVENT], "its event", interval_s=ASKING_INTERVAL_S)
    assert schedules.cancel_skipped(harness.site.runs_dir) == []


def test_a_scheduled_run_taken_by_a_worker_does_not_start_while_its_deployment_is_busy(
    client: SyncPrefectClient, harness: ControllerHarness
) -> None:
    deployment = deployed(client, "nightly", schedules.SKIP_IF_BUSY)
    waiting = due(client, deployment)
    assert schedules.SKIP_IF_BUSY in waiting.tags
    run_dir = harness.run()
    crashed = at_work(client, deployment, run_dir.run_id)
    client.set_flow_run_state(crashed.id, Crashed(), force=True)
    with pytest.raises(CancelledRun):
        run_flow(rlhf_run, flow_run=client.read_flow_run(waiting.id), parameters={"config": "quickstart"})
    assert state(client, waiting) == (
        "Cancelled",
        f"skipped: run {run_dir.run_id} of the same deployment is still running",
    )
    assert [one.name for one in harness.site.runs_dir.iterdir()] == [run_dir.run_id], "it made no run"


@pytest.mark.parametrize("state", [Crashed, Paused])
def test_a_crashed_or_paused_flow_run_keeps_its_deployment_busy_only_while_its_run_continues(
    state: Callable[[], State], client: SyncPrefectClient, harness: ControllerHarness
) -> None:
    deployment = deployed(client, f"goes on as {state().name}")
    flow_run = client.create_flow_run_from_deployment(deployment)
    assert schedules.busy_with(client, flow_run, harness.site.runs_dir) == ""
    client.set_flow_run_state(at_work(client, deployment).id, state(), force=True)
    assert schedules.busy_with(client, flow_run, harness.site.runs_dir) == "", "it had made no run"
    run_dir = harness.run()
    client.set_flow_run_state(at_work(client, deployment, run_dir.run_id).id, state(), force=True)
    assert schedules.busy_with(client, flow_run, harness.site.runs_dir) == run_dir.run_id
    assert RunDir.of(harness.site.runs_dir, run_dir.run_id).spec.is_file()
    run_dir.spec.unlink()
    assert schedules.busy_with(client, flow_run, harness.site.runs_dir) == ""


@pytest.mark.parametrize("page_size", [200, 10])
def test_a_run_is_found_behind_any_number_of_newer_flow_runs(
    page_size: int, client: SyncPrefectClient, harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.queries.PAGE", page_size)
    deployment = deployed(client, f"many-{page_size}")
    flow_run = client.create_flow_run_from_deployment(deployment)
    busy = at_work(client, deployment)
    for _ in range(21):
        client.set_flow_run_state(client.create_flow_run_from_deployment(deployment).id, Crashed(), force=True)
    assert schedules.busy_with(client, flow_run, harness.site.runs_dir) == busy.name
    client.set_flow_run_state(busy.id, Completed(), force=True)
    assert schedules.busy_with(client, flow_run, harness.site.runs_dir) == ""


def test_of_two_scheduled_runs_due_at_once_the_earlier_one_starts(
    client: SyncPrefectClient, harness: ControllerHarness, tmp_path: Path
) -> None:
    deployment = deployed(client, "twice", schedules.SKIP_IF_BUSY)

    def planned() -> list[FlowRun]:
        return [one for one in client.read_flow_runs(limit=200) if one.deployment_id == deployment]

    until(lambda: len(planned()) > 1, "two are planned", interval_s=ASKING_INTERVAL_S)
    for one in planned():
        client.set_flow_run_state(one.id, Running(), force=True)
    first, second, *_ = sorted(planned(), key=schedules._order)
    assert schedules.busy_with(client, first, harness.site.runs_dir) == "", "the others will be skipped in its favour"
    assert schedules.busy_with(client, second, harness.site.runs_dir) == first.name
    flow_run = DrivingFlowRun(str(second.id), created=second.created)
    new_run("quickstart", (), harness.site, folder=tmp_path, flow_run=flow_run)
    assert schedules.busy_with(client, first, harness.site.runs_dir) == second.name, "it has begun"
