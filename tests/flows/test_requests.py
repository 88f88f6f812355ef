"""Requests in Prefect without a run yet, as listed by `rlhf runs`: without Prefect, from the daemon's file."""

import json
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from harness import ControllerHarness
from prefect.client.schemas.objects import FlowRun
from prefect.states import Failed, Running, Scheduled
from process_tools import Rlhf
from sites import Site

from flows.deployments import requests
from flows.flow_runs.driving import requested_at
from flows.queries import RUN_FLOW
from flows.run import rlhf_run
from flows.server.clients import api_client
from rlhf_core.schemas.base import utc_now


def test_requests_that_wait_or_were_refused_are_listed_with_the_runs(
    harness: ControllerHarness, real_prefect: Site, monkeypatch: pytest.MonkeyPatch, rlhf: Rlhf
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(harness.site.home))
    monkeypatch.setenv("COLUMNS", "200")  # wide enough that no expected text is wrapped
    run_dir = harness.run()
    flow = f"{RUN_FLOW}-of-this-test"
    assert "Unknown: the site daemon" in rlhf("runs", "--queued").stdout
    with real_prefect.in_use(), api_client() as client:
        renamed = rlhf_run.with_options(name=flow)
        waits = client.create_flow_run(renamed, name="waits", parameters={"owner": "ada"}, state=Scheduled())
        refused = client.create_flow_run(renamed, name="refused", state=Running())
        with_run = client.create_flow_run(renamed, name=run_dir.run_id, state=Running())
        resumes = client.create_flow_run(renamed, name="resumes", parameters={"run_id": run_dir.run_id})
        for one in (refused, with_run):
            client.set_flow_run_state(one.id, Failed(message="the form cannot be used:\n  nodes: found -1"), force=True)
        client.set_flow_run_state(resumes.id, Scheduled(scheduled_time=utc_now() + timedelta(hours=1)), force=True)
        requests.keep(harness.site, harness.store, flow, utc_now())
    program = "import sys; from rlhf_core.cli.main import execute; execute(['runs', '--queued', '--json']); "
    program += "print('prefect' in sys.modules, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "False", "it works, and is fast, without Prefect"
    listed = {one["run_id"]: one for one in json.loads(found.stdout)}
    assert {name: one["state"] for name, one in listed.items()} == {"waits": "waiting", "refused": "refused"}
    assert listed["waits"]["owner"] == "ada"
    assert str(waits.id) in listed["waits"]["url"]
    output = " ".join(rlhf("runs").stdout.split())
    assert "Requests in Prefect that are not runs" in output
    assert "nodes: found -1" in output
    assert "Requests in Prefect" not in rlhf("runs", "--name", "other").stdout


def test_a_request_is_listed_before_planned_ones_and_for_a_day_after_its_end(
    harness: ControllerHarness, real_prefect: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, now = f"{RUN_FLOW}-waiting-long", utc_now()
    monkeypatch.setattr(requests, "_AT_MOST", 1)
    with real_prefect.in_use(), api_client() as client:
        renamed = rlhf_run.with_options(name=flow)

        def asked_for(name: str, days: int) -> uuid.UUID:
            state = Scheduled(scheduled_time=now + timedelta(days=days))
            return client.create_flow_run(renamed, name=name, state=state).id

        asked_for("due", -3)
        asked_for("planned", 1)
        client.set_flow_run_state(asked_for("refused", -3), Failed(message="no such config"), force=True)
        found = requests.keep(harness.site, harness.store, flow, now).requests
        assert [one.run_id for one in found] == ["due", "refused"]
        later = requests.keep(harness.site, harness.store, flow, now + timedelta(days=2)).requests
        assert [one.run_id for one in later] == ["due"]


def test_a_run_of_a_schedule_has_the_time_it_was_due() -> None:
    """Prefect creates the flow runs of a schedule days before."""
    created, due = datetime(2026, 3, 1, 12, tzinfo=UTC), datetime(2026, 3, 4, 2, tzinfo=UTC)

    def flow_run(scheduled: bool) -> FlowRun:
        return FlowRun(flow_id=uuid.uuid4(), created=created, expected_start_time=due, auto_scheduled=scheduled)

    assert requested_at(flow_run(scheduled=True)) == due
    assert requested_at(flow_run(scheduled=False)) == created, "one that a user plans for later"
