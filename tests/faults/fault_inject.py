"""Faults from outside: what is done to processes, nodes and services of a run, and when exactly.

Every function waits for its own moment to be over (an outage ends inside of it) and returns what is true about it.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from fault_services import Cluster, Postgres, PrefectServer
from fault_site import Site, agent_pids, last_step, workers

from rlhf_core.run_dir import RunDir


@dataclass(frozen=True)
class Truth:
    """What was done."""

    time: float
    """When, in seconds since the epoch."""
    step: int
    """Last step that was made before."""
    rank: int | None = None
    node: str | None = None
    moment_known: bool = True
    """False where only the beginning of the time is known in which it happens."""


@dataclass
class Place:
    """What a run stands on; what is not there cannot be taken away."""

    site: Site
    run: RunDir
    chance: random.Random
    cluster: Cluster | None = None
    postgres: Postgres | None = None
    prefect: PrefectServer | None = None
    memory_group: Path | None = None

    def truth(self, rank: int | None = None, node: str | None = None) -> Truth:
        """What is done now."""
        return Truth(time.time(), last_step(self.run), rank, node)

    @property
    def slurm(self) -> Cluster:
        """The cluster."""
        assert self.cluster is not None
        return self.cluster

    @property
    def job_id(self) -> str:
        """The scheduler's id of the newest attempt."""
        submission = self.run.attempts()[-1].submission
        return str(json.loads(submission.read_text())["job_id"])


def _signal_rank(place: Place, number: signal.Signals) -> Truth:
    victim = place.chance.choice(workers(place.run))
    truth = place.truth(victim.rank, victim.node)
    os.kill(victim.pid, number)
    return truth


def kill_rank(place: Place) -> Truth:
    """SIGKILL one rank."""
    return _signal_rank(place, signal.SIGKILL)


def stop_rank(place: Place) -> Truth:
    """SIGSTOP one rank."""
    return _signal_rank(place, signal.SIGSTOP)


def _kill_agent(place: Place, node: str) -> Truth:
    truth = place.truth(node=node)
    os.kill(agent_pids(place.run)[node], signal.SIGKILL)
    return truth


def _nodes(place: Place) -> list[str]:
    return place.cluster.allocated(place.job_id) if place.cluster else list(agent_pids(place.run))


def kill_leader(place: Place) -> Truth:
    """SIGKILL the agent of the first node."""
    return _kill_agent(place, _nodes(place)[0])


def kill_agent(place: Place) -> Truth:
    """SIGKILL the agent of another node, where there is another."""
    nodes = _nodes(place)
    return _kill_agent(place, place.chance.choice(nodes[1:] or nodes))


def node_down(place: Place) -> Truth:
    """Take a node out of service while the job runs on it; it stays out until the run is over."""
    node = place.chance.choice(place.slurm.allocated(place.job_id))
    truth = place.truth(node=node)
    place.slurm.node_down(node)
    return truth


def kill_slurmd(place: Place) -> Truth:
    """SIGKILL a node's slurmd and all that it started there, as a node that loses power would."""
    node = place.chance.choice(place.slurm.allocated(place.job_id))
    truth = place.truth(node=node)
    place.slurm.kill_node(node, agent_pids(place.run)[node])
    return truth


def _away(place: Place, stop: Callable[[], None], start: Callable[[], None], seconds: float) -> Truth:
    truth = place.truth()
    stop()
    time.sleep(seconds)
    start()
    return truth


def slurmctld_away(place: Place) -> Truth:
    """Take the controller of the cluster away for 30 s."""
    return _away(place, place.slurm.stop_controller, place.slurm.start_controller, 30)


def database_away(place: Place) -> Truth:
    """Take the database away for 60 s."""
    assert place.postgres is not None
    return _away(place, place.postgres.stop, place.postgres.start, 60)


def prefect_away(place: Place) -> Truth:
    """Take the Prefect server away for 60 s."""
    assert place.prefect is not None
    return _away(place, place.prefect.stop, place.prefect.start, 60)


def kill_flow(place: Place) -> Truth:
    """SIGKILL the process that drives the run, and go on with the run."""
    process = place.site.process
    assert process is not None
    truth = place.truth()
    process.send_signal(signal.SIGKILL)
    process.wait()
    place.site.start("resume", place.run.run_id, "--no-prefect")
    return truth


def wait_for_time_limit(place: Place) -> Truth:
    """Slurm asks to save when the limit is near; nothing is done from here."""
    truth = replace(place.truth(), moment_known=False)
    place.site.wait_for(lambda: len(place.run.attempts()) > 1, "the attempt after the time limit", 240)
    return truth


def preempt(place: Place) -> Truth:
    """A job of a partition that goes first takes the nodes."""
    truth = place.truth()
    place.slurm.preempt()
    return truth


def scancel(place: Place) -> Truth:
    """Somebody ends the job, not the run."""
    truth = place.truth()
    place.slurm.command("scancel", place.job_id)
    return truth


def ask_to_save(place: Place) -> Truth:
    """What Slurm does when the time limit is near: USR2 to the steps of the job."""
    truth = place.truth()
    if place.cluster is not None:
        place.cluster.command("scancel", "--signal=USR2", place.job_id)
    else:
        for agent in agent_pids(place.run).values():
            os.kill(agent, signal.SIGUSR2)
    return truth


def suspend(place: Place) -> Truth:
    """Suspend the job for longer than the floors, and resume it."""
    truth = place.truth()
    place.slurm.command("scontrol", "suspend", place.job_id)
    time.sleep(9)
    place.slurm.command("scontrol", "resume", place.job_id)
    return truth


def suspend_long(place: Place) -> Truth:
    """Suspend all processes of the job for a minute, agents and workers, and let them go on together."""
    truth = place.truth()
    if place.cluster is not None:
        place.slurm.command("scontrol", "suspend", place.job_id)
        time.sleep(60)
        place.slurm.command("scontrol", "resume", place.job_id)
        return truth
    agents = [psutil.Process(pid) for pid in agent_pids(place.run).values()]
    processes = [process for agent in agents for process in (agent, *agent.children(recursive=True))]
    for process in processes:
        process.suspend()
    time.sleep(60)
    for process in processes:
        process.resume()
    return truth


def wait_for_full_disk(place: Place) -> Truth:
    """The checkpoints fill the small disk by themselves."""
    truth = replace(place.truth(), moment_known=False)
    place.site.wait_for(lambda: place.site.ended, "the disk to be full", 240)
    return truth


def nothing(place: Place) -> Truth:
    """The fault is in the config."""
    return replace(place.truth(), moment_known=False)


OUTSIDE: dict[str, Callable[[Place], Truth]] = {
    function.__name__: function
    for function in (
        kill_rank,
        stop_rank,
        kill_leader,
        kill_agent,
        node_down,
        kill_slurmd,
        slurmctld_away,
        database_away,
        prefect_away,
        kill_flow,
        wait_for_time_limit,
        preempt,
        scancel,
        ask_to_save,
        suspend,
        suspend_long,
        wait_for_full_disk,
        nothing,
    )
}
"""By name, as the cases give it."""
