"""A whole site that is stopped, killed and cut off during runs: nothing is lost, and nothing is done twice."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from process_tools import until
from site_files import QUICK
from sites import Site, go, starts, state_of
from slurm_cluster import Cluster, needs_slurm

from flows.services import SERVICES
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState

pytestmark = [pytest.mark.site, needs_slurm, pytest.mark.end_to_end]

DRIVEN = [("Completed", False)]
ADOPTED = [("Crashed", False), ("Completed", True)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=4, kill_wait_s=1)
    with Site(tmp_path_factory.mktemp("site"), cluster=cluster, pretended=True, settings=QUICK).running() as site:
        yield site


def training(site: Site, number: int = 1) -> list[RunDir]:
    """Runs that were requested in Prefect all at once and are training."""
    return site.submit_at_once(number, "slurm-quickstart")


def agree(site: Site, run_dir: RunDir, state: str, *, flow_runs: list[tuple[str, bool]]) -> None:
    """Check that journal, history, Prefect and queue agree in the end, and that each attempt had one job."""
    until(lambda: state_of(run_dir).value == state)
    until(lambda: site.flow_runs(run_dir) == flow_runs)
    until(lambda: site.recorded(run_dir.run_id) == state)
    until(lambda: site.jobs(run_dir.run_id) == [])
    assert starts(run_dir) == ["1"]


def events(site: Site, run_dir: RunDir) -> list[str]:
    """Names of the events about a run in Prefect, in order of time."""
    wanted = {"filter": {"resource": {"id": [f"rlhf.run.{run_dir.run_id}"]}, "order": "ASC"}}
    return [one["event"] for one in site.ask("/events/filter", wanted)[1]["events"]]


def test_ended_in_the_middle_of_training_and_started_again(site: Site) -> None:
    (run_dir,) = training(site)
    output = site.rlhf("down").stdout
    assert run_dir.run_id in output, "stopping a site reports the active runs"
    assert [len(site.jobs(run_dir.run_id)), site.status()["server"]["state"]] == [1, "stopped"]
    site.rlhf("up")
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Running", True)])
    go(run_dir)
    agree(site, run_dir, "completed", flow_runs=ADOPTED)
    assert f"adopt {run_dir.run_id}" in site.log("daemon")
    assert f"{run_dir.run_id!r} - run is completed" in site.log("flow-runs")


def test_everything_is_killed_and_started_again(site: Site) -> None:
    (run_dir,) = training(site)
    site.kill("daemon", "worker", "server")
    assert len(site.jobs(run_dir.run_id)) == 1
    site.rlhf("up")
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Running", True)])
    go(run_dir)
    agree(site, run_dir, "completed", flow_runs=ADOPTED)


def test_a_terminated_worker_and_a_killed_daemon_come_back_with_the_next_up(site: Site) -> None:
    (run_dir,) = training(site)
    site.terminate("worker")
    site.kill("daemon")
    assert {name: one["state"] for name, one in site.status().items()} == {
        "server": "running",
        "worker": "stopped",
        "daemon": "stopped",
    }
    output = site.rlhf("up").stderr
    assert "server: was running" in output
    assert {"worker: started", "daemon: started"} <= {line.partition(" (")[0] for line in output.splitlines()}
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Running", True)])
    serving = site.commands()
    assert [sum(f"serve {name}" in line for line in serving) for name in SERVICES] == [1, 1, 1]
    go(run_dir)
    agree(site, run_dir, "completed", flow_runs=ADOPTED)


@dataclass
class Contested:
    """A run with a controller, and two more controllers that compete for it."""

    run_dir: RunDir
    terminal: "subprocess.Popen[str]"
    flow_run_id: str


@pytest.fixture(scope="module")
def contested(site: Site) -> Iterator[Contested]:
    """The contested run. Started early, because a competing controller waits a minute for the lease to expire."""
    (run_dir,) = training(site)
    terminal = site.start("resume", run_dir.run_id, "--no-prefect")
    _, resume = site.ask("/deployments/name/rlhf-run/resume")
    asked = {"parameters": {"run_id": run_dir.run_id}, "name": run_dir.run_id}
    _, second = site.ask(f"/deployments/{resume['id']}/create_flow_run", asked)
    yield Contested(run_dir, terminal, second["id"])
    terminal.kill()
    terminal.communicate()


@pytest.mark.usefixtures("contested")
def test_an_outage_of_the_server_with_cancellations_before_and_meanwhile(site: Site) -> None:
    cancelled_before, cancelled_meanwhile, goes_on = training(site, 3)
    site.cancel(site.flow_run(cancelled_before))
    site.kill("server")
    output = site.rlhf("cancel", cancelled_meanwhile.run_id).stdout
    assert "none of its jobs is running" in output
    go(goes_on)
    until(lambda: state_of(goes_on) is RunState.COMPLETED)
    site.rlhf("up")
    for run_dir in (cancelled_before, cancelled_meanwhile):
        agree(site, run_dir, "cancelled", flow_runs=[("Cancelled", False)])
    agree(site, goes_on, "completed", flow_runs=DRIVEN)
    until(lambda: events(site, cancelled_meanwhile)[-1:] == ["rlhf.run.cancelled"])
    until(lambda: events(site, goes_on)[-1:] == ["rlhf.run.completed"])
    for run_dir in (cancelled_before, cancelled_meanwhile, goes_on):
        assert len(events(site, run_dir)) == len(set(events(site, run_dir))), "nothing is published twice"


def test_of_several_controllers_the_first_one_keeps_the_run(site: Site, contested: Contested) -> None:
    """The others are started from a terminal, and as a second flow run."""
    _, refused = contested.terminal.communicate(timeout=100)
    assert contested.terminal.returncode == 1
    assert "another controller" in refused
    until(lambda: site.flow_state(contested.flow_run_id) == "Failed")
    assert state_of(contested.run_dir) is RunState.TRAINING
    go(contested.run_dir)
    flow_runs = [("Completed", False), ("Failed", False)]
    agree(site, contested.run_dir, "completed", flow_runs=flow_runs)


def test_after_down_nothing_is_left(site: Site) -> None:
    """The last test of this site: nothing of it is left."""
    site.rlhf("down")
    assert site.processes() == []
