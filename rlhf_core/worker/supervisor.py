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
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentCommand, AgentStatus, RankStatus
from rlhf_core.schemas.resources import Role
from rlhf_core.schemas.team import Collected, NodeState, Orders
from rlhf_core.worker import collectives, evidence, processes
from rlhf_core.worker.events import EventLog
from rlhf_core.worker.exit_deadline import ExitDeadline
from rlhf_core.worker.findings import Findings, NodeReading
from rlhf_core.worker.heartbeat import SlotFile
from rlhf_core.worker.lost_agents import find_loss
from rlhf_core.worker.signals import ENDING, SAVING, SignalInbox
from rlhf_core.worker.suspicion import NodeLooks, Suspicion
from rlhf_core.worker.team import Team
from rlhf_core.worker.telemetry import Telemetry
from rlhf_core.worker.telemetry_series import TelemetrySeries
from rlhf_core.worker.watch import PEER_PATIENCE_S, Hang, Watch

TICK_S = 0.25
PUBLISH_S = 2.0
ORDERS_S = 1.0
REAP_S = 10.0
LAST_WORD_S = 15.0
"""Silence of an agent after which its node is given up, once all workers are being ended."""
LEADERLESS_S = 10.0
"""Longest time for the main thread to end after agent 0 was lost: with its store nothing is left to be agreed on."""
END_S = 120.0
"""The same in any other case, an outcome that cannot be written for a while included."""


@dataclass(frozen=True)
class Patience:
    """How long agent 0 waits for other nodes, in seconds."""

    evidence_s: float = 10.0
    """For evidence, before all workers of a hung job are ended."""
    agent_s: float = 20.0
    """For a sign of a silent agent, before its node is given up."""


