"""The agent's supervising thread: reads signals, orders and slots, finds hangs, publishes what it sees.

It only ever watches, asks and kills. What follows from a failure is decided in the main thread, which starts the
workers and sees them end. On agent 0 it watches over the workers of all nodes: the others tell it several times a
second how theirs stand, and do as it orders.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.diagnosis.liveness import GapTracker, LoopClock, Suspect, describe, judge
from rlhf_core.diagnosis.standstill import confirm
from rlhf_core.diagnosis.verdict import blame
from rlhf_core.run_dir import RestartDir, write_model
from rlhf_core.schemas.agent_messages import Collected, NodeState, Orders
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentCommand, AgentStatus, RankStatus
from rlhf_core.schemas.resources import Role
from rlhf_core.worker import collectives, evidence, processes
from rlhf_core.worker.agent_channel import AgentChannel
from rlhf_core.worker.agent_loss import find_loss
from rlhf_core.worker.anomalies import Anomalies, NodeReading
from rlhf_core.worker.early_hang_check import EarlyHangCheck, NodeInspections
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.exit_deadline import ExitDeadline
from rlhf_core.worker.groups.base import PEER_TIMEOUT_S, Hang, WorkerGroup
from rlhf_core.worker.heartbeat import SlotFile
from rlhf_core.worker.signals import ENDING, SAVING, SignalInbox
from rlhf_core.worker.telemetry import Telemetry
from rlhf_core.worker.telemetry_series import TelemetrySeries

TICK_INTERVAL_S = 0.25
PUBLISH_INTERVAL_S = 2.0
COMMANDS_INTERVAL_S = 1.0
REAP_INTERVAL_S = 10.0
LAST_STATE_TIMEOUT_S = 15.0
"""Silence of an agent after which its node is given up, once all workers are being ended."""
LEADER_LOST_TIMEOUT_S = 10.0
"""Longest time for the main thread to end after agent 0 was lost: with its store nothing is left to be agreed on."""
END_TIMEOUT_S = 120.0
"""The same in any other case, an outcome that cannot be written for a while included."""


@dataclass(frozen=True)
class PeerTimeouts:
    """How long agent 0 waits for other nodes, in seconds."""

    evidence_s: float = 10.0
    """For evidence, before all workers of a hung job are ended."""
    agent_s: float = 20.0
    """For a sign of a silent agent, before its node is given up."""


@dataclass
class ExternalRequests:
    """What was asked of this agent from outside. Each is kept once it was given; empty means nobody asked."""

    cancel: str = ""
    """The user ends the run: why."""
    end: str = ""
    """A signal ends the agent: which, and on which node if it is another one."""
    stop: str = ""
    """Save and end: who asked."""
    broken: str = ""
    """An agent cannot go on, or is not heard any more: why."""
    broken_kind: FailureKind = FailureKind.UNKNOWN
    broken_node: str = ""

    @property
    def to_end(self) -> bool:
        """Whether no worker may run any more."""
        return bool(self.cancel or self.end or self.broken)


class Supervisor(threading.Thread):
    """One per agent; lives from before the first worker until after the last."""

    def __init__(
        self,
        channel: AgentChannel,
        slots: SlotFile,
        inbox: SignalInbox,
        tracker: GapTracker,
        events: EventLog,
        new_commands: Callable[[], list[AgentCommand]],
        timeouts: PeerTimeouts = PeerTimeouts(),
        telemetry_folder: Path | None = None,
        deadline: ExitDeadline | None = None,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.asked = ExternalRequests()
        self.clock = LoopClock()
        self._channel = channel
        self._node = channel.nodes.name
        self._slots = slots
        self._inbox = inbox
        self._tracker = tracker
        self._events = events
        self._new_commands = new_commands
        self._timeouts = timeouts
        self._deadline = deadline
        self._is_superseded = is_superseded
        self._telemetry = Telemetry(events.say, telemetry_folder)
        self._series = TelemetrySeries(self._node, events.say)
        self._anomalies = Anomalies(events)
        self._inspections = NodeInspections(slots)
        self._hang_check = EarlyHangCheck(tracker)
        self._orders = Orders()
        self._place: tuple[Role, RestartDir] | None = None
        self._group: WorkerGroup | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._published = 0
        self._reading: dict[str, float] = {}
        self._failed_at_s: float | None = None
        self._orders_at_s = 0.0
        self._publish_at_s = 0.0
        self._reap_at_s = 0.0
        self._unwritten = ""

    # -----------------------------------------------------------------------------------------------------------------
    # Called by the main thread

    def enter(self, role: Role, restart_dir: RestartDir) -> None:
        """From now on the agent is busy with this role in this restart."""
        with self._lock:
            self._place = (role, restart_dir)
            self._publish_at_s = 0.0

    def supervise(self, group: WorkerGroup) -> None:
        """Judge these workers from now on."""
        with self._lock:
            self._tracker.begin_restart()
            self._anomalies.begin_restart()
            self._hang_check.clear()
            self._failed_at_s = None
            self._group = group
        if self.asked.to_end:
            group.kill()

    def settle(self) -> None:
        """The workers of this node have ended. Returns once nothing is being found out about them any more."""
        with self._lock:
            pass

    def release(self) -> None:
        """What becomes of the workers is decided on all nodes."""
        with self._lock:
            self._group = None

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join(timeout=evidence.STACK_TIMEOUT_S + 5.0)
        self._series.stop(time.monotonic())
        self._telemetry.stop()

    # -----------------------------------------------------------------------------------------------------------------
    # The thread

    def run(self) -> None:
        """Tick until stopped."""
        while not self._over.is_set():
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001 - workers must not be left alone because one tick failed
                self._say_once(f"supervision stumbled: {type(error).__name__}: {error}")
                time.sleep(TICK_INTERVAL_S)

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
            if self.clock.tick(now_s):
                self._wake_up()
                self._hang_check.clear()
            state = self._state(now_s)
            self._channel.send("state", state)
            if refusal := self._channel.new_refusal():
                self._events.add("peer", refusal, refused=True)
            if self._channel.leads:
                self._lead()
            else:
                self._follow()
            if self.asked.to_end:
                self._end_in(END_TIMEOUT_S, "the agent was to end, and has not")
            self._publish(state, now_s)
            self._reap(now_s)
            self.clock.skip(time.monotonic())

    def _wake_up(self) -> None:
        """This process stood still: a suspended job, a frozen node. Meanwhile the run may have gone on without it."""
        if self._deadline is not None and self._is_superseded():
            self._deadline.leave_now()
        self._events.say(f"this agent stood still for {self.clock.pause_s:.0f} s; silences are counted from now")
        self._channel.reset_silences()

    def _end_in(self, seconds: float, why: str) -> None:
        """The main thread may wait in a call that never returns: then this thread ends the agent."""
        if self._deadline is not None:
            self._deadline.set(seconds, f"{why} within {seconds:.0f} s; it is ended by its second thread")

    def _state(self, now_s: float) -> NodeState:
        """How this node stands; with a new reading of its telemetry when one is due."""
        group = self._group
        ranks = tuple(group.living()) if group is not None else ()
        if self._place is not None and now_s >= self._publish_at_s:
            self._published += 1
            self._reading = self._telemetry.read([rank.pid for rank in ranks])
        self._inspections.answer(self._orders.inspect, ranks, self._reading)
        return NodeState(
            wall_s=time.time(),
            restart=group.restart_dir.restart if group is not None else -1,
            started=group is not None and bool(group.workers),
            failed=group is not None and group.failed,
            ended_by=self.asked.end,
            ranks=ranks,
            published=self._published,
            telemetry=self._reading,
            inspection_number=self._inspections.number,
            inspections=self._inspections.inspections,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # What is asked from outside

    def _take_signal(self, number: signal.Signals) -> None:
        if number == SAVING:
            self._order_stop(f"{number.name}: the time limit is near or the nodes are taken back")
        elif number == signal.SIGTERM and "SLURM_JOB_ID" in os.environ and not self.asked.stop:
            # So Slurm announces a preemption, and scancel; it kills by itself when the time is up.
            self._order_stop(f"{number.name}: Slurm takes the nodes back or ends the job")
        elif number in ENDING:
            self._order_end(number.name)

    def _carry_out(self, command: AgentCommand) -> None:
        why = f": {command.reason}" if command.reason else ""
        self._events.add("command", f"order from the control plane: {command.kind}{why}", command=command.kind)
        match command.kind:
            case "cancel":
                self.asked.cancel = command.reason or "the user cancelled the run"
                self._kill_workers()
                self._order(cancel=self.asked.cancel)
            case "save":
                self._slots.ask_to_save()
                self._order(saves=self._orders.saves + 1)
                self._events.add("save_requested", "the workers were asked to save and go on")
            case "stop_after_step":
                self._order_stop(command.reason or "the user asked to save and stop")

    def _order_end(self, name: str) -> None:
        if not self.asked.end:
            self.asked.end = name
            self._events.add("killed", f"{name} came: everything is ended", signal=name)
        self._kill_workers()

    def _order_stop(self, reason: str) -> None:
        if not self.asked.stop:
            self.asked.stop = reason
            self._slots.ask_to_stop()
            self._events.add("save_requested", f"the workers were asked to save and end: {reason}")
            if self._channel.leads:
                self._order(stop=reason)

    def _kill_workers(self) -> None:
        group = self._group
        if group is not None:
            group.kill()

    # -----------------------------------------------------------------------------------------------------------------
    # Agent 0 leads

    def _order(self, **changes: object) -> None:
        self._orders = self._orders.model_copy(update=changes)
        self._channel.publish("orders", self._orders)

    def _lead(self) -> None:
        """Look at all nodes: somebody to give up, somebody who failed, somebody who hangs."""
        states = self._channel.received("state", NodeState)
        self._find_lost_agents(states)
        group = self._group
        if group is None:
            return
        here = {index: state for index, state in states.items() if state.restart == group.restart_dir.restart}
        if any(state.failed for state in here.values()) or self.asked.to_end:
            self._end_all(group)
        elif len(here) == self._channel.nodes.num and all(state.started for state in here.values()):
            self._judge(group, [here[index] for index in sorted(here)])

    def _find_lost_agents(self, states: dict[int, NodeState]) -> None:
        names = self._channel.nodes.names
        for index, state in states.items():
            if state.ended_by and index != self._channel.nodes.index:
                self._order_end(f"{state.ended_by} on {names[index]}")
            if state.broken:
                self._give_up(names[index], state.broken, state.broken_kind)
        loss = find_loss(self._channel, self._agent_timeout_s(), self.clock.pause_s)
        if loss is not None:
            self._give_up(loss.node, loss.message, FailureKind.NODE_LOST)

    def _agent_timeout_s(self) -> float:
        """All workers are being ended: an agent that lives says so within seconds, and everybody waits for it."""
        group = self._group
        ending = group is not None and self._orders.kill == group.restart_dir.restart
        return min(LAST_STATE_TIMEOUT_S, self._timeouts.agent_s) if ending else self._timeouts.agent_s

    def _give_up(self, node: str, message: str, kind: FailureKind) -> None:
        if not self.asked.broken:
            self.asked.broken, self.asked.broken_kind, self.asked.broken_node = message, kind, node
            self._events.add("peer", f"{message}; everything is ended", node_lost=node)
            self._kill_workers()

    def _end_all(self, group: WorkerGroup) -> None:
        """A worker has failed on some node: its peers may say what they saw, then they are ended everywhere."""
        now_s = time.monotonic()
        if self._failed_at_s is None:
            self._failed_at_s = now_s
        timeout_s = 0.0 if self.asked.to_end or group.hang is not None else PEER_TIMEOUT_S
        if now_s - self._failed_at_s >= timeout_s and self._orders.kill != group.restart_dir.restart:
            self._order(kill=group.restart_dir.restart)
            group.kill()

    def _judge(self, group: WorkerGroup, states: list[NodeState]) -> None:
        ranks = [rank for state in states for rank in state.ranks]
        if not ranks:
            return
        self._tracker.observe(ranks)
        suspects = judge(ranks, self._tracker) or self._hang_check.consider(ranks, states, time.monotonic())
        if self._hang_check.order != self._orders.inspect:
            self._order(inspect=self._hang_check.order)
        if suspects:
            self._investigate(group, ranks, suspects)

    def _investigate(self, group: WorkerGroup, before: list[RankStatus], suspects: list[Suspect]) -> None:
        """Suspect, collect on all nodes, read again, and only then: verdict, and end all. The first kill spoils the
        evidence."""
        self._events.add("suspect", "; ".join(map(describe, suspects)), group.role)
        number = self._orders.collect + 1
        self._order(collect=number)
        ranks = self._receive_evidence(number, group, self._collect(group))
        self._tracker.observe(ranks)
        still = confirm(suspects, ranks) or judge(ranks, self._tracker)
        # Evidence takes seconds: somebody may have gone on, or have ended, which is another story.
        if not still or group.failed or _processes(ranks) != _processes(before):
            self._events.add("suspect", "withdrawn: the workers went on", group.role)
            return
        proven = {suspect.status.rank: suspect.evidence for suspect in still if suspect.evidence}
        verdict = blame(ranks, [suspect.status.rank for suspect in still], proven)
        blamed = [rank for rank in before if rank.rank in verdict.ranks] or before
        group.hang = Hang(verdict, tuple(ranks), max(rank.age_s for rank in blamed))
        self._events.add("verdict", verdict.reason, group.role, ranks=list(verdict.ranks))
        self._events.add("killed", f"hang: {verdict.reason}; all workers are ended", group.role)
        self._order(kill=group.restart_dir.restart)
        group.kill()

    def _receive_evidence(self, number: int, group: WorkerGroup, answers_here: dict[int, str]) -> list[RankStatus]:
        """How the workers of all nodes stand after the evidence was saved; of a node that does not answer, before."""
        channel = self._channel
        deadline = time.monotonic() + self._timeouts.evidence_s
        while len(answers := channel.received(f"evidence/{number}", Collected)) < channel.nodes.num - 1:
            if time.monotonic() > deadline:
                break
            channel.wait(0.1)
        last = channel.received("state", NodeState)
        ranks = collectives.with_collectives(group.living(), answers_here)
        for index in range(1, channel.nodes.num):
            ranks += answers[index].ranks if index in answers else last[index].ranks
            if index not in answers:
                self._events.say(
                    f"no evidence from {channel.nodes.names[index]} within {self._timeouts.evidence_s:.0f} s"
                )
        return ranks

    # -----------------------------------------------------------------------------------------------------------------
    # The other agents follow

    def _follow(self) -> None:
        orders = self._channel.published("orders", Orders)
        if self._channel.is_lost and not self.asked.broken:
            self.asked.broken = "agent 0 does not answer any more"
            self._kill_workers()
            self._end_in(LEADER_LOST_TIMEOUT_S, "agent 0 is lost, and this agent has not ended")
            # The controller acts on this line: it need not wait until files of agent 0 have been silent for long.
            self._events.add("peer", f"{self.asked.broken}; everything is ended", leader_lost=True)
        if orders is None:
            return
        before, self._orders = self._orders, orders
        group = self._group
        if orders.cancel and not self.asked.cancel:
            self.asked.cancel = orders.cancel
            self._kill_workers()
        if orders.stop:
            self._order_stop(orders.stop)
        if orders.saves > before.saves:
            self._slots.ask_to_save()
        if group is not None and not group.killing and orders.kill == group.restart_dir.restart:
            self._events.add("killed", "agent 0 ends all workers", group.role)
            group.kill()
        if orders.over is not None:
            self._kill_workers()
        if group is not None and orders.collect > before.collect:
            answers = self._collect(group)
            ranks = collectives.with_collectives(group.living(), answers)
            self._channel.send(f"evidence/{orders.collect}", Collected(ranks=tuple(ranks)))

    def _collect(self, group: WorkerGroup) -> dict[int, str]:
        """Save the evidence of this node; returns what its workers say about their collectives, by local rank."""
        question = self._slots.ask_for_collectives()
        ranks = group.living()
        logs = {rank.local_rank: group.restart_dir.log(group.role, self._node, rank.local_rank) for rank in ranks}
        missing = evidence.collect(ranks, logs, group.restart_dir.evidence_dir, self._node)
        folder = group.restart_dir.evidence_dir.name
        self._events.add("evidence", f"stacks, states and logs of {len(ranks)} workers saved in {folder}/", group.role)
        answers = collectives.read_answers(ranks, self._slots.path, question)
        for local_rank, content in answers.items():
            path = group.restart_dir.evidence_dir / f"collectives-{self._node}-{local_rank}.json"
            evidence.save(path, content, missing)
        for problem in missing:
            self._events.say(problem)
        return answers

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
            findings=self._anomalies.look(self._readings(), now_s) if self._channel.leads else (),
        )
        try:
            write_model(restart_dir.agent_status(self._node), status)
            self._unwritten = ""
        except OSError as error:
            # Training does not need it; the next one is tried in two seconds.
            self._say_once(f"the status could not be written: {error}")

    def _readings(self) -> Iterable[NodeReading]:
        for index, state in self._channel.received("state", NodeState).items():
            yield NodeReading(self._channel.nodes.names[index], state.published, state.telemetry, state.ranks)

    def _reap(self, now_s: float) -> None:
        # Not while workers are being started: their exits belong to elastic, which does not know them by then.
        group = self._group
        if group is not None and group.workers and now_s >= self._reap_at_s:
            self._reap_at_s = now_s + REAP_INTERVAL_S
            processes.reap_orphans({worker.pid for worker in group.workers.values()})

    def _say_once(self, text: str) -> None:
        if text != self._unwritten:
            self._unwritten = text
            self._events.say(text)


def _processes(ranks: Iterable[RankStatus]) -> set[tuple[str, int]]:
    return {(rank.node, rank.pid) for rank in ranks}
