"""Several agents on one attempt, each as if on a node of its own.

Agent 0 detects a fault on any node and names the node, and all agents continue together.
"""

import os
import signal
import subprocess
import time

import pytest
from agent_runs import AgentRun, MakeRun
from process_tools import is_alive, until

from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import write_model
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import AgentStatus, MetricsLine
from rlhf_core.schemas.resources import JOB_VARIABLE, GroupPlan, Placement, job_marker

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]


DRIVER_BLOCKS = """
import os, time
import rlhf_core.worker.{module} as module
from rlhf_core.worker.supervision import main_thread, supervisor
supervisor.LEADER_LOST_TIMEOUT_S = 5.0
if os.environ["SLURMD_NODENAME"] == "{node}":
    main_thread.FACTS_S = 5.0
    module.open_gpus = lambda: time.sleep(1000)
"""
"""Blocks the agent of a node in its first call into the driver, and shortens its limit; that of a busy one stays."""


def rank_on(run: AgentRun, restart: int, node: str) -> int:
    """The first rank of a node."""
    return min(rank for rank, where in run.nodes(restart).items() if where == node)


def started(run: AgentRun, restart: int, num_ranks: int) -> bool:
    return len(run.pids(restart)) == num_ranks and run.reached(restart, 2)


def test_without_a_fault_nothing_is_found_and_all_end_together(agent_run: MakeRun) -> None:
    """Negative control of this file."""
    run = agent_run(evaluator=True, num_nodes=3, supervise={"floor_s": 20.0})
    run.start_all(3)
    assert run.finish_all() == [0, 0, 0], run.printed(0)
    outcome = run.outcome()
    assert (outcome.state, outcome.num_restarts, outcome.last_step) == (AttemptState.COMPLETED, 0, 20)
    assert sorted(run.nodes(0).values()) == ["node1"] * 2 + ["node2"] * 2 + ["node3"] * 2
    assert not run.restart(0).incident_files()
    assert (run.run_dir.root / "evaluated-5").exists()
    for node in ("node1", "node2", "node3"):
        status = AgentStatus.model_validate_json(run.restart(0).agent_status(node).read_bytes())
        assert {rank.node for rank in status.ranks} <= {node}


def test_a_killed_and_a_stopped_rank_of_other_nodes_are_named_and_started_again(agent_run: MakeRun) -> None:
    run = agent_run(
        num_nodes=2,
        train={"num_steps": 60},
        supervise={"floor_s": 4.0, "setup_floor_s": 60.0, "max_restarts": 3},
        checkpoint={"every_num_steps": 5},
    )
    run.start_all(2)
    until(lambda: started(run, 0, 4))
    killed = rank_on(run, 0, "node2")
    os.kill(run.pids(0)[killed], signal.SIGKILL)
    until(lambda: started(run, 1, 4))
    stopped = rank_on(run, 1, "node2")
    os.kill(run.pids(1)[stopped], signal.SIGSTOP)
    assert run.finish_all() == [0, 0], run.printed(0)

    first = run.incident(0)
    assert (first.failure_kind, first.suspect_ranks) == (FailureKind.WORKER_KILLED, (killed,))
    assert first.suspect_nodes == ("node2",)
    second = run.incident(1)
    assert (second.failure_kind, second.suspect_ranks) == (FailureKind.HANG, (stopped,))
    assert second.suspect_nodes == ("node2",)
    assert second.detected_after_s is not None
    assert second.detected_after_s > 4.0
    # Evidence from both nodes was saved before any worker was killed.
    evidence = run.run_dir.root / second.evidence_dir
    assert {path.name for path in evidence.glob("stack-*.txt")} == {
        f"stack-{node}-{local}.txt" for node in ("node1", "node2") for local in (0, 1)
    }
    kinds = [(event.node, event.kind) for event in run.events(1) if event.kind in ("evidence", "killed", "verdict")]
    assert kinds.index(("node2", "evidence")) < kinds.index(("node2", "killed"))
    assert kinds.index(("node1", "evidence")) < kinds.index(("node1", "verdict"))
    outcome = run.outcome()
    assert (outcome.state, outcome.num_restarts, outcome.last_step) == (AttemptState.COMPLETED, 2, 60)
    steps = [line.step for number in range(3) for line in read_models(run.restart(number).metrics, MetricsLine)]
    assert set(steps) == set(range(1, 61))


