"""Faults from outside, injected into processes, nodes and services of a run, and their exact moments.

Every public function from :func:`kill_rank` on is a fault, named by the cases. It waits until its own fault is over (an
outage ends within it), and returns the truth about it.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
from fault_runs import DisturbedSite, Stuck, agent_pids, engine_parts, engines, program_ranks, workers
from fault_services import Cluster
from postgres_server import PostgresServer
from sites import Site, last_step

from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import read_model
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.engines import EngineAddress
from rlhf_core.schemas.reports import AgentEvent, MetricsLine


@dataclass(frozen=True)
class Truth:
    """Truth about a fault."""

    time: float
    """Moment of the fault, in seconds since the epoch."""
    step: int
    """Last step that was made before."""
    rank: int | None = None
    node: str | None = None
    moment_known: bool = True
    """False if the fault happens at an unknown moment after ``time``."""


@dataclass
class Place:
    """The surroundings of a run; a service that is missing cannot be taken away."""

    site: DisturbedSite
    run: RunDir
    chance: random.Random
    cluster: Cluster | None = None
    postgres: PostgresServer | None = None
    prefect: Site | None = None
    memory_group: Path | None = None

    def truth(self, rank: int | None = None, node: str | None = None) -> Truth:
        """Truth about a fault that is injected now."""
        return Truth(time.time(), last_step(self.run), rank, node)

    @property
    def slurm(self) -> Cluster:
        """The cluster of the run."""
        assert self.cluster is not None
        return self.cluster

    @property
    def job_id(self) -> str:
        """The scheduler's id of the newest attempt."""
        submission = self.run.attempts()[-1].submission
        return str(json.loads(submission.read_text())["job_id"])


def _signal_rank(place: Place, number: signal.Signals, *, of_program: bool = False) -> Truth:
    victim = place.chance.choice(program_ranks(place.run.run_id) if of_program else workers(place.run))
    truth = place.truth(victim.rank, victim.node)
    os.kill(victim.pid, number)
    return truth


def _signal_engine(place: Place, number: signal.Signals, *, a_part: bool = False) -> Truth:
    """Signal one rollout engine, and wait until it serves again: without both engines, the trainers would wait."""
    victim = place.chance.choice(engines(place.run))
    pid = place.chance.choice(engine_parts(victim.pid)) if a_part else victim.pid
    truth = place.truth(victim.rank, victim.node)
    path = place.run.attempts()[-1].engine(victim.rank)

    def generation() -> int:
        address = read_model(path, EngineAddress)
        return address.generation if address is not None else -1

    before = generation()
    os.kill(pid, number)
    place.site.wait_for(lambda: generation() > before, f"engine {victim.rank} to be back", 120)
    return truth


kill_rank = partial(_signal_rank, number=signal.SIGKILL)
stop_rank = partial(_signal_rank, number=signal.SIGSTOP)
kill_program_rank = partial(_signal_rank, number=signal.SIGKILL, of_program=True)
"""The rank's own process, not the worker that follows it."""
stop_program_rank = partial(_signal_rank, number=signal.SIGSTOP, of_program=True)
kill_engine = partial(_signal_engine, number=signal.SIGKILL)
stop_engine = partial(_signal_engine, number=signal.SIGSTOP)
kill_engine_part = partial(_signal_engine, number=signal.SIGKILL, a_part=True)
"""One of the processes in which a split engine samples."""
stop_engine_part = partial(_signal_engine, number=signal.SIGSTOP, a_part=True)


