"""Agents that start at different times: all wait for late ones, and only nodes that never arrive are blamed."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_runs import AgentRun, MakeRun
from control_fakes import Clock, FakeScheduler
from process_tools import until

from rlhf_core.files.appended import append_lines
from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.run_dir.run import RunDir, new_run_id
from rlhf_core.scheduler.base import JobState, JobStatus
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import AgentEvent
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.watchdog.attempt_failure import AttemptFailure, explain
from rlhf_core.watchdog.watcher import OUTCOME_TIMEOUT_S, Watcher
from rlhf_core.worker.agent.arrivals import AgentsMissing, Arrivals
from rlhf_core.worker.channel.signing import MessageSigner
from rlhf_core.worker.channel.store import AgentStoreLost, TcpAgentStore, host_agent_store
from rlhf_core.worker.nodes.membership import Nodes

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]


def sign_in(attempt: AttemptDir, node: str) -> None:
    """Leave the sign of an agent that has started but does nothing else yet."""
    event = AgentEvent(time=utc_now(), kind="agent_waiting", node=node, message="waiting")
    append_lines(attempt.restart(0).events(node), event)


def explained(run: AgentRun, num_nodes: int) -> AttemptFailure:
    """The controller's explanation after Slurm has ended the job of a failed agent."""
    names = tuple(f"node{number + 1}" for number in range(num_nodes))
    run.dir.scheduler_dir.mkdir(exist_ok=True)
    (run.dir.scheduler_dir / "1_0_log.out").write_text(
        run.printed(0) + "srun: error: node2: task 1: Exited with exit code 1\n"
    )
    job = JobStatus(JobState.ENDED, "FAILED", nodes=names, scheduler_state="FAILED")
    scheduler = FakeScheduler()
    scheduler.status = lambda submissions: {one.job_id: job for one in submissions}  # type: ignore[method-assign]
    placement = Placement.model_validate_json(run.dir.placement.read_bytes())
    submission = Submission(attempt=1, scheduler="slurm", job_id="1", command=())
    clock = Clock()
    watcher = Watcher(run.run_dir, placement, submission, scheduler, None, clock)
    watcher.poll()
    clock.now += OUTCOME_TIMEOUT_S
    return explain(run.run_dir, watcher.poll(), run.run_dir.read_spec().spec, first_attempt=1)


def test_an_absent_agent_0_is_blamed_and_not_the_agent_that_waited(agent_run: MakeRun) -> None:
    run = agent_run(num_nodes=2, supervise={"join_s": 2.0})
    run.start(1, 2)
    assert run.finish_all() == [1]
    failure = explained(run, 2)
    assert failure.kind is FailureKind.RENDEZVOUS
    assert failure.incident is not None
    assert failure.incident.suspect_nodes == ("node1",)
    assert failure.decision.excluded_nodes == ("node1",)
    assert "The agent of node1 did not arrive within 2 s (supervise.join_s), those of node2 did" in failure.message


def test_agent_0_blames_an_absent_node_and_not_the_present_one(agent_run: MakeRun) -> None:
    run = agent_run(num_nodes=3, supervise={"join_s": 8.0})
    run.start(1, 3)
    until(lambda: run.events(0, "agent_waiting"), "the second agent waits")
    run.start(0, 3)
    assert run.finish_all() == [1, 1], run.printed(1)
    outcome, incident = run.outcome(), run.incident(0)
    assert outcome.failure_kind is FailureKind.RENDEZVOUS
    assert (
        "The agent of node3 did not arrive within 8 s (supervise.join_s), those of node1, node2 did" in outcome.message
    )
    assert incident.suspect_nodes == ("node3",)
    assert run.decision(0).action is Action.NEW_ATTEMPT
    report = ProbeReport.model_validate_json(run.dir.probe_report.read_bytes())
    assert [(one.id, one.node) for one in report.results if one.status == "blocked"] == [("node.missing", "node3")]


def test_an_agent_0_that_starts_late_but_in_time_is_awaited(agent_run: MakeRun) -> None:
    """Control: the other agent waits, no node is blamed, and the run continues as if both had started at once."""
    run = agent_run(num_nodes=2, supervise={"join_s": 40.0})
    run.start(1, 2)
    until(lambda: run.events(0, "agent_waiting"), "the other agent waits")
    time.sleep(1.0)
    run.start(0, 2)
    assert run.finish_all() == [0, 0], run.printed(0) + run.printed(1)
    assert run.outcome().state is AttemptState.COMPLETED
    assert not run.restart(0).incident_files()


