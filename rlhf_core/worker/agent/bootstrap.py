"""Startup and shutdown of an agent: its place among the nodes, its channel to the others, and the outcome."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from rlhf_core.diagnosis.classify import Evidence, classify
from rlhf_core.errors import RunDirError
from rlhf_core.files.lookups import is_there
from rlhf_core.files.whole import read_model, shared_secret
from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.agent_messages import AgreedStep, NodeState, Orders
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AttemptOutcome
from rlhf_core.schemas.resources import Placement, job_marker
from rlhf_core.schemas.run import RunSpec
from rlhf_core.survival import Survived
from rlhf_core.worker import processes
from rlhf_core.worker.agent.arrivals import AgentsMissing, Arrivals, longest_wait_s
from rlhf_core.worker.agent.job import AttemptAborted, Job
from rlhf_core.worker.agent.leader import OUTCOME_TIMEOUT_S, Leader
from rlhf_core.worker.agent.phases import Agent, try_to_write
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.signing import MessageSigner
from rlhf_core.worker.channel.store import AgentStore, AgentStoreLost, MemoryAgentStore, host_agent_store
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.nodes import facts as node_facts
from rlhf_core.worker.nodes.membership import Nodes, NodesError
from rlhf_core.worker.roles import COMMAND
from rlhf_core.worker.signals import ENDING, SignalInbox
from rlhf_core.worker.supervision.exit_deadline import ExitDeadline

_GOOD_ENDS = (AttemptState.COMPLETED, AttemptState.PREEMPTED)


@dataclass
class AgentSite:
    """State of an agent before it has read the run directory: its place, and the channel it reports to."""

    run_dir: RunDir
    attempt: int
    nodes: Nodes
    inbox: SignalInbox
    leader: Leader
    events: EventLog
    channel: AgentChannel | None = None

    def record_exit(self, why: str, state: AttemptState = AttemptState.FAILED) -> None:
        """Record why this agent exits. A lost agent 0 has left no outcome, so only the other agents can report it."""
        leader_lost = self.channel is not None and self.channel.is_lost
        self.events.add("agent_ended", why, state=state, leader_lost=leader_lost)


def run_agent(run_dir: Path, attempt: int, targets: Mapping[Role, str], import_paths: Sequence[Path]) -> int:
    """Run this node's part of an attempt until it ends.

    Args:
        run_dir: The run directory.
        attempt: Number of the attempt, from 1.
        targets: Functions that replace the native training code, by role.
        import_paths: Folders to import these functions from.

    Returns:
        0 if the attempt completed, or saved and stopped on request; otherwise 1.
    """
    # Must come first: a signal that arrives before the handlers exist would kill this process without an outcome.
    inbox = SignalInbox()
    processes.allow_open_files()
    directory = RunDir(run_dir.absolute())
    nodes, problem, leads = _place_of(directory, attempt)
    arrivals = Arrivals(nodes, directory.attempt(attempt), longest_wait_s(directory))
    if problem and not leads and not _must_report_problem(arrivals, problem, inbox):
        return 1
    events = EventLog(nodes.name, directory.attempt(attempt).restart(0))
    leader = Leader(directory, attempt, events)
    if nodes.is_first:
        taken = leader.claim()
        if taken:
            print(f"{taken}; this agent ends", file=sys.stderr, flush=True)
            return 1
        leader.reserve.hold()
    site = AgentSite(directory, attempt, nodes, inbox, leader, events)
    with Survived() as failed:  # every failure must leave an outcome
        if problem:
            raise AttemptAborted(FailureKind.CONFIG, f"{nodes.name}: {problem}")
        signer = _signer(site)
        store = _agent_store(site, signer, arrivals)
        site.channel = AgentChannel(nodes, store, signer)
        spec, placement = _read(directory, attempt)
        job = Job(directory, attempt, nodes, spec, placement, _targets(spec, targets), import_paths)
        ending = Agent(job, inbox, leader, site.events, site.channel, ExitDeadline(site.record_exit)).run()
    if isinstance(failed.error, AttemptAborted):
        ending = _report_broken(site, str(failed.error), failed.error.kind)
    elif failed.error is not None:
        sys.stderr.write(failed.trace)
        kind = classify(Evidence(agent_log=failed.trace)).kind
        ending = _report_broken(site, f"the agent failed: {failed.problem}", kind)
    return _finish(site, ending)


def _targets(spec: RunSpec, given: Mapping[Role, str]) -> Mapping[Role, str]:
    """Functions that replace the native training code, by role."""
    return {Role.TRAINER: COMMAND, **given} if isinstance(spec.trainer, CommandTrainer) else given


def _place_of(run_dir: RunDir, attempt: int) -> tuple[Nodes, str, bool]:
    """The node's place in the attempt, any contradiction with the plan (the node then stands alone), and whether the
    node is nevertheless the first of several."""
    try:
        nodes = Nodes.of()
    except NodesError as error:
        return Nodes((os.environ.get("SLURMD_NODENAME", "unknown"),), ("",), 0), str(error), False
    placement = read_model(run_dir.attempt(attempt).placement, Placement)
    if placement is None or placement.num_nodes == nodes.num:
        return nodes, "", nodes.is_first
    problem = (
        f"the attempt was planned for {placement.num_nodes} nodes, but RLHF_NODES names "
        f"{nodes.num} ({', '.join(nodes.names)}): the job's script must set it for all of them"
    )
    return Nodes((nodes.name,), ("",), 0), problem, nodes.is_first and nodes.num > 1


def _must_report_problem(arrivals: Arrivals, problem: str, inbox: SignalInbox) -> bool:
    """Let agent 0 end the attempt and name this node, which contradicts the plan.

    Returns:
        True if there is no agent 0, because every node contradicts the plan or its node is missing: this agent must
        then report it.
    """
    attempt, name = arrivals.attempt, arrivals.nodes.name
    print(f"{name}: {problem}", file=sys.stderr, flush=True)
    try_to_write(attempt.node_facts(name), node_facts.confused(name, problem))
    placement = read_model(attempt.placement, Placement)
    began_s = time.monotonic()
    while not any(number in ENDING for number in inbox.wait(1.0)) and not is_there(attempt.outcome):
        waited_s = time.monotonic() - began_s
        if is_there(attempt.claim):
            if waited_s > arrivals.limit_s + arrivals.decided_s:
                return False
        elif waited_s > arrivals.limit_s or _is_every_node_confused(attempt, placement):
            return True
    return False


def _is_every_node_confused(attempt: AttemptDir, placement: Placement | None) -> bool:
    return placement is not None and len(node_facts.all_confused(attempt)) >= placement.num_nodes


def _signer(site: AgentSite) -> MessageSigner | None:
    """The signer of this agent's messages; None for the only agent of an attempt, which sends none.

    Raises:
        OSError: the key of the attempt can be neither created nor read.
        ValueError: the key file does not hold a key.
    """
    if site.nodes.num == 1:
        return None
    secret = shared_secret(site.run_dir.attempt(site.attempt).key)
    return MessageSigner(secret, job_marker(site.run_dir.run_id, site.attempt), site.nodes.index)


def _agent_store(site: AgentSite, signer: MessageSigner | None, arrivals: Arrivals) -> AgentStore:
    """Open the store through which the agents communicate, or find it.

    Raises:
        AttemptAborted: the store could not be opened.
    """
    nodes = site.nodes
    if signer is None:
        return MemoryAgentStore()
    arrivals.sign_in(site.events)
    try:
        if nodes.is_first:
            listen_at = nodes.listening_address
            if not listen_at:
                site.events.print_line(
                    f"{nodes.address} is on no interface that others can reach: stores listen on all of them"
                )
            return host_agent_store(nodes.address, listen_at, signer)

        def pause(seconds: float) -> bool:
            return any(number in ENDING for number in site.inbox.wait(seconds))

        return arrivals.join(signer, pause)
    except AgentsMissing as error:
        # Without agent 0, it is the controller that acts on this line.
        blamed: list[JsonValue] = [*error.failure.nodes]
        site.events.add("peer", f"this agent ends: {error}", not_met=error.failure.message, blamed=blamed)
        raise AttemptAborted(FailureKind.RENDEZVOUS, str(error)) from error
    except AgentStoreLost as error:
        raise AttemptAborted(FailureKind.RENDEZVOUS, str(error)) from error


def _read(run_dir: RunDir, attempt: int) -> tuple[RunSpec, Placement]:
    path = run_dir.attempt(attempt).placement
    try:
        spec = run_dir.read_spec().spec
    except RunDirError as error:
        raise AttemptAborted(FailureKind.CONFIG, str(error)) from error
    placement = read_model(path, Placement)
    if placement is None or not placement.phases:
        raise AttemptAborted(FailureKind.CONFIG, f"{path} is missing or damaged, or names no role")
    return spec, placement


def _report_broken(site: AgentSite, message: str, kind: FailureKind) -> AgreedStep:
    """Stop the other agents too: agent 0 announces the end, any other agent reports its failure."""
    channel = site.channel
    over = AgreedStep(action="end", state=AttemptState.FAILED, message=message, kind=kind)
    if channel is not None and channel.leads:
        channel.publish("orders", Orders(over=over))
    elif channel is not None:
        problem = f"{site.nodes.name}: {message}"
        channel.send("state", NodeState(wall_s=time.time(), broken=problem, broken_kind=kind))
    return over


def _finish(site: AgentSite, ending: AgreedStep) -> int:
    site.record_exit(f"attempt {site.attempt} is {ending.state}: {ending.message}", ending.state)
    written = True
    if site.nodes.is_first:
        leader = site.leader
        outcome = AttemptOutcome(
            attempt=site.attempt,
            state=ending.state,
            failure_kind=ending.kind,
            message=ending.message,
            num_restarts=ending.num_restarts,
            last_step=leader.last_step(),
            ended_by=ending.ended_by,
            time=utc_now(),
        )
        written = leader.finish(outcome)
        if not written:
            site.events.print_line("failed to write the outcome")
    site.events.close()
    is_well = written and ending.state in _GOOD_ENDS
    if site.channel is not None:
        if not is_well and site.channel.leads:
            site.channel.publish("orders", Orders(over=ending))
        elif not is_well:
            _await_outcome(site.channel)
        site.channel.close()
    return 0 if is_well else 1


def _await_outcome(channel: AgentChannel) -> None:
    """Wait for agent 0's outcome before failing: Slurm ends the whole job with this agent."""
    deadline = time.monotonic() + OUTCOME_TIMEOUT_S
    while time.monotonic() < deadline and not channel.is_lost:
        orders = channel.published("orders", Orders)
        if orders is not None and orders.over is not None:
            return
        channel.wait(0.1)
