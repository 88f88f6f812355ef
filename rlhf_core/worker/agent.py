"""The agent: one process per node. It starts the workers of each role in turn, and starts them again when that helps.

The main thread runs restarts, one elastic agent each (``groups/elastic.py``); a second thread supervises
(``supervisor.py``). On the first node the agent is also the leader (``leader.py``): it hears how the workers of all
nodes ended and publishes what is done next, and all agents do that together (``agent_channel.py``). Everything this
process ever started is ended when it ends; if it is killed, the kernel ends its workers.
"""

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import BaseModel, JsonValue

from rlhf_core.diagnosis.classify import Diagnosis, Evidence, classify, fingerprint
from rlhf_core.diagnosis.liveness import GapTracker
from rlhf_core.diagnosis.policy import Choice
from rlhf_core.errors import RunDirError
from rlhf_core.run_dir import AttemptDir, RestartDir, RunDir, read_model, write_model
from rlhf_core.schemas.agent_messages import NodeEnd, NodeState, Orders, Ready, Step
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.base import Schema, utc_now
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.probe import NodeFacts, NodeSpeed
from rlhf_core.schemas.reports import AttemptOutcome
from rlhf_core.schemas.resources import JOB_VARIABLE, GroupPlan, Placement, Role, job_marker
from rlhf_core.schemas.run import RunSpec
from rlhf_core.worker import exit_reports, node_facts, node_probe, processes
from rlhf_core.worker.agent_channel import AgentChannel, Message
from rlhf_core.worker.agent_store import (
    JOIN_TIMEOUT_S,
    LOOPBACK,
    AgentStore,
    AgentStoreLost,
    MemoryAgentStore,
    host_agent_store,
    host_worker_store,
    join_agent_store,
)
from rlhf_core.worker.collectives import BUFFER_SIZE, BUFFER_VARIABLE
from rlhf_core.worker.damaged_checkpoints import DamagedCheckpoints
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.exit_deadline import ExitDeadline
from rlhf_core.worker.exit_reports import Failure, NodeReport
from rlhf_core.worker.gpu_wait import GpuWait
from rlhf_core.worker.groups.base import Exit, Started, WorkerGroup
from rlhf_core.worker.heartbeat import SlotFile
from rlhf_core.worker.leader import OUTCOME_TIMEOUT_S, Leader, RestartBudget, record_decision, record_incident
from rlhf_core.worker.nodes import Nodes, NodesError, interface_of
from rlhf_core.worker.roles import TARGETS
from rlhf_core.worker.signals import ENDING, SignalInbox
from rlhf_core.worker.signing import MessageSigner, attempt_secret
from rlhf_core.worker.supervisor import ExternalRequests, PeerTimeouts, Supervisor
from rlhf_core.worker.warm_workers import WarmWorkers
from rlhf_core.worker.worker_process import AGENT_VARIABLE, SLOTS_VARIABLE

NO_LEADER_TIMEOUT_S = 15.0
"""After this an agent that contradicts the plan, and sees no agent 0, takes it that all do."""
MISPLACED_INTERVAL_S = 1.0
"""How often agent 0 looks for nodes that cannot join and say so in a file."""
LAST_STATE_TIMEOUT_S = 5.0
"""How long agent 0 waits for the last words of the others when all is to end."""

_GOOD_ENDS = (AttemptState.COMPLETED, AttemptState.PREEMPTED)


@dataclass(frozen=True)
class Job:
    """What this agent is there for."""

    run_dir: RunDir
    attempt: int
    nodes: Nodes
    spec: RunSpec
    placement: Placement
    targets: Mapping[Role, str]
    """What runs for a role instead of the native training code."""
    import_paths: Sequence[Path]
    """Folders to import these targets from."""


@dataclass(frozen=True)
class Ending:
    """How the attempt ends; becomes its outcome."""

    state: AttemptState
    message: str
    kind: FailureKind | None = None
    ended_by: str = ""
    num_restarts: int = 0


