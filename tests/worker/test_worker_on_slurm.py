"""Agents on a real Slurm: its signals to the remaining agents after one has ended are not taken for a preemption."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from agent_runs import REPOSITORY, TARGETS, AgentRun, MakeRun
from process_tools import is_alive, until
from slurm_cluster import Cluster, needs_slurm

from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import read_all
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.failures import Action, Decision, FailureKind, Incident
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.resources import Placement
from rlhf_core.watchdog.attempt_failure import AttemptFailure, explain
from rlhf_core.watchdog.watcher import AttemptSnapshot, Watcher

pytestmark = [pytest.mark.end_to_end, pytest.mark.training, needs_slurm]

Submit = Callable[..., Watcher]

ONE_CANNOT_START = """
import os, sys, time
if "agent" in sys.orig_argv:
    from rlhf_core.schemas.failures import FailureKind
    from rlhf_core.worker.agent import phases
    from rlhf_core.worker.agent.job import AttemptAborted

    run_phase = phases.Agent._run_phase

    def one_fails_the_others_are_at_it(self, number, phase):
        if os.environ["SLURMD_NODENAME"] == "node3":
            time.sleep(2.0)
            raise AttemptAborted(FailureKind.IMPORT_ERROR, "libcuda.so.1: file too short")
        requests = self._supervisor.requests
        self._agreement.wait_until(lambda: requests.to_end or bool(requests.stop), 300.0)
        return run_phase(self, number, phase)

    phases.Agent._run_phase = one_fails_the_others_are_at_it
"""
"""Preparation between the start of an agent and that of its workers: it fails on one node, and takes long on others."""

FIRST_STARTS_TOO_LATE = """
import os, sys, time
if "agent" in sys.orig_argv and os.environ["SLURMD_NODENAME"] == "node1":
    time.sleep(300.0)
"""
"""An interpreter that takes minutes to start, as from a container image that is still being pulled."""

AS_IT_WAS = """
if "agent" in sys.orig_argv:
    from rlhf_core.schemas.attempts import AttemptState
    from rlhf_core.worker.agent import bootstrap
    from rlhf_core.worker.agent.decisions import GroupDecisions

    may_start = GroupDecisions.may_start

    def stop_comes_first(self, restart_dir):
        began_s = time.monotonic()
        while not self._requests.stop and time.monotonic() - began_s < 60.0:
            time.sleep(0.05)  # on a busy machine, the report of the other agent arrives before the signal
        stop = self._requests.stop
        if stop:
            return self.end(AttemptState.PREEMPTED, f"ended between two starts of the workers: {stop}")
        return may_start(self, restart_dir)

    GroupDecisions.may_start = stop_comes_first
    bootstrap._await_outcome = lambda channel: None
"""
"""Undoes what this file is about."""


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for each test, because a job with a killed task keeps its nodes for a while.

    KillWait is long enough for agents to report something, true or not (Slurm's default is 30 s).
    """
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3, kill_wait_s=20)
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture
def submit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Submit:
    """Submit the agents of a toy run, with code of the test in every Python on the nodes."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def start(run: AgentRun, own: str = "") -> Watcher:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "sitecustomize.py").write_text(own)
        placement = Placement.model_validate_json(run.dir.placement.read_bytes())
        command = [sys.executable, "-m", "rlhf_core.worker", "agent", "--run-dir", str(run.run_dir.root)]
        command += ["--attempt", "1", "--path", str(TARGETS)]
        command += ["--target", "trainer=fake_roles:train", "--target", "rollout=fake_roles:serve"]
        request = JobRequest(
            run_id=run.run_dir.run_id,
            placement=placement,
            scheduler_dir=run.dir.scheduler_dir,
            command=tuple(command),
            cpus_per_node=1,
            memory_gb=0,
            time_limit_s=600,
            slurm=SlurmSpec(environment={"PYTHONPATH": f"{tmp_path / 'own'}{os.pathsep}{REPOSITORY}"}),
        )
        scheduler = SlurmScheduler()
        return Watcher(run.run_dir, placement, scheduler.submit(request), scheduler, None)

    return start


def at_the_end(watcher: Watcher, run: AgentRun) -> tuple[AttemptSnapshot, AttemptFailure]:
    """The ended attempt as the controller sees it, and its diagnosis."""
    last = at_its_end(watcher)
    return last, explain(run.run_dir, last, run.run_dir.read_spec().spec, first_attempt=1)


def kill_agent(run: AgentRun, node: str) -> None:
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
        if str(run.run_dir.root) in words and "agent" in words and variables.get("SLURMD_NODENAME") == node:
            process.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"no agent of {node}")


def test_an_agent_that_fails_to_start_is_no_preemption(agent_run: MakeRun, submit: Submit) -> None:
    run = agent_run(num_nodes=3)
    snapshot, failure = at_the_end(submit(run, ONE_CANNOT_START), run)
    assert (snapshot.verdict.state, failure.kind) == (AttemptState.FAILED, FailureKind.IMPORT_ERROR)
    assert "node3: libcuda.so.1: file too short" in failure.message
    assert failure.decision.action is Action.STOP


def test_without_the_fix_it_would_be_taken_for_a_preemption(agent_run: MakeRun, submit: Submit) -> None:
    """Negative control. Slurm's state of the job at least keeps the kind correct; the reason is lost."""
    run = agent_run(num_nodes=3)
    snapshot, failure = at_the_end(submit(run, ONE_CANNOT_START + AS_IT_WAS), run)
    assert snapshot.outcome is not None
    assert snapshot.outcome.state is AttemptState.PREEMPTED
    assert (snapshot.verdict.state, failure.kind) == (AttemptState.FAILED, FailureKind.AGENT_KILLED)
    assert failure.decision.action is Action.NEW_ATTEMPT


