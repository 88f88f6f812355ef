"""A stopped agent, as on a frozen node: the others end without it, and it must do no harm when it wakes up.

Real agents and real workers, with each node as Slurm would start it.
"""

import signal
import time
from pathlib import Path

import psutil
import pytest
from agent_runs import AgentRun, MakeRun
from process_tools import is_alive, until

from rlhf_core.files.whole import write_model
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.resources import GroupPlan, Placement, in_order

pytestmark = [pytest.mark.end_to_end, pytest.mark.training, pytest.mark.timeout(240)]


def training(agent_run: MakeRun, num_nodes: int = 2) -> AgentRun:
    """A run that trains on all its nodes for longer than any test takes."""
    run = agent_run(num_nodes=num_nodes, train={"num_steps": 50_000}, supervise={"floor_s": 60.0, "agent_floor_s": 5.0})
    run.start_all(num_nodes)
    until(lambda: len(run.pids(0)) == 2 * num_nodes and run.reached(0, 2))
    return run


def whole_node(run: AgentRun, index: int) -> list[psutil.Process]:
    """The agent of a node and all processes that it has started."""
    agent = psutil.Process(run.agents[index].pid)
    return [agent, *agent.children(recursive=True)]


def written(run: AgentRun) -> dict[Path, int]:
    """Time of the last write to each file of a run."""
    files = [path for path in run.run_dir.root.rglob("*") if path.is_file() and path.parent != run.run_dir.root]
    return {path: path.stat().st_mtime_ns for path in files}


def test_the_others_end_when_agent_0_is_stopped_and_a_newer_attempt_is_left_alone(agent_run: MakeRun) -> None:
    """The others use its store: the threads of their channels wait there for an answer that never comes."""
    run = training(agent_run)
    workers = run.pids(0)
    frozen = whole_node(run, 0)
    for process in frozen:
        process.suspend()
    assert run.agents[1].wait(60) == 1
    (loss,) = [event for event in run.events(0, "peer") if event.data.get("leader_lost")]
    assert (loss.node, loss.message) == ("node2", "agent 0 no longer responds; ending everything")
    assert not any(is_alive(pid) for rank, pid in workers.items() if run.nodes(0)[rank] == "node2")

    # The controller has continued without it.
    placement = Placement(attempt=2, num_nodes=2, phases=in_order(GroupPlan.on_all_nodes(Role.TRAINER, 2, 2)))
    write_model(run.run_dir.attempt(2).placement, placement)
    before = written(run)
    for process in frozen:
        process.resume()
    assert run.agents[0].wait(60) == 1
    assert not any(map(is_alive, workers.values()))
    assert not run.dir.outcome.exists()
    assert not run.restart(0).incident_files()
    # Workers that wake up may still write their own outcome files, which no other process writes.
    changed = {path for path, time_ns in written(run).items() if before.get(path) != time_ns}
    assert all(path.is_relative_to(run.restart(0).root) for path in changed), changed


def test_a_stopped_agent_0_that_wakes_up_blames_its_own_node(agent_run: MakeRun) -> None:
    """The run has not continued yet, but the others have ended, which is not the fault of their nodes."""
    run = training(agent_run)
    run.agents[0].send_signal(signal.SIGSTOP)
    assert run.agents[1].wait(60) == 1
    run.agents[0].send_signal(signal.SIGCONT)
    assert run.agents[0].wait(60) == 1
    outcome = run.outcome()
    assert (outcome.state, outcome.failure_kind) == (AttemptState.FAILED, FailureKind.NODE_LOST)
    assert run.incident(0).suspect_nodes == ("node1",)
    assert "was suspended for" in run.incident(0).message


def test_a_job_that_is_suspended_as_a_whole_continues(agent_run: MakeRun) -> None:
    """Control: the pause is longer than any allowed silence, but no agent was awake to notice a loss."""
    run = training(agent_run)
    workers = run.pids(0)
    everything = [process for index in range(2) for process in whole_node(run, index)]
    for process in everything:
        process.suspend()
    time.sleep(17)
    reached = len(run.restart(0).metrics.read_bytes().splitlines())
    for process in everything:
        process.resume()
    until(lambda: run.reached(0, reached + 20))
    assert not run.events(0, "peer") or all("have joined" in event.message for event in run.events(0, "peer"))
    run.order("cancel")
    assert run.finish_all() == [1, 1]
    assert run.outcome().state is AttemptState.CANCELLED
    assert not any(map(is_alive, workers.values()))
