"""The agent's supervising thread: reads signals, orders and slots, detects hangs and publishes its observations.

It only observes, sends requests and kills. The main thread, which starts and reaps the workers, decides how to respond
to a failure. On agent 0 the supervising thread watches the workers of all nodes: the other agents report their state
several times a second and follow its orders.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from rlhf_core.diagnosis.hangs.liveness import GapTracker
from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.agent_messages import Collected, GroupOrders, NodeState, Orders
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentCommand, AgentStatus
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.survival import Survived
from rlhf_core.worker import processes
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.order_book import OrderBook
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.evidence.collection import STACK_TIMEOUT_S
from rlhf_core.worker.groups.base import PEER_TIMEOUT_S, WorkerGroup
from rlhf_core.worker.nodes.probe import FACTS_S
from rlhf_core.worker.signals import ENDING, SAVING, SignalInbox
from rlhf_core.worker.supervision.agent_loss import find_loss
from rlhf_core.worker.supervision.exit_deadline import ExitDeadline
from rlhf_core.worker.supervision.external_requests import ExternalRequests
from rlhf_core.worker.supervision.group import SupervisedGroup, states_of
from rlhf_core.worker.supervision.hang_judge import HangJudge
from rlhf_core.worker.telemetry.anomalies import Anomalies, NodeReading
from rlhf_core.worker.telemetry.node import Telemetry
from rlhf_core.worker.telemetry.series import TelemetrySeries

TICK_INTERVAL_S = 0.25
AWAKE_INTERVAL_S = 0.5
PUBLISH_INTERVAL_S = 2.0
COMMANDS_INTERVAL_S = 1.0
REAP_INTERVAL_S = 10.0
LAST_STATE_TIMEOUT_S = 15.0
"""Silence of an agent after which its node is given up while all workers are being killed, in seconds."""
UNHEARD_TIMEOUT_S = 3.0
"""Silence of an agent, several heartbeats long, after which its workers count as missing for those that wait for them:
a lost node of rollout engines is diagnosed as such rather than as a hang of the trainers."""
LEADER_LOST_TIMEOUT_S = 10.0
"""Longest time for the main thread to exit after agent 0 was lost, without whose store no agreement is possible, or
after it was found to be stuck itself."""
END_TIMEOUT_S = 120.0
"""The same for any other cause; allows for an outcome that cannot be written for a while."""


class Supervisor(threading.Thread):
    """The supervising thread, one per agent; it outlives all workers."""

    def __init__(
        self,
        channel: AgentChannel,
        inbox: SignalInbox,
        tracker: GapTracker,
        events: EventLog,
        new_commands: Callable[[], list[AgentCommand]],
        spec: SuperviseSpec,
        run_folder: Path,
        deadline: ExitDeadline,
        is_superseded: Callable[[], bool],
        owned_elsewhere: Callable[[], Collection[int]],
    ) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.requests = ExternalRequests()
        self.clock = channel.clock
        self._channel = channel
        self._node = channel.nodes.name
        self._inbox = inbox
        self._tracker = tracker
        self._events = events
        self._new_commands = new_commands
        self._agent_floor_s = spec.agent_floor_s
        self._main_floor_s = max(spec.setup_floor_s, FACTS_S)
        self._deadline = deadline
        self._is_superseded = is_superseded
        self._owned_elsewhere = owned_elsewhere
        self._telemetry = Telemetry(events.print_line, run_folder)
        self._series = TelemetrySeries(self._node, events.print_line)
        self._anomalies = Anomalies(events)
        self.orders = OrderBook(channel)
        self._judge = HangJudge(channel, self.orders, tracker, events, spec.evidence_s)
        self._place: tuple[Role, RestartDir] | None = None
        self._groups: dict[Role, SupervisedGroup] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._published = 0
        self._reading: dict[str, float] = {}
        self._orders_at_s = 0.0
        self._publish_at_s = 0.0
        self._reap_at_s = 0.0
        self._unwritten = ""
        self._num_pauses = 0
        self._may_be_superseded = False
        self._turn: int | None = None
        self._turn_seen: int | None = None
        self._ticked_at_s = time.monotonic()
        self._main_stuck_s = 0.0

    # -----------------------------------------------------------------------------------------------------------------
    # Called by the main thread

    def enter(self, role: Role, restart_dir: RestartDir) -> None:
        """Set the agent's current role and restart."""
        with self._lock:
            self._place = (role, restart_dir)
            self._publish_at_s = 0.0

    def supervise(self, group: WorkerGroup, start: int) -> SupervisedGroup:
        """Start supervising these workers, in addition to other groups.

        Args:
            start: See ``GroupState.start``.
        """
        with self._lock:
            self._tracker.begin_restart(group.role)
            self._anomalies.begin_restart()
            supervised = SupervisedGroup.of(group, start, self._tracker)
            if group.role in self.orders.current.groups:
                # Orders to start or kill single workers belong to a phase; request numbers only ever increase.
                before = self.orders.current.groups[group.role]
                self.orders.set_group(group.role, GroupOrders(collect=before.collect))
            self._groups[group.role] = supervised
        if self.requests.to_end:
            group.end()
        elif self.requests.stop and not group.is_alone:
            group.seat.slots.request_stop()
        return supervised

    def take_turn(self) -> None:
        """Show that the main thread is not stuck in a call; called all the time from the start of an attempt on."""
        self._turn = (self._turn or 0) + 1

    def end_turns(self) -> None:
        """Expect no more turns until the next one: the phase is over."""
        self._turn = None

    def settle(self) -> None:
        """Wait, after this node's workers have exited, until no investigation of them is in progress."""
        with self._lock:
            pass

    def release(self, role: Role) -> None:
        """Stop supervising a group; all nodes agree on the fate of its workers."""
        with self._lock:
            self._groups.pop(role, None)

    def stop(self) -> None:
        """Stop the thread."""
        self._ending.set()
        self.join(timeout=STACK_TIMEOUT_S + 5.0)
        self._series.stop(time.monotonic())
        self._telemetry.stop()

    # -----------------------------------------------------------------------------------------------------------------
    # The thread

    def run(self) -> None:
        """Tick until stopped."""
        threading.Thread(target=self._stay_awake, name="awake", daemon=True).start()
        while not self._ending.is_set():
            with Survived() as failed:  # one failed tick must not leave the workers unsupervised
                self._tick()
            if failed.error is not None:
                self._print_once(f"supervision stumbled: {failed.problem}")
                time.sleep(TICK_INTERVAL_S)

    def _stay_awake(self) -> None:
        """Tick the pause clock in a dedicated thread: a slow file system or evidence may delay the main loop."""
        while not self._ending.wait(AWAKE_INTERVAL_S):
            self.clock.tick(time.monotonic())

    def _tick(self) -> None:
        for number in self._inbox.wait(TICK_INTERVAL_S):
            self._take_signal(number)
        now_s = time.monotonic()
        if now_s >= self._orders_at_s:
            self._orders_at_s = now_s + COMMANDS_INTERVAL_S
            for command in self._new_commands():
                self._carry_out(command)
        with self._lock:
            now_s = time.monotonic()
            self.clock.tick(now_s)
            if self.clock.num_pauses != self._num_pauses:
                self._num_pauses = self.clock.num_pauses
                self._wake_up()
                for one in self._groups.values():
                    one.hang_check.clear()
            if self._may_be_superseded:
                self._leave_if_superseded()
            self._watch_main_thread(now_s)
            state = self._state(now_s)
            self._channel.send("state", state)
            if refusal := self._channel.new_refusal():
                self._events.add("peer", refusal, refused=True)
            if self._channel.leads:
                self._lead()
            else:
                self._follow()
            if self.requests.to_end:
                self._end_in(END_TIMEOUT_S, "the agent was asked to end but has not")
            self._publish(state, now_s)
            self._reap(now_s)

    def _wake_up(self) -> None:
        """Handle a pause of this process (a suspended job, a frozen node), during which the run may have moved on."""
        self._may_be_superseded = True
        self._events.print_line(
            f"this agent was suspended for {self.clock.pause_s:.0f} s; silence is measured from now on"
        )

    def _leave_if_superseded(self) -> None:
        with contextlib.suppress(OSError):  # after a pause, the file system may not respond yet: looked up again
            if self._is_superseded():
                self._deadline.leave_now()
            self._may_be_superseded = False

    def _watch_main_thread(self, now_s: float) -> None:
        """Give up this node if its main thread is stuck in a call, as on a hung file system: all nodes would wait for
        it forever. Only time in which this thread was able to run counts."""
        passed_s, self._ticked_at_s = min(now_s - self._ticked_at_s, 1.0), now_s
        is_stuck = self._turn is not None and self._turn == self._turn_seen
        self._main_stuck_s = self._main_stuck_s + passed_s if is_stuck else 0.0
        self._turn_seen = self._turn
        if self._main_stuck_s > self._main_floor_s:
            stuck = f"the main thread of the agent of {self._node} has been stuck for {self._main_stuck_s:.0f} s"
            self._give_up(self._node, stuck, FailureKind.NODE_LOST)
            self._end_in(LEADER_LOST_TIMEOUT_S, f"{stuck}, and it has not ended")

    def _end_in(self, seconds: float, why: str) -> None:
        """Set a deadline after which this agent is killed, in case its main thread is stuck in a call."""
        self._deadline.set(seconds, f"{why} within {seconds:.0f} s; its second thread ends it")

    def _state(self, now_s: float) -> NodeState:
        """State of this node, with a new telemetry reading if one is due."""
        if self._place is not None and now_s >= self._publish_at_s:
            self._published += 1
            ranks = [rank for one in self._groups.values() for rank in one.group.living()]
            pids = [pid for rank in ranks for pid in (rank.pid, *(other.pid for other in rank.speaks_for))]
            self._reading = self._telemetry.read(pids)
        groups = tuple(one.state(self.orders.group(role), self._reading) for role, one in self._groups.items())
        is_broken = self.requests.broken_node == self._node
        return NodeState(
            wall_s=time.time(),
            groups=groups,
            ended_by=self.requests.end,
            broken=self.requests.broken if is_broken else "",
            broken_kind=self.requests.broken_kind,
            published=self._published,
            telemetry=self._reading,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # External requests

    def _take_signal(self, number: signal.Signals) -> None:
        if number == SAVING:
            self._order_stop(f"{number.name}: the time limit is near or Slurm is reclaiming the nodes")
        elif number == signal.SIGTERM and "SLURM_JOB_ID" in os.environ and not self.requests.stop:
            # So do preemption, scancel, and srun once another task of the step has failed; Slurm then kills by itself.
            self._order_stop(f"{number.name}: Slurm preempts or cancels the job, or srun ends it after another failure")
        elif number in ENDING:
            self._order_end(number.name)

    def _carry_out(self, command: AgentCommand) -> None:
        why = f": {command.reason}" if command.reason else ""
        self._events.add("command", f"order from the control plane: {command.kind}{why}", command=command.kind)
        match command.kind:
            case "cancel":
                self.requests.cancel = command.reason or "the user cancelled the run"
                self._kill_workers()
                self.orders.change(cancel=self.requests.cancel)
            case "stop_after_step":
                self._order_stop(command.reason or "the user asked to save and stop")

    def _order_end(self, name: str) -> None:
        if not self.requests.end:
            self.requests.end = name
            self._events.add("killed", f"{name} received: ending everything", signal=name)
        self._kill_workers()

    def _order_stop(self, reason: str) -> None:
        if not self.requests.stop:
            self.requests.stop = reason
            for one in self._trained_groups():
                one.group.seat.slots.request_stop()
            self._events.add("save_requested", f"the workers were asked to save and end: {reason}")
            if self._channel.leads:
                self.orders.change(stop=reason)

    def _kill_workers(self) -> None:
        for one in list(self._groups.values()):
            one.group.end()

    def _trained_groups(self) -> list[SupervisedGroup]:
        """Groups whose state is saved. Groups with individual restarts only serve these, until these have finished."""
        return [one for one in self._groups.values() if not one.is_alone]

    # -----------------------------------------------------------------------------------------------------------------
    # On agent 0

    def _lead(self) -> None:
        """Check all nodes for lost agents, failed workers and hung workers."""
        states = self._channel.received("state", NodeState)
        self._find_lost_agents(states)
        now_s = time.monotonic()
        here = {role: states_of(one, states) for role, one in self._groups.items()}
        reachable = {index for index in states if self._channel.silence_s(index) <= UNHEARD_TIMEOUT_S}
        for role, one in self._groups.items():
            found = [state for index, state in here[role].items() if index in reachable]
            one.observe(self.orders.still_wanted(role, found), self._tracker, now_s)
        for role, one in list(self._groups.items()):
            states_here = here[role]
            if self.requests.to_end or any(state.failed for state in states_here.values()):
                self._end_all(one)
            elif len(states_here) == self._channel.nodes.num and all(state.started for state in states_here.values()):
                conditions = {role: group.condition for role, group in self._groups.items()}
                self._judge.judge(one, [states_here[index] for index in sorted(states_here)], conditions)

    def _find_lost_agents(self, states: dict[int, NodeState]) -> None:
        names = self._channel.nodes.names
        for index, state in states.items():
            if state.ended_by and index != self._channel.nodes.index:
                self._order_end(f"{state.ended_by} on {names[index]}")
            if state.broken:
                self._give_up(names[index], state.broken, state.broken_kind)
        loss = find_loss(self._channel, self._agent_timeout_s())
        if loss is not None:
            self._give_up(loss.node, loss.message, FailureKind.NODE_LOST)

    def _agent_timeout_s(self) -> float:
        """Allowed silence of an agent; shorter while all workers are being killed, when every node waits for it."""
        groups = self._trained_groups()
        ending = any(self.orders.group(one.group.role).kill == one.group.generation for one in groups)
        return min(LAST_STATE_TIMEOUT_S, self._agent_floor_s) if ending else self._agent_floor_s

    def _give_up(self, node: str, message: str, kind: FailureKind) -> None:
        if not self.requests.broken:
            self.requests.broken, self.requests.broken_kind, self.requests.broken_node = message, kind, node
            self._events.add("peer", f"{message}; ending everything", node_lost=node)
            self._kill_workers()

    def _end_all(self, one: SupervisedGroup) -> None:
        """Order all workers of a failed group killed on every node, after their peers had time to report."""
        group, now_s = one.group, time.monotonic()
        if one.is_alone:
            group.end()  # the attempt is ending, and nothing else kills all of them
            return
        if one.failed_at_s is None:
            one.failed_at_s = now_s
        timeout_s = 0.0 if self.requests.to_end or group.hang is not None else PEER_TIMEOUT_S
        if now_s - one.failed_at_s >= timeout_s and self.orders.group(group.role).kill != group.generation:
            self.orders.change_group(group.role, kill=group.generation)
            group.end()

    # -----------------------------------------------------------------------------------------------------------------
    # On the other agents

    def _follow(self) -> None:
        orders = self._channel.published("orders", Orders)
        if self._channel.is_lost and not self.requests.broken:
            self.requests.broken = "agent 0 no longer responds"
            self._kill_workers()
            self._end_in(LEADER_LOST_TIMEOUT_S, "agent 0 is lost, but this agent has not ended")
            # The controller acts on this line, which saves it waiting for agent 0's files to go stale.
            self._events.add("peer", f"{self.requests.broken}; ending everything", leader_lost=True)
        if orders is None:
            return
        before = self.orders.take(orders)
        if orders.cancel and not self.requests.cancel:
            self.requests.cancel = orders.cancel
            self._kill_workers()
        if orders.stop:
            self._order_stop(orders.stop)
        if orders.over is not None:
            self._kill_workers()
        for role, one in list(self._groups.items()):
            wanted = self.orders.group(role)
            one.obey(wanted, self._channel.nodes.index, partial(self._events.add, "killed", role=role))
            if wanted.collect > before.groups.get(role, GroupOrders()).collect:
                ranks = one.collect(wanted.collect_ranks, self._events)
                self._channel.send(f"evidence/{role}/{wanted.collect}", Collected(ranks=ranks))

    # -----------------------------------------------------------------------------------------------------------------
    # Publishing

    def _publish(self, state: NodeState, now_s: float) -> None:
        if self._place is None or now_s < self._publish_at_s:
            return
        self._publish_at_s = now_s + PUBLISH_INTERVAL_S
        role, restart_dir = self._place
        self._series.add(restart_dir, state.telemetry, now_s)
        nodes = self._channel.nodes
        status = AgentStatus(
            node=self._node,
            node_index=nodes.index,
            attempt=restart_dir.attempt,
            restart=restart_dir.restart,
            sequence=state.published,
            role=role,
            ranks=state.ranks,
            telemetry=state.telemetry,
            longest_gaps_s=self._tracker.all_longest_s,
            findings=self._anomalies.update(self._readings(), now_s) if self._channel.leads else (),
        )
        try:
            write_model(restart_dir.agent_status(self._node), status)
            self._unwritten = ""
        except OSError as error:
            # Training does not depend on it, and the next attempt follows in two seconds.
            self._print_once(f"failed to write the status: {error}")

    def _readings(self) -> Iterable[NodeReading]:
        for index, state in self._channel.received("state", NodeState).items():
            name, work = self._channel.nodes.names[index], self._work_of(index)
            yield NodeReading(name, state.published, state.telemetry, state.ranks, work)

    def _work_of(self, index: int) -> str:
        """Roles of a node's groups that restart as a whole or, if it has none, of those with individual restarts."""
        here = [one for one in self._groups.values() if index in one.group.plan.nodes]
        return " ".join(one.group.role for one in here if not one.is_alone) or " ".join(one.group.role for one in here)

    def _reap(self, now_s: float) -> None:
        owned = {worker.pid for one in self._groups.values() for worker in one.group.workers.values()}
        if owned and now_s >= self._reap_at_s:
            self._reap_at_s = now_s + REAP_INTERVAL_S
            # A young child may be a worker that is just being started; its group reaps it.
            processes.reap_orphans(owned | set(self._owned_elsewhere()), min_age_s=REAP_INTERVAL_S)

    def _print_once(self, text: str) -> None:
        if text != self._unwritten:
            self._unwritten = text
            self._events.print_line(text)