def test_a_first_node_whose_agent_does_not_start_in_time_is_blamed(agent_run: MakeRun, submit: Submit) -> None:
    """Not the node whose agent gives up first, although it ends the job and is the only one named by srun."""
    run = agent_run(num_nodes=3, supervise={"join_s": 20.0})
    _, failure = at_the_end(submit(run, FIRST_STARTS_TOO_LATE), run)
    assert failure.incident is not None
    assert (failure.kind, failure.incident.suspect_nodes) == (FailureKind.RENDEZVOUS, ("node1",))
    assert "The agent of node1 did not arrive within 20 s" in failure.message
    assert (failure.decision.action, failure.decision.excluded_nodes) == (Action.NEW_ATTEMPT, ("node1",))


def test_an_agent_killed_between_two_starts_is_no_preemption(agent_run: MakeRun, submit: Submit) -> None:
    """For one that is killed while its workers train, see ``test_faults_short.py``."""
    run = agent_run(num_nodes=2, train={"num_steps": 5000}, supervise={"floor_s": 60.0, "agent_floor_s": 5.0})
    watcher = submit(run, ONE_CANNOT_START)  # which takes long on these two nodes
    until(lambda: run.events(0, "peer"))
    kill_agent(run, "node2")
    snapshot, failure = at_the_end(watcher, run)
    assert snapshot.verdict.state is AttemptState.FAILED
    assert failure.kind in (FailureKind.NODE_LOST, FailureKind.AGENT_KILLED)
    assert "node2" in failure.message
    assert failure.decision.action is Action.NEW_ATTEMPT


def test_a_real_preemption_is_recognised(agent_run: MakeRun, submit: Submit, cluster: Cluster) -> None:
    run = agent_run(num_nodes=2, train={"num_steps": 5000}, checkpoint={"every_num_steps": 5000})
    watcher = submit(run)
    until(lambda: len(run.pids(0)) == 4 and run.reached(0, 3))
    cluster.command("sbatch", "--partition=first", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
    snapshot, failure = at_the_end(watcher, run)
    assert (snapshot.verdict.state, failure.kind) == (AttemptState.PREEMPTED, FailureKind.PREEMPTION)
    assert run.run_dir.checkpoints()


def test_rollout_workers_are_restarted_alone_beside_the_trainers(agent_run: MakeRun, submit: Submit) -> None:
    """One rollout worker is killed, one stopped, one hangs; then a trainer is killed.

    With the control: each fault is found once, in its own group, and nothing is found before the first.
    """
    run = agent_run(
        num_nodes=2,
        rollouts=2,
        train={"num_steps": 60},
        supervise={"floor_s": 60.0, "setup_floor_s": 60.0, "suspect_s": 0.5},
    )
    run.script(
        {"role": "rollout", "generation": 0, "rank": 0, "step": 8, "do": "kill"},
        {"role": "rollout", "generation": 0, "rank": 2, "step": 16, "do": "stop"},
        {"role": "rollout", "generation": 0, "rank": 3, "step": 24, "do": "deadlock"},
        {"restart": 0, "rank": 3, "step": 40, "do": "kill"},
    )
    watcher = submit(run)
    until(lambda: run.reached(1, 5), timeout_s=120.0)
    live = {rank: pid for _, pids in run.beside() for rank, pid in pids.items()}
    assert all(map(is_alive, live.values())), "trainers were restarted, and they live on"

    assert at_its_end(watcher).verdict.state is AttemptState.COMPLETED
    paths = [path for restart in run.dir.restarts() for path in restart.incident_files()]
    found = read_all(paths, Incident)
    assert [(one.number, one.role, one.failure_kind, one.suspect_ranks) for one in found] == [
        (1, Role.ROLLOUT, FailureKind.WORKER_KILLED, (0,)),
        (2, Role.ROLLOUT, FailureKind.HANG, (2,)),
        (3, Role.ROLLOUT, FailureKind.HANG, (3,)),
        (4, Role.TRAINER, FailureKind.WORKER_KILLED, (3,)),
    ]
    assert [one.suspect_nodes for one in found] == [("node1",), ("node2",), ("node2",), ("node2",)]
    decisions = [one for restart in run.dir.restarts() for one in agent_decisions_of(restart)]
    assert [one.action for one in decisions] == [*[Action.RESTART_WORKERS] * 3, Action.RESTART_IN_PLACE]
    assert [(number, sorted(pids)) for number, pids in run.beside()[2:]] == [(1, [0]), (2, [2]), (3, [3])]
    # The trainers had a single start until one of them was killed, and made each of its steps once.
    assert len(run.pids(0)) == 4
    assert [line.step for line in read_models(run.restart(0).metrics, MetricsLine)] == [*range(1, 40)]


def at_its_end(watcher: Watcher) -> AttemptSnapshot:
    """The ended attempt as the controller sees it."""

    def snapshot() -> AttemptSnapshot | None:
        one = watcher.poll()
        time.sleep(0.5)
        return one if one.ended else None

    last: AttemptSnapshot = until(snapshot, timeout_s=240.0)
    return last


def agent_decisions_of(restart: RestartDir) -> list[Decision]:
    """Decisions of agent 0, in order."""
    return read_all(restart.decision_files(), Decision)