def pause_engine(place: Place) -> Truth:
    """Stop one rollout engine for less time than the floor, then continue it."""
    victim = place.chance.choice(engines(place.run))
    truth = place.truth(victim.rank, victim.node)
    os.kill(victim.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(victim.pid, signal.SIGCONT)
    return truth


def _nodes(place: Place) -> list[str]:
    return place.cluster.allocated(place.job_id) if place.cluster else list(agent_pids(place.run))


def _another(place: Place) -> str:
    """A node other than the first, if there is one."""
    nodes = _nodes(place)
    return place.chance.choice(nodes[1:] or nodes)


def _signal_agent(place: Place, node: str, number: signal.Signals) -> Truth:
    truth = place.truth(node=node)
    os.kill(agent_pids(place.run)[node], number)
    return truth


def kill_leader(place: Place) -> Truth:
    """SIGKILL the agent of the first node."""
    return _signal_agent(place, _nodes(place)[0], signal.SIGKILL)


def kill_agent(place: Place) -> Truth:
    """SIGKILL the agent of another node, if there is one."""
    return _signal_agent(place, _another(place), signal.SIGKILL)


def damage_and_kill_rank(place: Place) -> Truth:
    """Flip one byte of the newest checkpoint, then SIGKILL one rank: the workers restart in place."""
    newest = place.run.newest_checkpoint()
    assert newest is not None
    with (newest.model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    return kill_rank(place)


def damage_and_kill_agent(place: Place) -> Truth:
    """Truncate the manifest of the newest checkpoint, then SIGKILL an agent: a new attempt follows."""
    newest = place.run.newest_checkpoint()
    assert newest is not None
    os.truncate(newest.complete, 40)
    return kill_agent(place)


def delete_metrics(place: Place) -> Truth:
    """Delete the files that the first rank and the agents append to; require that they return complete, with an
    event."""
    restart = place.run.attempts()[-1].restarts()[-1]
    made = {line.step for line in read_models(restart.metrics, MetricsLine)}
    truth = place.truth()
    for path in (restart.metrics, *restart.root.glob("events-*.jsonl")):
        path.unlink()
    paths = place.site.wait_for(lambda: list(restart.root.glob("events-*-trainer-0.jsonl")), "an event about it", 60)
    (event,) = read_models(paths[0], AgentEvent)
    found = {line.step for line in read_models(restart.metrics, MetricsLine)}
    if not made < found or "were restored" not in event.message:
        raise Stuck(f"steps {sorted(made - found)} are gone from {restart.metrics}: {event.message}")
    return truth


def stop_leader(place: Place) -> Truth:
    """SIGSTOP the agent of the first node, and nothing else there."""
    return _signal_agent(place, _nodes(place)[0], signal.SIGSTOP)


def stop_agent(place: Place) -> Truth:
    """SIGSTOP the agent of another node."""
    return _signal_agent(place, _another(place), signal.SIGSTOP)


def stop_agent_and_rank(place: Place) -> Truth:
    """SIGSTOP an agent and a rank of its node."""
    truth = stop_agent(place)
    os.kill(next(one.pid for one in workers(place.run) if one.node == truth.node), signal.SIGSTOP)
    return truth


def _freeze(place: Place, node: str) -> Truth:
    truth = place.truth(node=node)
    place.slurm.freeze_node(node, agent_pids(place.run)[node])
    return truth


def freeze_leader(place: Place) -> Truth:
    """SIGSTOP everything on the first node: its slurmd, its agent, its ranks."""
    return _freeze(place, _nodes(place)[0])


def freeze_another(place: Place) -> Truth:
    """SIGSTOP everything on another node."""
    return _freeze(place, _another(place))


def cut_leader(place: Place) -> Truth:
    """Make the network swallow every packet of the first node."""
    node = _nodes(place)[0]
    truth = place.truth(node=node)
    place.slurm.cut_link(node)
    return truth


def remove_directory(place: Place) -> Truth:
    """Remove the run directory."""
    truth = place.truth()
    while place.run.spec.exists():
        shutil.rmtree(place.run.root, ignore_errors=True)  # agents write into it meanwhile
    return truth


def kill_and_stop(place: Place) -> Truth:
    """SIGKILL one rank and SIGSTOP another."""
    killed, stopped = place.chance.sample(workers(place.run), 2)
    truth = place.truth()
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(killed.pid, signal.SIGKILL)
    return truth


def stop_all_ranks(place: Place) -> Truth:
    """SIGSTOP every rank."""
    truth = place.truth()
    for worker in workers(place.run):
        os.kill(worker.pid, signal.SIGSTOP)
    return truth


def kill_all_agents(place: Place) -> Truth:
    """SIGKILL every agent."""
    truth = place.truth()
    for pid in agent_pids(place.run).values():
        os.kill(pid, signal.SIGKILL)
    return truth


def kill_stepd(place: Place) -> Truth:
    """SIGKILL the Slurm process that supervises the agent of a node."""
    node = place.chance.choice(_nodes(place))
    truth = place.truth(node=node)
    place.slurm.kill_stepd(agent_pids(place.run)[node])
    return truth


def kill_rank_without_controller(place: Place) -> Truth:
    """SIGKILL a rank while the controller is stopped, for longer than its lease lasts."""
    process = place.site.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    truth = kill_rank(place)
    time.sleep(90)
    process.send_signal(signal.SIGCONT)
    return truth


def kill_rank_with_locked_database(place: Place) -> Truth:
    """SIGKILL a rank while another process holds the database locked."""
    with sqlite3.connect(place.site.home / "history.db", isolation_level=None, timeout=60) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        truth = kill_rank(place)
        time.sleep(60)
        connection.execute("ROLLBACK")
    connection.close()
    return truth


def node_down(place: Place) -> Truth:
    """Take a node out of service while the job runs on it; it stays out until the run is over."""
    node = place.chance.choice(place.slurm.allocated(place.job_id))
    truth = place.truth(node=node)
    place.slurm.node_down(node)
    return truth


def kill_slurmd(place: Place) -> Truth:
    """SIGKILL a node's slurmd and everything that it started there, like a node that loses power."""
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
    return _away(place, partial(place.slurm.stop, "slurmctld"), partial(place.slurm.start, "slurmctld"), 30)


def database_away(place: Place) -> Truth:
    """Take the database away for 60 s."""
    assert place.postgres is not None
    return _away(place, place.postgres.stop, place.postgres.start, 60)


def prefect_away(place: Place) -> Truth:
    """Take the Prefect server away for 60 s."""
    assert place.prefect is not None
    return _away(place, partial(place.prefect.kill, "server"), partial(place.prefect.serve, "server"), 60)


def kill_flow(place: Place) -> Truth:
    """SIGKILL the process that drives the run, and resume driving it."""
    process = place.site.process
    assert process is not None
    truth = place.truth()
    process.send_signal(signal.SIGKILL)
    process.wait()
    place.site.drive("resume", place.run.run_id, "--no-prefect")
    return truth


def wait_for_time_limit(place: Place) -> Truth:
    """Do nothing: Slurm itself asks to save when the limit is near."""
    truth = replace(place.truth(), moment_known=False)
    place.site.wait_for(lambda: len(place.run.attempts()) > 1, "the attempt after the time limit", 240)
    return truth


def preempt(place: Place) -> Truth:
    """Preempt the run with a job of a partition that has priority for its nodes."""
    truth = place.truth()
    place.slurm.preempt()
    return truth


def scancel(place: Place) -> Truth:
    """Cancel the job, not the run, as a user may."""
    truth = place.truth()
    place.slurm.command("scancel", place.job_id)
    return truth


def ask_to_save(place: Place) -> Truth:
    """Send USR2 to the steps of the job, as Slurm does when the time limit is near."""
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
    """Suspend all processes of the job, agents and workers, for a minute, and continue them together."""
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
    """Do nothing: the checkpoints fill the small disk by themselves."""
    truth = replace(place.truth(), moment_known=False)
    place.site.wait_for(lambda: place.site.ended, "the disk to be full", 240)
    return truth


def nothing(place: Place) -> Truth:
    """Do nothing: the fault is in the config."""
    return replace(place.truth(), moment_known=False)
