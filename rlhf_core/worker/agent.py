"""The agent: one process per node. It starts the workers of each role in turn, and starts them again when that helps.

The main thread runs restarts, one elastic agent each (``elastic.py``); a second thread supervises
(``supervisor.py``). On the first node the agent is also the leader (``leader.py``). Everything this process ever
started is ended when it ends; if it is killed, the kernel ends its workers.
"""

import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from rlhf_core.diagnosis.classify import Evidence, classify
from rlhf_core.diagnosis.liveness import GapTracker
from rlhf_core.diagnosis.policy import Choice
from rlhf_core.errors import RunDirError
from rlhf_core.run_dir import RestartDir, RunDir, read_model
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.reports import AttemptOutcome
from rlhf_core.schemas.resources import JOB_VARIABLE, Placement, Role, RolePlan, job_marker
from rlhf_core.schemas.run import RunSpec
from rlhf_core.worker import endings, processes
from rlhf_core.worker.endings import Failure, Outcomes
from rlhf_core.worker.events import EventLog
from rlhf_core.worker.heartbeat import SlotFile
from rlhf_core.worker.leader import Leader, RestartBudget, record_decision, record_incident
from rlhf_core.worker.preparation import GpuWait, prebuild
from rlhf_core.worker.roles import TARGETS
from rlhf_core.worker.signals import SignalInbox
from rlhf_core.worker.supervisor import Supervisor
from rlhf_core.worker.watch import Exit, Started, Watch
from rlhf_core.worker.worker_process import AGENT_VARIABLE, SLOTS_VARIABLE, spare_outcome

_GOOD_ENDS = (AttemptState.COMPLETED, AttemptState.PREEMPTED)


@dataclass(frozen=True)
class Job:
    """What this agent is there for."""

    run_dir: RunDir
    attempt: int
    node: str
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
    num_restarts: int = 0


