"""A whole site that is ended, killed and cut off in the middle of runs: nothing is lost, nothing is done twice."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from shop_floor import Floor, free_port, until
from slurm_cluster import WHY_NOT, Cluster, missing_programs
from whole_site import Site, events, go, stand_in, state_of

from flows.services import SERVICES
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.attempts import RunState

pytestmark = [
    pytest.mark.site,
    pytest.mark.skipif(bool(missing_programs()), reason=WHY_NOT),
    pytest.mark.end_to_end,
]

DRIVEN = [("Completed", False)]
ADOPTED = [("Crashed", False), ("Completed", True)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=4, kill_wait_s=1)
    cluster.up()
    floor = Floor(folder / "home", free_port(), settings="reconcile_s = 1.0\ningest_s = 0.5")
    floor.variables = {
        **cluster.environment,
        "RLHF_SCHEDULER": "slurm",
        "RLHF_COMPUTE_PYTHON": str(stand_in(folder)),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    floor.write_settings()
    try:
        floor.rlhf("up")
        yield Site(floor, cluster)
    finally:
        floor.kill_all()
        cluster.down()


def test_ended_in_the_middle_of_training_and_started_again(site: Site) -> None:
    (run_dir,) = site.submit()
    said = site.floor.rlhf("down").stdout
    assert run_dir.run_id in said, "who ends a site is told what goes on"
    assert [len(site.queue(run_dir)), site.floor.status()["server"]["state"]] == [1, "stopped"]
    site.floor.rlhf("up")
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Running", True)])
    go(run_dir)
    site.agrees(run_dir, "completed", jobs=["1"], flow_runs=ADOPTED)
    assert f"adopt {run_dir.run_id}" in site.log("daemon")
    assert f"{run_dir.run_id!r} - run is completed" in site.log("flow-runs")


def test_everything_is_killed_and_started_again(site: Site) -> None:
    (run_dir,) = site.submit()
    site.kill("daemon", "worker", "server")
    assert len(site.queue(run_dir)) == 1
    site.floor.rlhf("up")
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Running", True)])
    go(run_dir)
    site.agrees(run_dir, "completed", jobs=["1"], flow_runs=ADOPTED)


def test_a_terminated_worker_and_a_killed_daemon_come_back_with_the_next_up(site: Site) -> None:
    (run_dir,) = site.submit()
    site.terminate("worker")
    site.kill("daemon")
    assert {name: one["state"] for name, one in site.floor.status().items()} == {
        "server": "running",
        "worker": "stopped",
        "daemon": "stopped",
    }
    said = site.floor.rlhf("up").stderr
    assert "server: was running" in said
    assert {"worker: started", "daemon: started"} <= {line.partition(" (")[0] for line in said.splitlines()}
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Running", True)])
    serving = [" ".join(one.cmdline()) for one in site.floor.processes()]
    assert [sum(f"serve {name}" in line for line in serving) for name in SERVICES] == [1, 1, 1]
    go(run_dir)
    site.agrees(run_dir, "completed", jobs=["1"], flow_runs=ADOPTED)


@dataclass
class Contested:
    """A run that is driven, and two more controllers that would have it."""

    run_dir: RunDir
    terminal: "subprocess.Popen[str]"
    flow_run_id: str


@pytest.fixture(scope="module")
def contested(site: Site) -> Iterator[Contested]:
    """Begun early: who wants a run waits for a minute whether its lease runs out."""
    (run_dir,) = site.submit()
    terminal = site.floor.start("resume", run_dir.run_id, "--no-prefect")
    _, resume = site.floor.ask("/deployments/name/rlhf-run/resume")
    asked = {"parameters": {"run_id": run_dir.run_id}, "name": run_dir.run_id}
    _, second = site.floor.ask(f"/deployments/{resume['id']}/create_flow_run", asked)
    yield Contested(run_dir, terminal, second["id"])
    terminal.kill()
    terminal.communicate()


@pytest.mark.usefixtures("contested")
def test_an_outage_of_the_server_with_cancellations_before_and_meanwhile(site: Site) -> None:
    cancelled_before, cancelled_meanwhile, goes_on = site.submit(3)
    wanted = {"flow_runs": {"name": {"any_": [cancelled_before.run_id]}}}
    (flow_run,) = site.floor.ask("/flow_runs/filter", wanted)[1]
    asked = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
    assert site.floor.ask(f"/flow_runs/{flow_run['id']}/set_state", asked)[0] in (200, 201)
    site.kill("server")
    said = site.floor.rlhf("cancel", cancelled_meanwhile.run_id).stdout
    assert "none of its jobs is at work" in said
    go(goes_on)
    until(lambda: state_of(goes_on) is RunState.COMPLETED)
    site.floor.rlhf("up")
    for run_dir in (cancelled_before, cancelled_meanwhile):
        site.agrees(run_dir, "cancelled", jobs=["1"], flow_runs=[("Cancelled", False)])
    site.agrees(goes_on, "completed", jobs=["1"], flow_runs=DRIVEN)
    until(lambda: events(site, cancelled_meanwhile)[-1:] == ["rlhf.run.cancelled"])
    until(lambda: events(site, goes_on)[-1:] == ["rlhf.run.completed"])
    for run_dir in (cancelled_before, cancelled_meanwhile, goes_on):
        assert len(events(site, run_dir)) == len(set(events(site, run_dir))), "nothing is told twice"


def test_of_several_controllers_the_first_one_keeps_the_run(site: Site, contested: Contested) -> None:
    """The others come from a terminal, and as a second flow run."""
    _, refused = contested.terminal.communicate(timeout=100)
    assert contested.terminal.returncode == 1
    assert "another controller" in refused
    until(lambda: site.floor.state_of(contested.flow_run_id) == "Failed", 100)
    assert state_of(contested.run_dir) is RunState.TRAINING
    go(contested.run_dir)
    flow_runs = [("Completed", False), ("Failed", False)]
    site.agrees(contested.run_dir, "completed", jobs=["1"], flow_runs=flow_runs)


def test_the_end_of_it(site: Site) -> None:
    """The last test of this site: nothing of it is left."""
    site.floor.rlhf("down")
    assert site.floor.processes() == []