def test_an_agent_that_falls_silent_is_a_lost_node(agent_run: MakeRun) -> None:
    run = agent_run(num_nodes=2, train={"num_steps": 5000}, supervise={"floor_s": 60.0, "agent_floor_s": 5.0})
    run.start_all(2)
    until(lambda: started(run, 0, 4))
    workers = run.pids(0)
    run.agents[1].send_signal(signal.SIGSTOP)
    assert run.agents[0].wait(60) == 1
    outcome = run.outcome()
    assert (outcome.state, outcome.failure_kind) == (AttemptState.FAILED, FailureKind.NODE_LOST)
    assert run.incident(0).suspect_nodes == ("node2",)
    assert run.decision(0).action is Action.NEW_ATTEMPT
    # After waking up, it finds agent 0 gone and leaves nothing behind.
    run.agents[1].send_signal(signal.SIGCONT)
    assert run.agents[1].wait(60) == 1
    assert not any(map(is_alive, workers.values()))


@pytest.mark.parametrize(("module", "node"), [("nodes.facts", "node1"), ("agent.gpu_wait", "node2")])
def test_a_driver_that_blocks_an_agent_before_the_workers_start_loses_its_node(
    agent_run: MakeRun, module: str, node: str
) -> None:
    """NVML does not return on a node with a broken GPU, and its agent asks before anything is supervised."""
    run = agent_run(num_nodes=2, supervise={"floor_s": 60.0, "setup_floor_s": 5.0})
    placement = Placement.model_validate_json(run.dir.placement.read_bytes())
    probe = (GroupPlan.on_all_nodes(Role.PROBE, 2, 2),)
    phases = (probe, *placement.phases) if module == "nodes.facts" else placement.phases
    write_model(run.dir.placement, placement.model_copy(update={"gpus_per_node": 1, "phases": phases}))
    run.change = DRIVER_BLOCKS.format(module=module, node=node)
    run.start_all(2)
    assert run.finish_all() == [1, 1], run.printed(0)
    assert {event.data["node_lost"] for event in run.events(0, "peer") if "node_lost" in event.data} == {node}
    assert f"the main thread of the agent of {node} has been stuck for" in run.printed(int(node[-1]) - 1)
    assert not run.pids(0)


def test_a_signal_to_save_reaches_all_nodes_and_ends_the_attempt_as_preempted(agent_run: MakeRun) -> None:
    run = agent_run(num_nodes=2, evaluator=True, train={"num_steps": 5000}, checkpoint={"every_num_steps": 5000})
    run.start_all(2)
    until(lambda: started(run, 0, 4))
    for pid in run.pids(0).values():
        os.kill(pid, signal.SIGUSR2)  # some clusters send it to every process of a job; workers leave it to the agent
    # Slurm sends this signal near the time limit; here only one agent receives it.
    run.agents[1].send_signal(signal.SIGUSR2)
    assert run.finish_all() == [0, 0], run.printed(0)
    outcome = run.outcome()
    assert outcome.state is AttemptState.PREEMPTED
    assert run.run_dir.checkpoints()[-1].step == outcome.last_step
    assert not (run.run_dir.root / "evaluated-0").exists()


def test_a_job_with_fewer_nodes_than_planned_is_refused_with_both_numbers(agent_run: MakeRun) -> None:
    run = agent_run(num_nodes=3)
    run.start_all(2)
    assert run.finish_all() == [1, 1]
    outcome = run.outcome()
    assert outcome.failure_kind is FailureKind.CONFIG
    assert "planned for 3 nodes, but RLHF_NODES names 2 (node1, node2)" in outcome.message


def test_an_agent_that_cannot_continue_is_reported(agent_run: MakeRun) -> None:
    """Only node 2 sees a different placement, as with a shared folder that is not actually shared."""
    run = agent_run(num_nodes=2, train={"num_steps": 5000})
    run.start(0, 2)
    time.sleep(0.5)
    path = run.dir.placement
    good = Placement.model_validate_json(path.read_bytes())
    until(lambda: run.events(0, "agent_started"))
    write_model(path, good.model_copy(update={"num_nodes": 7}))
    run.start(1, 2)
    assert run.finish_all() == [1, 1]
    outcome = run.outcome()
    assert outcome.failure_kind is FailureKind.NODE_UNFIT
    assert "planned for 7 nodes" in outcome.message
    report = ProbeReport.model_validate_json(run.dir.probe_report.read_bytes())
    assert [(one.id, one.node) for one in report.results if one.status == "blocked"] == [("node.identity", "node2")]


def test_remaining_processes_of_an_older_attempt_are_killed(agent_run: MakeRun) -> None:
    """Slurm leaves the tasks of a node whose slurmd died. With the control: those of another run are not touched."""
    run = agent_run()
    marked = [
        subprocess.Popen(["sleep", "120"], env={**os.environ, JOB_VARIABLE: marker})
        for marker in (job_marker(run.run_dir.run_id, 0), job_marker("someone-else", 0))
    ]
    try:
        run.start()
        assert run.finish()[0] == 0
        assert marked[0].wait(10) == -signal.SIGKILL
        assert marked[1].poll() is None
    finally:
        for process in marked:
            process.kill()
            process.wait()
