"""The agent: one process per node, which starts the workers of each phase and restarts them when that helps.

The main thread starts the groups of a phase and waits for all of them at once; a second thread supervises them
(``supervision/supervisor.py``). The agent on the first node is also the leader (``leader.py``): the other agents
report to it how their workers exited, it decides the next step (``decisions.py``), and all agents carry that step out
together (``agreement.py``). On exit the agent kills every process it started; if the agent itself is killed, the
kernel kills its workers.
"""

import os
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from rlhf_core.diagnosis.hangs.liveness import GapTracker
from rlhf_core.files.whole import write_model
from rlhf_core.machine.parent_death import adopt_orphans
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.agent_messages import AgreedStep, NodeEnd, Ready
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.resources import JOB_VARIABLE, GroupPlan, job_marker
from rlhf_core.survival import Survived
from rlhf_core.worker import processes
from rlhf_core.worker.agent.agreement import Agreement
from rlhf_core.worker.agent.decisions import GroupDecisions
from rlhf_core.worker.agent.gpu_wait import GPU_TIMEOUT_S, GpuWait
from rlhf_core.worker.agent.independent_run import IndependentRun
from rlhf_core.worker.agent.job import Job
from rlhf_core.worker.agent.leader import Leader
from rlhf_core.worker.agent.node_admission import NodeAdmission
from rlhf_core.worker.agent.trainer_warnings import TrainerWarnings
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.store import LOOPBACK
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.evidence import exit_reports
from rlhf_core.worker.evidence.exit_reports import Write
from rlhf_core.worker.groups.base import GroupSeat, StartAbandoned, WorkerGroup
from rlhf_core.worker.groups.events import log_exit, log_start
from rlhf_core.worker.groups.fork_server import ForkServer
from rlhf_core.worker.groups.independent import IndependentGroup
from rlhf_core.worker.groups.joint import JointGroup, JointStart
from rlhf_core.worker.liveness.collectives import BUFFER_SIZE, BUFFER_VARIABLE
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.nodes.membership import interface_of
from rlhf_core.worker.roles import TARGETS, WARM_PROBE
from rlhf_core.worker.signals import SignalInbox
from rlhf_core.worker.supervision.exit_deadline import ExitDeadline
from rlhf_core.worker.supervision.supervisor import Supervisor
from rlhf_core.worker.worker_process import AGENT_VARIABLE

POLL_INTERVAL_S = 0.05
"""Interval at which the groups of a phase are polled, in seconds."""