class AttemptFailed(Exception):
    """Ends the attempt with what went wrong before workers could be started."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


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
    taken = leader.claim()
    if taken:
        print(f"{taken}; this agent ends", file=sys.stderr, flush=True)
        return 1
    leader.reserve.hold()
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    events = EventLog(node, directory.attempt(attempt).restart(0))
    try:
        spec, placement = _read(directory, attempt)
        job = Job(directory, attempt, node, spec, placement, targets or {}, import_paths)
        ending = Agent(job, inbox, leader, events).run()
    except AttemptFailed as error:
        ending = Ending(AttemptState.FAILED, str(error), error.kind)
    except Exception as error:  # noqa: BLE001 - an attempt without an outcome leaves everybody guessing
        text = traceback.format_exc()
        sys.stderr.write(text)
        kind = classify(Evidence(agent_log=text)).kind
        ending = Ending(AttemptState.FAILED, f"the agent failed: {type(error).__name__}: {error}", kind)
    return _finish(attempt, ending, leader, events)


def _read(run_dir: RunDir, attempt: int) -> tuple[RunSpec, Placement]:
    path = run_dir.attempt(attempt).placement
    try:
        spec = run_dir.read_spec().spec
    except RunDirError as error:
        raise AttemptFailed(FailureKind.CONFIG, str(error)) from error
    placement = read_model(path, Placement)
    if placement is None or not placement.roles:
        raise AttemptFailed(FailureKind.CONFIG, f"{path} is missing, damaged or names no role")
    if placement.num_nodes != 1:
        message = f"{path} asks for {placement.num_nodes} nodes; this version runs attempts on one node"
        raise AttemptFailed(FailureKind.CONFIG, message)
    return spec, placement


def _finish(attempt: int, ending: Ending, leader: Leader, events: EventLog) -> int:
    events.add("agent_ended", f"attempt {attempt} is {ending.state}: {ending.message}", state=ending.state)
    events.close()
    outcome = AttemptOutcome(
        attempt=attempt,
        state=ending.state,
        failure_kind=ending.kind,
        message=ending.message,
        num_restarts=ending.num_restarts,
        last_step=leader.last_step(),
        time=utc_now(),
    )
    written = leader.finish(outcome)
    if not written:
        events.say("the outcome could not be written")
    return 0 if written and ending.state in _GOOD_ENDS else 1


class Agent:
    """One node of one attempt."""

    def __init__(self, job: Job, inbox: SignalInbox, leader: Leader, events: EventLog) -> None:
        self._job = job
        self._inbox = inbox
        self._leader = leader
        self._events = events
        self._budget = RestartBudget(job.run_dir, job.spec.supervise)
        self._gpus: GpuWait | None = None
        self._restart = 0
        self._restart_is_used = False

    def run(self) -> Ending:
        """Run all roles in their order; whatever happens, nothing that was started is left.

        Raises:
            AttemptFailed: something went wrong before workers could be started.
        """
        job = self._job
        processes.adopt_orphans()
        num_slots = max(plan.workers_per_node for plan in job.placement.roles)
        slots = SlotFile(job.run_dir.run_id, job.attempt, job.node, num_slots)
        tracker = GapTracker.of(job.spec.supervise)
        supervisor = Supervisor(
            job.node, 0, slots, self._inbox, tracker, self._events, self._leader.new_commands, job.run_dir.root
        )
        supervisor.enter(job.placement.roles[0].role, self._restart_dir)
        supervisor.start()
        self._events.add("agent_started", f"agent of attempt {job.attempt} started with pid {os.getpid()}")
        try:
            self._prepare(slots, supervisor)
            for plan in job.placement.roles:
                ending = self._run_role(plan, slots, supervisor)
                if ending is not None:
                    return ending
            return self._ending(AttemptState.COMPLETED, "every role ended well")
        finally:
            supervisor.stop()
            self._end_all()
            for index in range(num_slots):
                spare_outcome(slots.path, index).unlink(missing_ok=True)
            slots.remove()

    def _prepare(self, slots: SlotFile, supervisor: Supervisor) -> None:
        job = self._job
        os.environ[JOB_VARIABLE] = job_marker(job.run_dir.run_id, job.attempt)
        os.environ[SLOTS_VARIABLE] = str(slots.path)
        os.environ[AGENT_VARIABLE] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(job.spec.resources.cpus_per_rank))
        native = any(plan.role in TARGETS and plan.role not in job.targets for plan in job.placement.roles)
        if job.placement.gpus_per_node > 0:
            self._gpus = GpuWait(self._events)
        elif native:
            built = prebuild(job.spec.supervise.setup_floor_s, lambda: supervisor.orders.to_end)
            how = "compiled operations are there" if built.ok else "operations could not be compiled"
            message = f"{how} after {built.seconds} s: {built.output[-2000:]}"
            self._events.add("prebuild", message, seconds=built.seconds, ok=built.ok)
            if not built.ok and not supervisor.orders.to_end:
                raise AttemptFailed(FailureKind.IMPORT_ERROR, message)

    # -----------------------------------------------------------------------------------------------------------------
    # Roles and restarts

    def _run_role(self, plan: RolePlan, slots: SlotFile, supervisor: Supervisor) -> Ending | None:
        """Run one role to its good end (None), or to the end of the attempt."""
        message = f"role {plan.role} starts with {plan.workers_per_node} workers"
        self._enter_restart(plan.role, supervisor)
        self._events.add("role_started", message, plan.role, workers=plan.workers_per_node)
        while True:
            ending = self._asked_to_end(supervisor, between_starts=True)
            if ending is not None:
                return ending
            watch = Watch(plan.role, self._restart_dir, plan.workers_per_node, slots, supervisor.clock)
            problem = self._run_once(watch, supervisor)
            ending = self._asked_to_end(supervisor, between_starts=False)
            if ending is not None:
                return ending
            outcomes = endings.read_outcomes(watch, self._job.node, self._leader.write)
            if not problem and endings.all_well(watch, outcomes):
                return self._end_role(plan.role, outcomes, supervisor)
            failure = endings.explain(watch, self._job.node, outcomes, problem)
            choice = self._decide(failure, supervisor)
            if choice.action is not Action.RESTART_IN_PLACE:
                message = f"{failure.diagnosis.message} ({choice.reason})"
                return self._ending(AttemptState.FAILED, message, failure.diagnosis.kind)
            self._enter_restart(plan.role, supervisor)
            if self._gpus is not None:
                self._gpus.wait()

    @property
    def _restart_dir(self) -> RestartDir:
        return self._job.run_dir.attempt(self._job.attempt).restart(self._restart)

    def _enter_restart(self, role: Role, supervisor: Supervisor) -> None:
        """Go on to the next restart, unless this one was not used yet. They are counted over all roles."""
        if self._restart_is_used:
            self._restart += 1
            self._restart_is_used = False
            self._events.move_to(self._restart_dir)
        supervisor.enter(role, self._restart_dir)

    def _run_once(self, watch: Watch, supervisor: Supervisor) -> str:
        """Start the workers and stay until they have ended, with all that they started.

        Returns:
            The traceback of what kept them from being started; normally nothing.
        """
        # Torch is imported here, when everything that can go wrong without it has been looked at.
        from rlhf_core.worker.elastic import Start, StartAbandoned, prepare_environment, run_workers

        job = self._job
        prepare_environment()
        self._restart_is_used = True
        watch.slots.clear()
        supervisor.watch(watch)
        start = Start(
            rendezvous_id=f"{job.run_dir.run_id}.{job.attempt}.{self._restart}",
            endpoint="127.0.0.1:0",
            num_nodes=1,
            is_host=True,
            address="127.0.0.1",
            command=self._worker_command(watch.role),
        )
        try:
            run_workers(
                start,
                watch,
                self._inbox,
                on_start=self._note_start,
                on_exit=self._note_exit,
                has_spoken=lambda worker: endings.has_spoken(watch, job.node, worker.local_rank),
            )
        except StartAbandoned:
            return ""
        except Exception:  # noqa: BLE001 - elastic raises many types; the classifier reads the text
            return traceback.format_exc()
        finally:
            supervisor.release()
            self._end_all()
        return ""

    def _worker_command(self, role: Role) -> tuple[str, ...]:
        job = self._job
        command = ["-u", "-m", "rlhf_core.worker", "role", role.value]
        command += ["--run-dir", str(job.run_dir.root), "--attempt", str(job.attempt)]
        command += ["--restart", str(self._restart), "--node", job.node]
        if role in job.targets:
            command += ["--target", job.targets[role]]
        for path in job.import_paths:
            command += ["--path", str(path.absolute())]
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
        for survivor in processes.end_descendants():
            self._events.say(f"could not be ended: {survivor}")

    # -----------------------------------------------------------------------------------------------------------------
    # Ends

    def _ending(self, state: AttemptState, message: str, kind: FailureKind | None = None) -> Ending:
        return Ending(state, message, kind, self._budget.restarts)

    def _asked_to_end(self, supervisor: Supervisor, *, between_starts: bool) -> Ending | None:
        """The end of the attempt, where somebody asked for it. Between two starts there is nothing to save first."""
        orders = supervisor.orders
        if orders.cancel:
            return self._ending(AttemptState.CANCELLED, orders.cancel, FailureKind.USER_CANCEL)
        if orders.end:
            message = f"the agent was ended by {orders.end} from outside; the run can go on from its last checkpoint"
            return self._ending(AttemptState.FAILED, message, FailureKind.PREEMPTION)
        if orders.stop and between_starts:
            return self._ending(AttemptState.PREEMPTED, f"ended between two starts of the workers: {orders.stop}")
        return None

    def _end_role(self, role: Role, outcomes: Outcomes, supervisor: Supervisor) -> Ending | None:
        early = any(outcome.stopped_early for outcome in outcomes.values())
        how = "saved and ended early" if early else "ended well"
        self._events.add("role_ended", f"role {role} {how}", role, stopped_early=early)
        if early:
            reason = supervisor.orders.stop or "the workers decided so"
            return self._ending(AttemptState.PREEMPTED, f"saved and ended early: {reason}")
        self._budget.renew()
        return None

    def _decide(self, failure: Failure, supervisor: Supervisor) -> Choice:
        """Write down what was found and what will be done about it; only then may it be done."""
        record_incident(self._leader, self._events, self._restart_dir, self._job.run_dir, failure)
        choice = self._budget.choose(failure.diagnosis)
        if supervisor.orders.stop and choice.action is Action.RESTART_IN_PLACE:
            reason = f"not restarted in place, as the attempt is to end: {supervisor.orders.stop}"
            choice = Choice(Action.NEW_ATTEMPT, 0.0, reason)
        record_decision(self._leader, self._events, self._restart_dir, choice)
        return choice