def test_an_agent_that_started_in_time_may_connect_later(agent_run: MakeRun) -> None:
    """Importing torch takes it longer than the remaining time.

    Control: the absent node above, which has not started.
    """
    run = agent_run(num_nodes=2, supervise={"join_s": 2.0})
    sign_in(run.dir, "node2")
    run.start(0, 2)
    until(lambda: [one for one in run.events(0, "agent_waiting") if one.node == "node1"], "agent 0 waits")
    time.sleep(3.0)
    run.start(1, 2)
    assert run.finish_all() == [0, 0], run.printed(0) + run.printed(1)


def test_a_node_that_contradicts_the_plan_waits_for_a_late_agent_0(agent_run: MakeRun) -> None:
    run = agent_run(num_nodes=2, supervise={"join_s": 40.0})
    run.start(1, 2, RLHF_NODES="")
    until(lambda: run.dir.node_facts("node2").exists(), "node2 has reported")
    time.sleep(2.0)
    run.start(0, 2)
    assert run.finish_all() == [1, 1], run.printed(1)
    assert run.outcome().failure_kind is FailureKind.NODE_UNFIT
    assert run.incident(0).suspect_nodes == ("node2",)


def test_nodes_that_all_contradict_the_plan_report_it_at_once(agent_run: MakeRun) -> None:
    """No agent 0 can arrive, so waiting is pointless."""
    run = agent_run(num_nodes=2, supervise={"join_s": 600.0})
    for index in (0, 1):
        run.start(index, 2, RLHF_NODES="")
    assert run.finish_all() == [1, 1]
    assert run.outcome().failure_kind is FailureKind.CONFIG


def test_a_node_that_contradicts_the_plan_reports_it_if_agent_0_is_absent(agent_run: MakeRun) -> None:
    run = agent_run(num_nodes=2, supervise={"join_s": 2.0})
    run.start(1, 2, RLHF_NODES="")
    assert run.finish_all() == [1]
    assert run.outcome().failure_kind is FailureKind.CONFIG


# ---------------------------------------------------------------------------------------------------------------------
# The search for agent 0's store


class Search:
    """The search of node2 for the store of an agent 0 on this machine."""

    def __init__(self, folder: Path) -> None:
        self.nodes = Nodes(("node1", "node2"), ("127.0.0.1", "127.0.0.1"), 1)
        self.attempt = RunDir(folder).attempt(1)
        self.marker = f"{new_run_id('toy')}/1"

    def run(self, limit_s: float, pause: Callable[[float], bool] | None = None) -> TcpAgentStore:
        def asleep(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        signer = MessageSigner(b"0" * 64, self.marker, 1)
        return Arrivals(self.nodes, self.attempt, limit_s).join(signer, pause or asleep)


@pytest.fixture
def search(tmp_path: Path) -> Search:
    return Search(tmp_path)


def test_an_agent_0_that_started_in_time_may_open_its_store_later(search: Search) -> None:
    """Importing torch takes it longer than the remaining time."""
    sign_in(search.attempt, "node1")
    opened: list[TcpAgentStore] = []

    def open_late() -> None:
        time.sleep(2.0)
        opened.append(host_agent_store("127.0.0.1", "127.0.0.1", MessageSigner(b"0" * 64, search.marker, 0)))

    threading.Thread(target=open_late).start()
    found = search.run(limit_s=0.5)
    assert [found.endpoint] == [one.endpoint for one in opened]


def test_an_agent_0_that_has_not_started_in_time_is_absent(search: Search) -> None:
    """Control of the test above."""
    with pytest.raises(AgentsMissing, match=r"The agent of node1 did not arrive within 0\.5 s") as failed:
        search.run(limit_s=0.5)
    assert failed.value.failure.nodes == ("node1",)


def test_two_agents_that_cannot_reach_each_other_blame_no_node(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "VERDICT_S"):
        monkeypatch.setattr(f"rlhf_core.worker.agent.arrivals.{name}", 0.5)
    sign_in(search.attempt, "node1")
    with pytest.raises(
        AgentsMissing, match="agents of node1 and node2 both arrived, but did not connect: agent 0 was not"
    ):
        search.run(limit_s=0.5)


def test_the_outcome_of_agent_0_ends_the_search(search: Search) -> None:
    sign_in(search.attempt, "node1")
    search.attempt.outcome.write_text("{}")
    with pytest.raises(AgentStoreLost, match="the attempt is ending"):
        search.run(limit_s=0.5)