@dataclass
class Asked:
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
        team: Team,
        slots: SlotFile,
        inbox: SignalInbox,
        tracker: GapTracker,
        events: EventLog,
        new_commands: Callable[[], list[AgentCommand]],
        patience: Patience = Patience(),
        telemetry_folder: Path | None = None,
        deadline: ExitDeadline | None = None,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.asked = Asked()
        self.clock = LoopClock()
        self._team = team
        self._node = team.nodes.name
        self._slots = slots
        self._inbox = inbox
        self._tracker = tracker
        self._events = events
        self._new_commands = new_commands
        self._patience = patience
        self._deadline = deadline
        self._is_superseded = is_superseded
        self._telemetry = Telemetry(events.say, telemetry_folder)
        self._series = TelemetrySeries(self._node, events.say)
        self._findings = Findings(events)
        self._looks = NodeLooks(slots)
        self._suspicion = Suspicion(tracker)
        self._orders = Orders()
        self._place: tuple[Role, RestartDir] | None = None
        self._watch: Watch | None = None
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

    def watch(self, watch: Watch) -> None:
        """Judge these workers from now on."""
        with self._lock:
            self._tracker.begin_restart()
            self._findings.begin_restart()
            self._suspicion.clear()
            self._failed_at_s = None
            self._watch = watch
        if self.asked.to_end:
            watch.kill()

    def settle(self) -> None:
        """The workers of this node have ended. Returns once nothing is being found out about them any more."""
        with self._lock:
            pass

    def release(self) -> None:
        """What becomes of the workers is decided on all nodes."""
        with self._lock:
            self._watch = None

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join(timeout=evidence.STACK_PATIENCE_S + 5.0)
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
                time.sleep(TICK_S)

    def _tick(self) -> None:
        for number in self._inbox.wait(TICK_S):
            self._hear_signal(number)
        now_s = time.monotonic()
        if now_s >= self._orders_at_s:
            self._orders_at_s = now_s + ORDERS_S
            for command in self._new_commands():
                self._obey(command)
        with self._lock:
            now_s = time.monotonic()
            if self.clock.tick(now_s):
                self._wake_up()
                self._suspicion.clear()
            state = self._state(now_s)
            self._team.tell("state", state)
            if refusal := self._team.new_refusal():
                self._events.add("peer", refusal, refused=True)
            if self._team.leads:
                self._lead()
            else:
                self._follow()
            if self.asked.to_end:
                self._end_in(END_S, "the agent was to end, and has not")
            self._publish(state, now_s)
            self._reap(now_s)
            self.clock.skip(time.monotonic())

    def _wake_up(self) -> None:
        """This process stood still: a suspended job, a frozen node. Meanwhile the run may have gone on without it."""
        if self._deadline is not None and self._is_superseded():
            self._deadline.leave_now()
        self._events.say(f"this agent stood still for {self.clock.pause_s:.0f} s; silences are counted from now")
        self._team.forgive()

    def _end_in(self, seconds: float, why: str) -> None:
        """The main thread may wait in a call that never returns: then this thread ends the agent."""
        if self._deadline is not None:
            self._deadline.set(seconds, f"{why} within {seconds:.0f} s; it is ended by its second thread")

    def _state(self, now_s: float) -> NodeState:
        """How this node stands; with a new reading of its telemetry when one is due."""
        watch = self._watch
        ranks = tuple(watch.living()) if watch is not None else ()
        if self._place is not None and now_s >= self._publish_at_s:
            self._published += 1
            self._reading = self._telemetry.read([rank.pid for rank in ranks])
        self._looks.answer(self._orders.look, ranks, self._reading)
        return NodeState(
            wall_s=time.time(),
            restart=watch.restart_dir.restart if watch is not None else -1,
            started=watch is not None and bool(watch.workers),
            failed=watch is not None and watch.failed,
            ended_by=self.asked.end,
            ranks=ranks,
            published=self._published,
            telemetry=self._reading,
            look_number=self._looks.number,
            looks=self._looks.looks,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # What is asked from outside

    def _hear_signal(self, number: signal.Signals) -> None:
        if number == SAVING:
            self._order_stop(f"{number.name}: the time limit is near or the nodes are taken back")
        elif number == signal.SIGTERM and "SLURM_JOB_ID" in os.environ and not self.asked.stop:
            # So Slurm announces a preemption, and scancel; it kills by itself when the time is up.
            self._order_stop(f"{number.name}: Slurm takes the nodes back or ends the job")
        elif number in ENDING:
            self._order_end(number.name)

    def _obey(self, command: AgentCommand) -> None:
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
            if self._team.leads:
                self._order(stop=reason)

    def _kill_workers(self) -> None:
        watch = self._watch
        if watch is not None:
            watch.kill()

    # -----------------------------------------------------------------------------------------------------------------
    # Agent 0 leads

    def _order(self, **changes: object) -> None:
        self._orders = self._orders.model_copy(update=changes)
        self._team.announce("orders", self._orders)

    def _lead(self) -> None:
        """Look at all nodes: somebody to give up, somebody who failed, somebody who hangs."""
        states = self._team.heard("state", NodeState)
        self._look_for_the_lost(states)
        watch = self._watch
        if watch is None:
            return
        here = {index: state for index, state in states.items() if state.restart == watch.restart_dir.restart}
        if any(state.failed for state in here.values()) or self.asked.to_end:
            self._end_all(watch)
        elif len(here) == self._team.nodes.num and all(state.started for state in here.values()):
            self._judge(watch, [here[index] for index in sorted(here)])

    def _look_for_the_lost(self, states: dict[int, NodeState]) -> None:
        names = self._team.nodes.names
        for index, state in states.items():
            if state.ended_by and index != self._team.nodes.index:
                self._order_end(f"{state.ended_by} on {names[index]}")
            if state.broken:
                self._give_up(names[index], state.broken, state.broken_kind)
        loss = find_loss(self._team, self._patience_for_agents_s(), self.clock.pause_s)
        if loss is not None:
            self._give_up(loss.node, loss.message, FailureKind.NODE_LOST)

    def _patience_for_agents_s(self) -> float:
        """All workers are being ended: an agent that lives says so within seconds, and everybody waits for it."""
        watch = self._watch
        ending = watch is not None and self._orders.kill == watch.restart_dir.restart
        return min(LAST_WORD_S, self._patience.agent_s) if ending else self._patience.agent_s

    def _give_up(self, node: str, message: str, kind: FailureKind) -> None:
        if not self.asked.broken:
            self.asked.broken, self.asked.broken_kind, self.asked.broken_node = message, kind, node
            self._events.add("peer", f"{message}; everything is ended", node_lost=node)
            self._kill_workers()

    def _end_all(self, watch: Watch) -> None:
        """A worker has failed on some node: its peers may say what they saw, then they are ended everywhere."""
        now_s = time.monotonic()
        if self._failed_at_s is None:
            self._failed_at_s = now_s
        patience_s = 0.0 if self.asked.to_end or watch.hang is not None else PEER_PATIENCE_S
        if now_s - self._failed_at_s >= patience_s and self._orders.kill != watch.restart_dir.restart:
            self._order(kill=watch.restart_dir.restart)
            watch.kill()

    def _judge(self, watch: Watch, states: list[NodeState]) -> None:
        ranks = [rank for state in states for rank in state.ranks]
        if not ranks:
            return
        self._tracker.observe(ranks)
        suspects = judge(ranks, self._tracker) or self._suspicion.consider(ranks, states, time.monotonic())
        if self._suspicion.order != self._orders.look:
            self._order(look=self._suspicion.order)
        if suspects:
            self._investigate(watch, ranks, suspects)

    def _investigate(self, watch: Watch, before: list[RankStatus], suspects: list[Suspect]) -> None:
        """Suspect, collect on all nodes, read again, and only then: verdict, and end all. The first kill spoils the
        evidence."""
        self._events.add("suspect", "; ".join(map(describe, suspects)), watch.role)
        number = self._orders.collect + 1
        self._order(collect=number)
        ranks = self._hear_evidence(number, watch, self._collect(watch))
        self._tracker.observe(ranks)
        still = confirm(suspects, ranks) or judge(ranks, self._tracker)
        # Evidence takes seconds: somebody may have gone on, or have ended, which is another story.
        if not still or watch.failed or _processes(ranks) != _processes(before):
            self._events.add("suspect", "withdrawn: the workers went on", watch.role)
            return
        proven = {suspect.status.rank: suspect.evidence for suspect in still if suspect.evidence}
        verdict = blame(ranks, [suspect.status.rank for suspect in still], proven)
        blamed = [rank for rank in before if rank.rank in verdict.ranks] or before
        watch.hang = Hang(verdict, tuple(ranks), max(rank.age_s for rank in blamed))
        self._events.add("verdict", verdict.reason, watch.role, ranks=list(verdict.ranks))
        self._events.add("killed", f"hang: {verdict.reason}; all workers are ended", watch.role)
        self._order(kill=watch.restart_dir.restart)
        watch.kill()

    def _hear_evidence(self, number: int, watch: Watch, answers_here: dict[int, str]) -> list[RankStatus]:
        """How the workers of all nodes stand after the evidence was saved; of a node that does not answer, before."""
        team = self._team
        deadline = time.monotonic() + self._patience.evidence_s
        while len(answers := team.heard(f"evidence/{number}", Collected)) < team.nodes.num - 1:
            if time.monotonic() > deadline:
                break
            team.wait(0.1)
        last = team.heard("state", NodeState)
        ranks = collectives.with_collectives(watch.living(), answers_here)
        for index in range(1, team.nodes.num):
            ranks += answers[index].ranks if index in answers else last[index].ranks
            if index not in answers:
                self._events.say(f"no evidence from {team.nodes.names[index]} within {self._patience.evidence_s:.0f} s")
        return ranks

    # -----------------------------------------------------------------------------------------------------------------
    # The other agents follow

    def _follow(self) -> None:
        orders = self._team.announced("orders", Orders)
        if self._team.is_lost and not self.asked.broken:
            self.asked.broken = "agent 0 does not answer any more"
            self._kill_workers()
            self._end_in(LEADERLESS_S, "agent 0 is lost, and this agent has not ended")
            # The controller acts on this line: it need not wait until files of agent 0 have been silent for long.
            self._events.add("peer", f"{self.asked.broken}; everything is ended", leader_lost=True)
        if orders is None:
            return
        before, self._orders = self._orders, orders
        watch = self._watch
        if orders.cancel and not self.asked.cancel:
            self.asked.cancel = orders.cancel
            self._kill_workers()
        if orders.stop:
            self._order_stop(orders.stop)
        if orders.saves > before.saves:
            self._slots.ask_to_save()
        if watch is not None and not watch.killing and orders.kill == watch.restart_dir.restart:
            self._events.add("killed", "agent 0 ends all workers", watch.role)
            watch.kill()
        if orders.over is not None:
            self._kill_workers()
        if watch is not None and orders.collect > before.collect:
            answers = self._collect(watch)
            ranks = collectives.with_collectives(watch.living(), answers)
            self._team.tell(f"evidence/{orders.collect}", Collected(ranks=tuple(ranks)))

    def _collect(self, watch: Watch) -> dict[int, str]:
        """Save the evidence of this node; returns what its workers say about their collectives, by local rank."""
        question = self._slots.ask_for_collectives()
        ranks = watch.living()
        logs = {rank.local_rank: watch.restart_dir.log(watch.role, self._node, rank.local_rank) for rank in ranks}
        missing = evidence.collect(ranks, logs, watch.restart_dir.incident_dir, self._node)
        folder = watch.restart_dir.incident_dir.name
        self._events.add("evidence", f"stacks, states and logs of {len(ranks)} workers saved in {folder}/", watch.role)
        answers = collectives.read_answers(ranks, self._slots.path, question)
        for local_rank, content in answers.items():
            path = watch.restart_dir.incident_dir / f"collectives-{self._node}-{local_rank}.json"
            evidence.save(path, content, missing)
        for problem in missing:
            self._events.say(problem)
        return answers

    # -----------------------------------------------------------------------------------------------------------------
    # Publishing

    def _publish(self, state: NodeState, now_s: float) -> None:
        if self._place is None or now_s < self._publish_at_s:
            return
        self._publish_at_s = now_s + PUBLISH_S
        role, restart_dir = self._place
        self._series.add(restart_dir, state.telemetry, now_s)
        nodes = self._team.nodes
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
            findings=self._findings.look(self._readings(), now_s) if self._team.leads else (),
        )
        try:
            write_model(restart_dir.agent_status(self._node), status)
            self._unwritten = ""
        except OSError as error:
            # Training does not need it; the next one is tried in two seconds.
            self._say_once(f"the status could not be written: {error}")

    def _readings(self) -> Iterable[NodeReading]:
        for index, state in self._team.heard("state", NodeState).items():
            yield NodeReading(self._team.nodes.names[index], state.published, state.telemetry, state.ranks)

    def _reap(self, now_s: float) -> None:
        # Not while workers are being started: their exits belong to elastic, which does not know them by then.
        watch = self._watch
        if watch is not None and watch.workers and now_s >= self._reap_at_s:
            self._reap_at_s = now_s + REAP_S
            processes.reap_orphans({worker.pid for worker in watch.workers.values()})

    def _say_once(self, text: str) -> None:
        if text != self._unwritten:
            self._unwritten = text
            self._events.say(text)


def _processes(ranks: Iterable[RankStatus]) -> set[tuple[str, int]]:
    return {(rank.node, rank.pid) for rank in ranks}
