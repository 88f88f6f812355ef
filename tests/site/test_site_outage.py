"""A server that is killed while runs evaluate and train, on a site whose services are started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shop_floor import Floor, free_port, until
from whole_site import go, prefect_says, stand_in, submitted

from flows.services import SERVICES
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir import RunDir
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
def floor(tmp_path: Path) -> Iterator[Floor]:
    """A site on this machine, whose jobs do nothing."""
    floor = Floor(tmp_path / "home", free_port(), restart_s=1.0, settings="reconcile_s = 2.0\ningest_s = 0.5")
    floor.variables = {
        "RLHF_SCHEDULER": "local",
        "RLHF_COMPUTE_PYTHON": str(stand_in(tmp_path)),
        # Prefect's own observer asks every 10 s by default, and gives up after three questions without an answer.
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    }
    floor.write_settings()
    try:
        yield floor
    finally:
        floor.start("down").communicate(timeout=100)
        floor.kill_all()


def is_up(floor: Floor) -> bool:
    return {one["state"] for one in floor.status().values()} == {"running"}


def flow_run_of(floor: Floor, run_dir: RunDir) -> str:
    (found,) = floor.ask("/flow_runs/filter", {"flow_runs": {"name": {"any_": [run_dir.run_id]}}})[1]
    return str(found["id"])


def task_runs(floor: Floor, flow_run: str) -> dict[str, str]:
    wanted: dict[str, Any] = {"flow_runs": {"id": {"any_": [flow_run]}}}
    return {str(one["name"]): str(one["state"]["type"]) for one in floor.ask("/task_runs/filter", wanted)[1]}


def test_a_killed_server_comes_back_by_itself_and_every_book_is_right(floor: Floor) -> None:
    floor.rlhf("up")
    ends, is_cancelled = (submitted(floor, "quickstart", f"name={name}") for name in ("ends", "is-cancelled"))
    flow_runs = {one.run_id: flow_run_of(floor, one) for one in (ends, is_cancelled)}
    before = floor.pids()
    os.kill(before["server"], signal.SIGKILL)
    go(ends)
    until(lambda: read_record(ends).state is RunState.COMPLETED)
    until(lambda: is_up(floor))
    after = floor.pids()
    assert after["server"] != before["server"]
    assert {after[name] for name in ("worker", "daemon")} == {before[name] for name in ("worker", "daemon")}
    until(lambda: prefect_says(floor, ends) == "Completed")
    until(lambda: set(task_runs(floor, flow_runs[ends.run_id]).values()) == {"COMPLETED"})
    floor.cancel(flow_runs[is_cancelled.run_id])
    until(lambda: read_record(is_cancelled).state is RunState.CANCELLED)
    until(lambda: prefect_says(floor, is_cancelled) == "Cancelled")
    until(lambda: "agree" in floor.rlhf("reconcile", "--dry-run").stdout)


def test_a_worker_with_prefects_own_observer_is_deaf_after_the_outage(floor: Floor) -> None:
    """Negative control of the test before, and what says that our own is not needed any more."""
    floor.restart_s = 0.0  # the outage is to last
    floor.write_settings()
    floor.rlhf("up", "server")
    with (floor.home / "logs" / "deaf.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-c", DEAF], env=floor.environment(), stdout=log, stderr=log)
    try:
        until(lambda: floor.status()["worker"]["state"] == "running")
        run_dir = submitted(floor, "quickstart", "name=never-heard")
        flow_run = flow_run_of(floor, run_dir)
        os.kill(floor.pids()["server"], signal.SIGKILL)
        until(lambda: "Cancellation polling task failed" in (floor.home / "logs" / "deaf.log").read_text())
        floor.rlhf("up", "server")
        floor.cancel(flow_run)
        with pytest.raises(AssertionError, match="it did not happen"):
            until(lambda: prefect_says(floor, run_dir) == "Cancelled", 40)
    finally:
        process.terminate()
        process.wait(60)


def test_whichever_services_are_killed_come_back(floor: Floor) -> None:
    floor.rlhf("up")
    run_dir = submitted(floor, "quickstart", "name=goes-on")
    for left in SERVICES:
        before = floor.pids()
        for name in SERVICES:
            if name != left:
                os.kill(before[name], signal.SIGKILL)
        until(lambda: is_up(floor), 200)
        assert floor.pids()[left] == before[left]
    go(run_dir)
    until(lambda: read_record(run_dir).state is RunState.COMPLETED)
    until(lambda: prefect_says(floor, run_dir) == "Completed")