LOSSES_OF_A_NODE = (FailureKind.NODE_LOST, FailureKind.AGENT_KILLED)
"""Failures after which the remaining nodes keep their in-memory checkpoint copies for the next attempt."""


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
        self._leader = leader
        self._events = events
        self._channel = channel
        self._restart = 0
        self._restart_is_used = False
        self._gpus: GpuWait | None = None
        self._slots: dict[Role, SlotFile] = {}
        supervise = job.spec.supervise
        self._fork_server = ForkServer(events.print_line)
        self._supervisor = Supervisor(
            channel,
            inbox,
            GapTracker(supervise, job.placement.longest_gaps_s),
            events,
            leader.new_commands if channel.leads else list,
            supervise,
            job.run_dir.root,
            deadline,
            partial(job.run_dir.is_superseded, job.attempt),
            lambda: self._fork_server.started,
        )
        self._agreement = Agreement(channel, self._supervisor.requests, self._supervisor.main_thread.take_turn)
        self._decisions = GroupDecisions(job, channel, leader, self._supervisor.requests)
        self._admission = NodeAdmission(
            job,
            channel,
            leader,
            self._agreement,
            self._decisions,
            self._supervisor.requests,
            self._fork_server,
        )
        self._warnings = TrainerWarnings(leader) if channel.leads else None

    def run(self) -> AgreedStep:
        """Run all phases in order, and return the end of the attempt. No process it started outlives the call.

        Raises:
            AttemptAborted: something failed before the workers could be started.
        """
        job = self._job
        adopt_orphans()
        for process in processes.end_older_attempts(job.run_dir.run_id, job.attempt):
            self._events.print_line(f"ended a process left on this node by an older attempt: {process}")
        for role in dict.fromkeys(plan.role for plan in job.placement.groups):
            num_slots = max(plan.workers_per_node for plan in job.placement.groups if plan.role is role)
            self._slots[role] = SlotFile(job.run_dir.run_id, job.attempt, job.nodes.name, num_slots, role.value)
        self._supervisor.enter(job.placement.groups[0].role, self._restart_dir)
        self._supervisor.start()
        self._events.add("agent_started", f"agent of attempt {job.attempt} started with pid {os.getpid()}")
        leaves_copies = False
        try:
            ending = self._run_all()
            leaves_copies = job.spec.checkpoint.memory == "peer" and ending.kind in LOSSES_OF_A_NODE
            return ending
        finally:
            self._supervisor.stop()
            self._fork_server.close()
            self._end_descendants()
            for slots in self._slots.values():
                slots.remove(keep_memory=leaves_copies)

    def _run_all(self) -> AgreedStep:
        # From here on: the driver of a broken GPU may block the first call into it.
        self._supervisor.main_thread.take_turn()
        placement = self._job.placement
        phases = [phase for phase in placement.phases if phase[0].role is not Role.PROBE]
        self._set_environment()
        # Preload imports while the nodes rendezvous, but not during the probe, whose measurements it would distort.
        if self._admission.measures:
            if self._job.spec.supervise.warm_workers:
                self._fork_server.prepare(WARM_PROBE)
        elif phases and any(map(self._is_forked_here, phases[0])):
            self._fork_server.prepare()
        ending = self._admission.admit()
        if not any(self._is_forked_here(plan) for phase in phases for plan in phase):
            self._fork_server.close()  # only the probe needed it
        if ending is not None:
            return ending
        if phases and placement.gpus_per_node > 0:
            self._gpus = GpuWait(self._events)
        for number, phase in enumerate(phases):
            ending = self._run_phase(number, phase)
            if ending is not None:
                return ending
        return self._decisions.end(AttemptState.COMPLETED, "every role succeeded")

    def _set_environment(self) -> None:
        job = self._job
        os.environ[JOB_VARIABLE] = job_marker(job.run_dir.run_id, job.attempt)
        os.environ.setdefault(BUFFER_VARIABLE, BUFFER_SIZE)
        os.environ[AGENT_VARIABLE] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(job.spec.resources.cpus_per_rank))
        # NCCL's status service: rlhf-flows never queries it, but any user on the node could.
        os.environ.setdefault("NCCL_RAS_ENABLE", "0")
        interface = interface_of(job.nodes.address if job.nodes.num > 1 else LOOPBACK)
        if interface and job.nodes.num > 1:
            # By default gloo uses the interface that the hostname resolves to, which is the wrong one on many clusters.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        elif interface:
            # Overrides an interface chosen for several nodes: ranks on a single node need none that others can reach.
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")

    def _is_forked(self, plan: GroupPlan) -> bool:
        """True for groups whose imports are known in advance, that is, those that run no user code."""
        job = self._job
        return job.spec.supervise.warm_workers and plan.role in TARGETS and plan.role not in job.targets

    def _is_forked_here(self, plan: GroupPlan) -> bool:
        """True if the group is forked and has workers on this node."""
        return self._is_forked(plan) and self._job.has(plan)

    def _imported(self, plan: GroupPlan) -> Generator[None, None, None]:
        """Wait until the fork server is ready, if this group's workers are forked here."""
        if self._is_forked_here(plan):
            self._fork_server.prepare()
            while self._fork_server.is_importing and not self._supervisor.requests.to_end:
                yield

    # -----------------------------------------------------------------------------------------------------------------
    # Phases and restarts

    def _run_phase(self, number: int, phase: Sequence[GroupPlan]) -> AgreedStep | None:
        """Run the groups of one phase concurrently, until they succeed (None) or the attempt ends.

        The restarts of the attempt are those of the first group, which restarts as a whole. The phase is over once it
        has succeeded; the other groups, whose workers restart individually, serve it until then.
        """
        main, *beside = phase
        self._enter_restart(main.role)
        on_each = f" on each of {len(main.nodes)} nodes" if len(main.nodes) > 1 else ""
        message = f"role {main.role} starts with {main.workers_per_node} workers{on_each}"
        self._events.add("role_started", message, main.role, workers=main.workers_per_node)
        alone = {plan.role: self._independent(plan, number) for plan in beside}
        runs = {main.role: self._run_together(main, beside)}
        runs |= {plan.role: self._run_alone(plan, alone[plan.role]) for plan in beside}
        try:
            while runs:
                self._supervisor.main_thread.take_turn()
                for role, run in list(runs.items()):
                    try:
                        next(run)
                    except StopIteration as end:
                        if end.value is not None:
                            ending: AgreedStep = end.value
                            return ending
                        del runs[role]
                        if role is main.role:
                            for one in alone.values():
                                one.is_closing = True
                if runs:
                    self._channel.wait(POLL_INTERVAL_S)
            return None
        finally:
            for run in runs.values():
                run.close()
            self._supervisor.main_thread.end_turns()

    def _independent(self, plan: GroupPlan, phase: int) -> IndependentRun:
        job = self._job

        def command(generation: int) -> Sequence[str]:
            return job.worker_command(plan, self._restart, generation, None, self._decisions.damaged.names)

        group = IndependentGroup(
            plan,
            self._decisions.next_generation(plan.role),
            self._seat(plan),
            job.attempt_dir,
            command,
            self._fork_server if self._is_forked(plan) else None,
        )
        return IndependentRun(
            group,
            phase,
            self._channel,
            self._decisions,
            self._supervisor,
            self._events,
            self._write,
            lambda: self._restart_dir,
        )

    def _run_alone(self, plan: GroupPlan, run: IndependentRun) -> Generator[None, None, AgreedStep | None]:
        """Run a group whose workers restart individually; see :meth:`IndependentRun.run`."""
        yield from self._imported(plan)
        return (yield from run.run())

    def _run_together(self, plan: GroupPlan, beside: Sequence[GroupPlan]) -> Generator[None, None, AgreedStep | None]:
        """Run a group that restarts as a whole, until it succeeds (None) or the attempt ends.

        Args:
            plan: The group.
            beside: Other groups of the phase, which keep running while it restarts.
        """
        job = self._job
        while True:
            yield from self._imported(plan)
            topic = f"{plan.role}/{self._restart}"
            step = yield from self._agreement.agree(
                f"ready/{topic}", Ready(), Ready, lambda _: self._decisions.begin_start(plan, self._restart_dir)
            )
            if step.action == "start":
                group = self._joint(plan, step.store)
                end = yield from self._run_once(group, beside)
                step = yield from self._agreement.agree(
                    f"end/{topic}",
                    end,
                    NodeEnd,
                    lambda ends, group=group: self._decisions.conclude(group, ends, self._restart_dir),  # type: ignore[misc]
                )
                self._supervisor.release(plan.role)
            if step.action == "next_role":
                self._decisions.take_generations(step)
                return None
            if step.action == "end":
                return step
            self._decisions.damaged.names = list(step.damaged)
            self._enter_restart(plan.role)
            if self._gpus is not None and job.has(plan):
                yield from self._gpus.wait(without={gpu for one in beside if job.has(one) for gpu in one.gpus})

    def _joint(self, plan: GroupPlan, store: str) -> WorkerGroup:
        """Create the worker group for one start.

        Args:
            store: ``host:port`` of the rendezvous store for workers on several nodes; empty for a single node.
        """
        job, seat = self._job, self._seat(plan)
        file = seat.slots.store(self._restart) if len(plan.nodes) == 1 else None
        command = job.worker_command(plan, self._restart, None, file, self._decisions.damaged.names)
        name = f"{job.run_dir.run_id}.{job.attempt}.{self._restart}"
        start = JointStart(name, store, command, self._restart_dir)
        fork_server = self._fork_server if self._is_forked(plan) else None
        return JointGroup(plan, self._restart, seat, start, fork_server)

    def _seat(self, plan: GroupPlan) -> GroupSeat:
        job, slots = self._job, self._slots[plan.role]
        gpus = job.placement.gpus_per_node
        return GroupSeat(job.nodes.name, job.position(plan), slots, self._channel.clock, gpus)

    def _enter_restart(self, role: Role) -> None:
        """Advance to the next restart unless the current one is still unused; restarts count across all phases."""
        if self._restart_is_used:
            self._restart += 1
            self._restart_is_used = False
            self._events.move_to(self._restart_dir)
        self._supervisor.enter(role, self._restart_dir)

    def _run_once(self, group: WorkerGroup, beside: Sequence[GroupPlan]) -> Generator[None, None, NodeEnd]:
        """Start this node's workers and wait until they and all their descendants have exited."""
        self._restart_is_used = True
        self._supervisor.supervise(group, group.generation)
        try:
            # Whatever prevents a start is a failure to be explained: the classifier reads the text.
            with suppress(StartAbandoned), Survived(but=(StartAbandoned,)) as failed:
                group.start()
                if group.workers:
                    log_start(self._events, group.role, group.workers.values())
                while True:
                    for worker, end in group.poll():
                        log_exit(self._events, group.role, worker, end)
                    self._take_warnings()
                    if group.is_over:
                        break
                    yield
        finally:
            group.close()
            self._supervisor.settle()
            self._take_warnings(now=True)
            # If other groups are running, kill only the processes marked as this group's.
            of_group = group if beside else None
            left = self._end_descendants(of_group)
        # The kernel may take long to free hundreds of gigabytes of pinned memory.
        until_s = time.monotonic() + GPU_TIMEOUT_S
        requests = self._supervisor.requests
        while left and time.monotonic() < until_s and not (requests.to_end or requests.stop):
            yield
            left = self._end_descendants(of_group, timeout_s=0.0)
        for process in left:
            self._events.print_line(f"process did not end: {process}")
        report = exit_reports.report(group, failed.trace, self._write)
        return report.model_copy(update={"num_left": len(left)})

    def _take_warnings(self, *, now: bool = False) -> None:
        if self._warnings is not None:
            self._warnings.take(self._restart_dir, now=now)

    def _end_descendants(self, group: WorkerGroup | None = None, timeout_s: float = 10.0) -> list[str]:
        """Kill all descendants of this process, or only those of one group's workers; return those that are left."""
        name, workers = ("", ()) if group is None else (group.role.value, group.workers.values())
        sessions = {worker.pid for worker in workers}
        return processes.end_descendants(timeout_s, name, sessions, self._fork_server.pids)

    @property
    def _write(self) -> Write:
        return self._leader.write if self._channel.leads else try_to_write

    @property
    def _restart_dir(self) -> RestartDir:
        return self._job.attempt_dir.restart(self._restart)


def try_to_write(path: Path, model: BaseModel) -> bool:
    """Write a file in the run directory; False if that fails."""
    try:
        write_model(path, model)
    except OSError:
        return False
    return True
