"""A server killed while runs evaluate and train, on a site whose services are restarted."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tools import until
from sites import Site, go, state_of

from flows.services import SERVICES
from rlhf_core.schemas.attempts import RunState

pytestmark = [pytest.mark.site, pytest.mark.end_to_end, pytest.mark.timeout(400)]

DEAF = """
import asyncio
from flows import worker
from rlhf_core.cli.main import execute

async def only_beats(prefect_worker, beat):
    while True:
        if prefect_worker.is_setup:
            beat()
        await asyncio.sleep(1)

worker._watch_while_working = only_beats
execute(["serve", "worker"])
"""
"""A worker that has nothing but Prefect's own observer of cancellations."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site on this machine with jobs that do nothing."""
    site = Site(tmp_path / "home", pretended=True, restart_s=1.0, settings="reconcile_s = 2.0\ningest_s = 0.5")
    # Prefect's own observer asks every 10 s by default, and gives up after three questions without an answer.
    site.variables = {"PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    with site.running(services=False):
        yield site
        site.rlhf("down", code=None)


def is_up(site: Site) -> bool:
    return {one["state"] for one in site.status().values()} == {"running"}


def task_runs(site: Site, flow_run: str) -> dict[str, str]:
    wanted: dict[str, Any] = {"flow_runs": {"id": {"any_": [flow_run]}}}
    return {str(one["name"]): str(one["state"]["type"]) for one in site.ask("/task_runs/filter", wanted)[1]}


def test_a_killed_server_comes_back_by_itself_and_all_records_are_correct(site: Site) -> None:
    site.rlhf("up")
    ends, is_cancelled = (site.submit("quickstart", f"name={name}") for name in ("ends", "is-cancelled"))
    flow_runs = {one.run_id: site.flow_run(one) for one in (ends, is_cancelled)}
    before = site.pids()
    os.kill(before["server"], signal.SIGKILL)
    go(ends)
    until(lambda: state_of(ends) is RunState.COMPLETED)
    until(lambda: is_up(site))
    after = site.pids()
    assert after["server"] != before["server"]
    assert {after[name] for name in ("worker", "daemon")} == {before[name] for name in ("worker", "daemon")}
    until(lambda: site.flow_runs(ends) == [("Completed", False)])
    until(lambda: set(task_runs(site, flow_runs[ends.run_id]).values()) == {"COMPLETED"})
    site.cancel(flow_runs[is_cancelled.run_id])
    until(lambda: state_of(is_cancelled) is RunState.CANCELLED)
    until(lambda: site.flow_runs(is_cancelled) == [("Cancelled", False)])
    until(lambda: "agree" in site.rlhf("reconcile", "--dry-run").stdout)


def test_with_prefects_own_observer_cancellations_are_lost_after_the_outage(site: Site) -> None:
    """Negative control of the previous test, which shows when our own observer is no longer needed."""
    site.restart_s = 0.0  # the outage must last
    site.write_settings()
    site.rlhf("up", "server")
    site.serve("worker", "-c", DEAF)
    try:
        until(lambda: site.status()["worker"]["state"] == "running")
        run_dir = site.submit("quickstart", "name=never-heard")
        flow_run = site.flow_run(run_dir)
        os.kill(site.pids()["server"], signal.SIGKILL)
        until(lambda: "Cancellation polling task failed" in site.log("worker"))
        site.rlhf("up", "server")
        site.cancel(flow_run)
        with pytest.raises(AssertionError, match="waited 40 s"):
            until(lambda: site.flow_state(flow_run) == "Cancelled", timeout_s=40)
    finally:
        site.terminate("worker")


def test_any_killed_services_come_back(site: Site) -> None:
    site.rlhf("up")
    run_dir = site.submit("quickstart", "name=goes-on")
    for left in SERVICES:
        before = site.pids()
        for name in SERVICES:
            if name != left:
                os.kill(before[name], signal.SIGKILL)
        until(lambda: is_up(site), timeout_s=200)
        assert site.pids()[left] == before[left]
    go(run_dir)
    until(lambda: state_of(run_dir) is RunState.COMPLETED)
    until(lambda: site.flow_runs(run_dir) == [("Completed", False)])