class AttemptAborted(Exception):
    """Ends the attempt with what went wrong before workers could be started."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Site:
    """What an agent has before it has read anything: where it is, and whom it reports to."""

    run_dir: RunDir
    attempt: int
    nodes: Nodes
    inbox: SignalInbox
    leader: Leader
    events: EventLog
    channel: AgentChannel | None = None

    def last_words(self, why: str) -> None:
        """Write down why this agent is ended by force. Of a lost agent 0 only the others can tell."""
        leader_lost = self.channel is not None and self.channel.is_lost
        self.events.add("agent_ended", why, state=AttemptState.FAILED, leader_lost=leader_lost)


def run_agent(
    run_dir: Path, attempt: int, targets: Mapping[Role, str] | None = None, import_paths: Sequence[Path] = ()
) -> int:
    """Run this node's part of an attempt to its end.

    Args:
        run_dir: The run directory.
        attempt: Number of the attempt, from 1.
        targets: What runs for a role instead of the native training code.
        import_paths: Folders to import these targets from.

    Returns:
        0 when the attempt was completed, or was saved and ended because that was asked for; otherwise 1.
    """
    # First of all: a signal that comes before it is awaited would end this process without an outcome.
    inbox = SignalInbox()
    directory = RunDir(run_dir.absolute())
    leader = Leader(directory, attempt)
    nodes, problem, leads = _place_of(directory, attempt)
    if problem and not leads and not _is_left_to_say_so(directory.attempt(attempt), nodes.name, problem, inbox):
        return 1
    if nodes.is_first:
        taken = leader.claim()
        if taken:
            print(f"{taken}; this agent ends", file=sys.stderr, flush=True)
            return 1
        leader.reserve.hold()
    site = Site(directory, attempt, nodes, inbox, leader, EventLog(nodes.name, directory.attempt(attempt).restart(0)))
    try:
        if problem:
            raise AttemptAborted(FailureKind.CONFIG, f"{nodes.name}: {problem}")
        signer = _signer(site)
        site.channel = AgentChannel(nodes, _agent_store(site, signer), signer)
        spec, placement = _read(directory, attempt, nodes)
        job = Job(directory, attempt, nodes, spec, placement, targets or {}, import_paths)
        ending = Agent(job, inbox, leader, site.events, site.channel, ExitDeadline(site.last_words)).run()
    except AttemptAborted as error:
        ending = _tell_broken(site, str(error), error.kind)
    except Exception as error:  # noqa: BLE001 - an attempt without an outcome leaves everybody guessing
        text = traceback.format_exc()
        sys.stderr.write(text)
        ending = _tell_broken(
            site, f"the agent failed: {type(error).__name__}: {error}", classify(Evidence(agent_log=text)).kind
        )
    return _finish(site, ending)


def _place_of(run_dir: RunDir, attempt: int) -> tuple[Nodes, str, bool]:
    """Which node of the attempt this is, what contradicts that (then it stands alone), and whether it is the first of
    several all the same."""
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


def _is_left_to_say_so(attempt: AttemptDir, name: str, problem: str, inbox: SignalInbox) -> bool:
    """Of a node that contradicts the plan: leave it to agent 0 to end the attempt and to name this node.

    Returns:
        Whether there is no agent 0, as all nodes may be wrong: then it is for this one to say so.
    """
    print(f"{name}: {problem}", file=sys.stderr, flush=True)
    _try_to_write(attempt.node_facts(name), node_facts.confused(name, problem))
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < deadline:
        if any(number in ENDING for number in inbox.wait(1.0)) or attempt.outcome.exists():
            return False
        if not attempt.claim.exists() and time.monotonic() > deadline - JOIN_TIMEOUT_S + NO_LEADER_TIMEOUT_S:
            return True
    return False


def _signer(site: Site) -> MessageSigner | None:
    """The signer of this agent's messages; none for one that is alone, which sends none.

    Raises:
        OSError: the key of the attempt can be neither made nor read.
        ValueError: its file holds something else.
    """
    if site.nodes.num == 1:
        return None
    secret = attempt_secret(site.run_dir.attempt(site.attempt).key)
    return MessageSigner(secret, job_marker(site.run_dir.run_id, site.attempt), site.nodes.index)


def _agent_store(site: Site, signer: MessageSigner | None) -> AgentStore:
    """Where the agents meet.

    Raises:
        AttemptAborted: they did not.
    """
    nodes = site.nodes
    if signer is None:
        return MemoryAgentStore()
    try:
        if nodes.is_first:
            listen_at = nodes.listening_address
            if not listen_at:
                site.events.say(
                    f"{nodes.address} leads to no interface that others reach: stores listen on all of them"
                )
            return host_agent_store(nodes.address, listen_at, signer)

        def pause(seconds: float) -> bool:
            return any(number in ENDING for number in site.inbox.wait(seconds))

        return join_agent_store(nodes.addresses[0], signer, pause)
    except AgentStoreLost as error:
        raise AttemptAborted(FailureKind.RENDEZVOUS, str(error)) from error


def _read(run_dir: RunDir, attempt: int, nodes: Nodes) -> tuple[RunSpec, Placement]:
    path = run_dir.attempt(attempt).placement
    try:
        spec = run_dir.read_spec().spec
    except RunDirError as error:
        raise AttemptAborted(FailureKind.CONFIG, str(error)) from error
    placement = read_model(path, Placement)
    if placement is None or not placement.phases:
        raise AttemptAborted(FailureKind.CONFIG, f"{path} is missing, damaged or names no role")
    return spec, placement


def _tell_broken(site: Site, message: str, kind: FailureKind) -> Ending:
    """Have all others end too: agent 0 says that it is over, another one says what is wrong with it."""
    channel = site.channel
    if channel is not None and channel.leads:
        over = Step(action="end", state=AttemptState.FAILED, message=message, kind=kind)
        channel.publish("orders", Orders(over=over))
    elif channel is not None:
        said = f"{site.nodes.name}: {message}"
        channel.send("state", NodeState(wall_s=time.time(), restart=-1, broken=said, broken_kind=kind))
    return Ending(AttemptState.FAILED, message, kind)


def _finish(site: Site, ending: Ending) -> int:
    message = f"attempt {site.attempt} is {ending.state}: {ending.message}"
    # Of a lost agent 0 only the others can tell: it has left no outcome.
    leader_lost = site.channel is not None and site.channel.is_lost
    site.events.add("agent_ended", message, state=ending.state, leader_lost=leader_lost)
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
            site.events.say("the outcome could not be written")
    site.events.close()
    is_well = written and ending.state in _GOOD_ENDS
    if site.channel is not None:
        if not is_well and site.channel.leads:
            over = Step(action="end", state=ending.state, message=ending.message, kind=ending.kind)
            site.channel.publish("orders", Orders(over=over))
        elif not is_well:
            _await_outcome(site.channel)
        site.channel.close()
    return 0 if is_well else 1


def _await_outcome(channel: AgentChannel) -> None:
    """Of an agent that ends badly: Slurm ends the whole job with it, and agent 0 has to say why before."""
    deadline = time.monotonic() + OUTCOME_TIMEOUT_S
    while time.monotonic() < deadline and not channel.is_lost:
        orders = channel.published("orders", Orders)
        if orders is not None and orders.over is not None:
            return
        channel.wait(0.1)


class Agent:
    """One node of one attempt."""

    def __init__(
        self,
        job: Job,
        inbox: SignalInbox,
        leader: Leader,
        events: EventLog,
        channel: AgentChannel,
        deadline: ExitDeadline,
    ) -> None:
        self._job = job
        self._deadline = deadline
        self._inbox = inbox
        self._leader = leader
        self._events = events
        self._channel = channel
        self._budget = RestartBudget(job.run_dir, job.spec.supervise)
        self._damaged = DamagedCheckpoints(job.run_dir)
        self._probe = node_probe.Probe(
            node_probe.Place(job.run_dir, job.attempt, job.nodes, job.spec, job.placement, channel.endpoint)
        )
        self._gpus: GpuWait | None = None
        self._worker_store: object = None
        self._warm = self._warm_workers()
        self._restart = 0
        self._restart_is_used = False

    def run(self) -> Ending:
        """Run all roles in their order; whatever happens, nothing that was started is left.

        Raises:
            AttemptAborted: something went wrong before workers could be started.
        """
        job = self._job
        processes.adopt_orphans()
        for stranger in processes.end_older_attempts(job.run_dir.run_id, job.attempt):
            self._events.say(f"ended what an older attempt had left on this node: {stranger}")
        num_slots = max(plan.workers_per_node for plan in job.placement.groups)
        slots = SlotFile(job.run_dir.run_id, job.attempt, job.nodes.name, num_slots)
        supervise = job.spec.supervise
        supervisor = Supervisor(
            self._channel,
            slots,
            self._inbox,
            GapTracker.of(supervise, job.placement.longest_gaps_s),
            self._events,
            self._leader.new_commands if self._channel.leads else list,
            PeerTimeouts(supervise.evidence_s, supervise.agent_floor_s),
            job.run_dir.root,
            self._deadline,
            partial(job.run_dir.is_superseded, job.attempt),
        )
        supervisor.enter(job.placement.groups[0].role, self._restart_dir)
        supervisor.start()
        self._events.add("agent_started", f"agent of attempt {job.attempt} started with pid {os.getpid()}")
        try:
            self._set_environment(slots)
            probed = any(plan.role is Role.PROBE for plan in job.placement.groups)
            ending = self._meet(supervisor) or (self._check_nodes(supervisor) if probed else None)
            if ending is not None:
                return ending
            roles = [plan for plan in job.placement.groups if plan.role is not Role.PROBE]
            if roles and job.placement.gpus_per_node > 0:
                self._gpus = GpuWait(self._events)
            for plan in roles:
                ending = self._run_role(plan, slots, supervisor)
                if ending is not None:
                    return ending
            return Ending(AttemptState.COMPLETED, "every role ended well", num_restarts=self._budget.restarts)
        finally:
            supervisor.stop()
            if self._warm is not None:
                self._warm.close()
            self._end_all()
            slots.remove()

    def _meet(self, supervisor: Supervisor) -> Ending | None:
        """Agent 0 waits until the agents of all nodes are there; the end, where they do not come in time."""
        channel = self._channel
        if channel.nodes.num == 1:
            return None
        channel.send("hello", Ready())
        if not channel.leads:
            return None
        look_at_s = 0.0

        def enough() -> bool:
            nonlocal look_at_s
            # With the first state of each there is also a first measure of its clock.
            came = channel.received("hello", Ready).keys() & channel.received("state", NodeState).keys()
            if len(came) == channel.nodes.num or supervisor.asked.to_end:
                return True
            now_s = time.monotonic()
            if now_s < look_at_s:
                return False
            look_at_s = now_s + MISPLACED_INTERVAL_S
            known = {channel.nodes.names[index] for index in came} | {one.node for one in self._probe.confused()}
            return known >= set(channel.nodes.names)

        self._wait_until(enough, self._job.spec.preflight.meet_s)
        came = [name for index, name in enumerate(channel.nodes.names) if index in channel.received("hello", Ready)]
        if len(came) < channel.nodes.num and not supervisor.asked.to_end:
            self._probe.without(came)
            step = self._after_checks(last=True)
            channel.publish("orders", Orders(over=step))
            return _ending(step)
        self._events.add(
            "peer", f"the agents of all {channel.nodes.num} nodes are here: {', '.join(channel.nodes.names)}"
        )
        return None

    # -----------------------------------------------------------------------------------------------------------------
    # The probe

    def _check_nodes(self, supervisor: Supervisor) -> Ending | None:
        """Compare and measure the nodes; the end, where one is not fit."""
        probe, asked = self._probe, supervisor.asked

        def after_facts(facts: Mapping[int, NodeFacts]) -> Step:
            # One that cannot read its orders is a finding, not the end of everything.
            unread = asked.broken_kind is FailureKind.CONFIG and asked.broken_node != ""
            step = self._asked_to_end(asked) if unread else self._may_start(asked)
            if step is not None and step.action == "end":
                return step
            ahead_s = {index: self._channel.ahead_s(index) for index in facts}
            probe.take_facts(facts, ahead_s, {asked.broken_node: asked.broken} if unread else {})
            return self._after_checks(last=not probe.measures)

        def after_speeds(speeds: Mapping[int, NodeSpeed], look: int) -> Step:
            step = self._may_start(asked)
            if step.action == "end":
                return step
            return Step(action="again") if probe.take_speeds(speeds, look) else self._after_checks(last=True)

        step = self._agree("facts", probe.facts(), NodeFacts, after_facts, supervisor, node_probe.FACTS_S)
        for look in (1, 2):
            if probe.measures and step.action in ("start", "again"):
                speed = probe.measure(look, lambda: asked.to_end)
                after = partial(after_speeds, look=look)
                step = self._agree(f"speed-{look}", speed, NodeSpeed, after, supervisor, probe.timeout_s)
            if step.action != "again":
                break
        return _ending(step) if step.action == "end" else None

    def _after_checks(self, *, last: bool) -> Step:
        """What follows from the findings so far; they are written down when they end something or are all."""
        report = self._probe.report()
        blocking = [one for one in report.results if one.status is CheckStatus.BLOCKED]
        if blocking or last:
            self._leader.write(self._attempt_dir.probe_report, report)
            counts = Counter(one.status.value for one in report.results)
            listed = ", ".join(f"{count} {status}" for status, count in counts.items())
            self._events.add("probe", f"nodes checked in {report.seconds} s: {listed}", Role.PROBE)
        return self._unfit(blocking) if blocking else Step(action="start")

    def _unfit(self, blocking: Sequence[CheckResult]) -> Step:
        """The end; with the nodes to do without, unless no node is to blame."""
        nodes = tuple(dict.fromkeys(one.node for one in blocking if one.node))
        kind = FailureKind.NODE_UNFIT if all(one.node for one in blocking) else FailureKind.CONFIG
        message = node_probe.in_a_sentence(blocking)
        what = f"{' '.join(sorted({one.id for one in blocking}))} {' '.join(nodes)}"
        blamed = nodes if kind is FailureKind.NODE_UNFIT else ()
        failure = Failure(Diagnosis(kind, message, fingerprint(kind, what), nodes=blamed), "", None, None)
        number = record_incident(self._leader, self._events, self._restart_dir, failure)
        record_decision(self._leader, self._events, self._restart_dir, self._budget.choose(failure.diagnosis), number)
        return self._end(AttemptState.FAILED, message, kind)

    def _warm_workers(self) -> WarmWorkers | None:
        """Spares, where every worker is a native one: what user code imports is not known ahead."""
        job = self._job
        groups = [plan for plan in job.placement.groups if plan.role is not Role.PROBE]
        is_native = all(plan.role in TARGETS and plan.role not in job.targets for plan in groups)
        if not (job.spec.supervise.warm_workers and groups and is_native):
            return None
        return WarmWorkers(max(plan.workers_per_node for plan in groups), self._events.say)

    def _set_environment(self, slots: SlotFile) -> None:
        job = self._job
        os.environ[JOB_VARIABLE] = job_marker(job.run_dir.run_id, job.attempt)
        os.environ[SLOTS_VARIABLE] = str(slots.path)
        os.environ.setdefault(BUFFER_VARIABLE, BUFFER_SIZE)
        os.environ[AGENT_VARIABLE] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(job.spec.resources.cpus_per_rank))
        # Status service of NCCL: nobody of ours asks it, and every user of the node may.
        os.environ.setdefault("NCCL_RAS_ENABLE", "0")
        interface = interface_of(job.nodes.address if job.nodes.num > 1 else LOOPBACK)
        if interface and job.nodes.num > 1:
            # gloo would take the interface of the host's name, which on many clusters is the wrong one.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        elif interface:
            # Whatever is right among nodes: ranks of one node need nothing that others can reach.
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")

    # -----------------------------------------------------------------------------------------------------------------
    # Roles and restarts

    def _run_role(self, plan: GroupPlan, slots: SlotFile, supervisor: Supervisor) -> Ending | None:
        """Run one role to its good end (None), or to the end of the attempt."""
        num_nodes = self._job.nodes.num
        on_each = f" on each of {num_nodes} nodes" if num_nodes > 1 else ""
        self._enter_restart(plan.role, supervisor)
        message = f"role {plan.role} starts with {plan.workers_per_node} workers{on_each}"
        self._events.add("role_started", message, plan.role, workers=plan.workers_per_node)
        while True:
            step = self._agree(
                f"ready/{self._restart}", Ready(), Ready, lambda _: self._begin_start(supervisor.asked), supervisor
            )
            if step.action == "start":
                group = WorkerGroup(
                    plan.role,
                    self._restart_dir,
                    plan.workers_per_node,
                    slots,
                    supervisor.clock,
                    self._job.nodes.name,
                )
                end = self._run_once(group, supervisor, step.store)
                step = self._agree(
                    f"end/{self._restart}",
                    end,
                    NodeEnd,
                    lambda ends, group=group: self._conclude(group, ends, supervisor.asked),  # type: ignore[misc]
                    supervisor,
                )
                supervisor.release()
            if step.action == "next_role":
                return None
            if step.action == "end":
                return _ending(step)
            self._damaged.names = list(step.damaged)
            self._enter_restart(plan.role, supervisor)
            if self._gpus is not None:
                self._gpus.wait()

    def _agree(
        self,
        topic: str,
        message: Schema,
        kind: type[Message],
        decide: Callable[[Mapping[int, Message]], Step],
        supervisor: Supervisor,
        timeout_s: float = float("inf"),
    ) -> Step:
        """Tell agent 0 something; once it has heard all, it decides for all. The same step comes back on every node.

        Args:
            timeout_s: How long agent 0 waits for those who are alive and say nothing.
        """
        channel, asked = self._channel, supervisor.asked
        channel.send(topic, message)
        if not channel.leads:
            return self._await_step(f"step/{topic}", asked)
        latest_s = float("inf")

        def enough() -> bool:
            nonlocal latest_s
            now_s = time.monotonic()
            if asked.to_end:
                latest_s = min(latest_s, now_s + LAST_STATE_TIMEOUT_S)
            heard = channel.received(topic, kind)
            missing = {name for index, name in enumerate(channel.nodes.names) if index not in heard}
            return now_s > latest_s or missing <= {asked.broken_node}

        self._wait_until(enough, timeout_s)
        step = decide(channel.received(topic, kind))
        channel.publish(f"step/{topic}", step)
        return step

    def _await_step(self, topic: str, asked: ExternalRequests) -> Step:
        """What agent 0 decides; the end, where it decides nothing any more."""
        channel = self._channel

        def over() -> Step | None:
            orders = channel.published("orders", Orders)
            return orders.over if orders is not None else None

        self._wait_until(lambda: bool(channel.published(topic, Step) or over() or asked.broken))
        lost = Step(action="end", message=asked.broken, kind=FailureKind.AGENT_KILLED)
        return channel.published(topic, Step) or over() or lost

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float = float("inf")) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._channel.wait(0.1)
        return True

    @property
    def _attempt_dir(self) -> AttemptDir:
        return self._job.run_dir.attempt(self._job.attempt)

    @property
    def _restart_dir(self) -> RestartDir:
        return self._attempt_dir.restart(self._restart)

    def _enter_restart(self, role: Role, supervisor: Supervisor) -> None:
        """Go on to the next restart, unless this one was not used yet. They are counted over all roles."""
        if self._restart_is_used:
            self._restart += 1
            self._restart_is_used = False
            self._events.move_to(self._restart_dir)
        supervisor.enter(role, self._restart_dir)

    def _run_once(self, group: WorkerGroup, supervisor: Supervisor, store: str) -> NodeEnd:
        """Start the workers of this node and stay until they have ended, with all that they started.

        Args:
            store: ``host:port`` of the store in which they meet those of other nodes; empty where there are none.
        """
        # Torch is imported here, when everything that can go wrong without it has been looked at.
        from rlhf_core.worker.groups.elastic import Start, StartAbandoned, prepare_environment, run_workers

        job = self._job
        prepare_environment()
        self._restart_is_used = True
        group.slots.clear()
        supervisor.supervise(group)
        start = Start(
            name=f"{job.run_dir.run_id}.{job.attempt}.{self._restart}",
            node_index=job.nodes.index,
            num_nodes=job.nodes.num,
            store=store,
            command=self._worker_command(group),
        )
        problem = ""
        try:
            run_workers(
                start,
                group,
                self._inbox,
                on_start=self._note_start,
                on_exit=self._note_exit,
                has_spoken=lambda worker: exit_reports.has_spoken(group, worker.local_rank),
                warm=self._warm,
            )
        except StartAbandoned:
            pass
        except Exception:  # noqa: BLE001 - elastic raises many types; the classifier reads the text
            problem = traceback.format_exc()
        finally:
            supervisor.settle()
            self._end_all()
        return exit_reports.report(group, problem, self._leader.write if self._channel.leads else _try_to_write)

    def _worker_command(self, group: WorkerGroup) -> tuple[str, ...]:
        job, role = self._job, group.role
        command = ["-u", "-P", "-m", "rlhf_core.worker", "role", role.value]
        command += ["--run-dir", str(job.run_dir.root), "--attempt", str(job.attempt)]
        command += ["--restart", str(self._restart), "--node", job.nodes.name]
        if job.nodes.num == 1:
            command += ["--store", str(group.slots.store(self._restart))]
        if role in job.targets:
            command += ["--target", job.targets[role]]
        for path in job.import_paths:
            command += ["--path", str(path.absolute())]
        for name in self._damaged.names:
            command += ["--damaged", name]
        return tuple(command)

    def _note_start(self, started: list[Started]) -> None:
        who = ", ".join(f"rank {worker.rank} = pid {worker.pid}" for worker in started)
        ranks: dict[str, JsonValue] = {str(worker.local_rank): worker.rank for worker in started}
        pids: dict[str, JsonValue] = {str(worker.local_rank): worker.pid for worker in started}
        self._events.add("workers_started", f"workers started: {who}", ranks=ranks, pids=pids)

    def _note_exit(self, worker: Started, end: Exit) -> None:
        how = f"exit code {end.code}" if end.code >= 0 else f"signal {-end.code}"
        message = f"rank {worker.rank} ended with {how}{', ended by the agent' if end.by_agent else ''}"
        self._events.add("worker_exited", message, rank=worker.rank, pid=worker.pid, code=end.code)

    def _end_all(self) -> None:
        for survivor in processes.end_descendants(spared=self._warm.pids if self._warm is not None else ()):
            self._events.say(f"could not be ended: {survivor}")

    # -----------------------------------------------------------------------------------------------------------------
    # What agent 0 decides

    def _end(self, state: AttemptState, message: str, kind: FailureKind | None = None, ended_by: str = "") -> Step:
        restarts = self._budget.restarts
        return Step(action="end", state=state, message=message, kind=kind, ended_by=ended_by, num_restarts=restarts)

    def _begin_start(self, asked: ExternalRequests) -> Step:
        """Open the store of a start of the workers, which is new for each: in an older one stand addresses of the dead.

        The one before is closed only now, when all workers of it have ended on all nodes.
        """
        step = self._may_start(asked)
        nodes = self._job.nodes
        if step.action == "start" and nodes.num > 1:
            self._worker_store, store = host_worker_store(nodes.address, nodes.listening_address)
            step = step.model_copy(update={"store": store})
        return step

    def _may_start(self, asked: ExternalRequests) -> Step:
        step = self._asked_to_end(asked)
        if step is None and asked.broken:
            # First, whatever else was asked: Slurm ends a job of which one agent has ended, by the signal that also
            # announces that nodes are taken back.
            step = self._end(AttemptState.FAILED, asked.broken, asked.broken_kind)
        if step is None and asked.stop:
            # Between two starts there is nothing to save first.
            step = self._end(AttemptState.PREEMPTED, f"ended between two starts of the workers: {asked.stop}")
        return step or Step(action="start")

    def _asked_to_end(self, asked: ExternalRequests) -> Step | None:
        if asked.cancel:
            return self._end(AttemptState.CANCELLED, asked.cancel, FailureKind.USER_CANCEL)
        if asked.end:
            message = f"the agent was ended by {asked.end} from outside; the run can go on from its last checkpoint"
            return self._end(AttemptState.FAILED, message, FailureKind.PREEMPTION, asked.end)
        return None

    def _conclude(self, group: WorkerGroup, ends: Mapping[int, NodeEnd], asked: ExternalRequests) -> Step:
        """What follows from how the workers of all nodes have ended."""
        step = self._asked_to_end(asked)
        if step is not None:
            return step
        complete = len(ends) == self._job.nodes.num
        if complete and all(exit_reports.is_well(end) for end in ends.values()):
            return self._end_role(group.role, ends, asked)
        if asked.broken:
            kind, node = asked.broken_kind, asked.broken_node
            diagnosis = Diagnosis(kind, asked.broken, fingerprint(kind, node), nodes=(node,) if node else ())
            failure = Failure(diagnosis, "", None, None)
        else:
            reports = [
                NodeReport(self._job.nodes.names[index], end, self._channel.ahead_s(index))
                for index, end in ends.items()
            ]
            failure = exit_reports.explain(reports, group.hang)
        failure = self._damaged.explained(failure, self._restart_dir)
        choice = self._choose(group.role, failure, asked)
        if choice.action is Action.RESTART_IN_PLACE:
            return Step(action="restart", damaged=tuple(self._damaged.names))
        return self._end(AttemptState.FAILED, f"{failure.diagnosis.message} ({choice.reason})", failure.diagnosis.kind)

    def _end_role(self, role: Role, ends: Mapping[int, NodeEnd], asked: ExternalRequests) -> Step:
        outcomes = [worker.outcome for end in ends.values() for worker in end.workers]
        early = any(outcome.stopped_early for outcome in outcomes if outcome is not None)
        how = "saved and ended early" if early else "ended well"
        self._events.add("role_ended", f"role {role} {how}", role, stopped_early=early)
        if early:
            return self._end(AttemptState.PREEMPTED, f"saved and ended early: {asked.stop or 'the workers decided so'}")
        self._budget.renew()
        return Step(action="next_role")

    def _choose(self, role: Role, failure: Failure, asked: ExternalRequests) -> Choice:
        """Write down what was found and what will be done about it; only then may it be done."""
        failure = replace(failure, diagnosis=self._budget.confirmed(failure.diagnosis))
        number = record_incident(self._leader, self._events, self._restart_dir, failure, role)
        choice = self._budget.choose(failure.diagnosis, self._damaged.remedy(failure))
        choice = self._damaged.choice_for(role, failure, choice)
        if asked.stop and choice.action is Action.RESTART_IN_PLACE:
            reason = f"not restarted in place, as the attempt is to end: {asked.stop}"
            choice = Choice(Action.NEW_ATTEMPT, 0.0, reason)
        record_decision(self._leader, self._events, self._restart_dir, choice, number)
        if failure.damaged_checkpoint and choice.action is not Action.STOP:
            self._damaged.put_aside(failure, self._restart_dir, self._events)
        return choice


def _ending(step: Step) -> Ending:
    return Ending(step.state, step.message, step.kind, step.ended_by, step.num_restarts)


def _try_to_write(path: Path, model: BaseModel) -> bool:
    try:
        write_model(path, model)
    except OSError:
        return False
    return True
