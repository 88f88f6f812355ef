"""The agent's supervising thread: reads signals, orders and slots, finds hangs, publishes what it sees.

It only ever watches, asks and kills. What follows from a failure is decided in the main thread, which starts the
workers and sees them end.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.diagnosis.liveness import GapTracker, LoopClock, Suspect, judge
from rlhf_core.diagnosis.verdict import blame
from rlhf_core.run_dir import RestartDir, write_model
from rlhf_core.schemas.reports import AgentCommand, AgentStatus
from rlhf_core.schemas.resources import Role
from rlhf_core.worker import evidence, processes
from rlhf_core.worker.events import EventLog
from rlhf_core.worker.findings import Findings, NodeReading
from rlhf_core.worker.heartbeat import SlotFile
from rlhf_core.worker.signals import ENDING, SAVING, SignalInbox
from rlhf_core.worker.telemetry import Telemetry
from rlhf_core.worker.watch import Hang, Watch

TICK_S = 0.25
PUBLISH_S = 2.0
ORDERS_S = 1.0
REAP_S = 10.0


@dataclass
class Orders:
    """What was asked of this agent from outside. Each is kept once it was given; empty means nobody asked."""

    cancel: str = ""
    """The user ends the run: why."""
    end: str = ""
    """A signal ends the agent: which."""
    stop: str = ""
    """Save and end: who asked."""

    @property
    def to_end(self) -> bool:
        """Whether no worker may run any more."""
        return bool(self.cancel or self.end)


class Supervisor(threading.Thread):
    """One per agent; lives from before the first worker until after the last."""

    def __init__(
        self,
        node: str,
        node_index: int,
        slots: SlotFile,
        inbox: SignalInbox,
        tracker: GapTracker,
        events: EventLog,
        new_commands: Callable[[], list[AgentCommand]],
        telemetry_folder: Path | None = None,
    ) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.orders = Orders()
        self.clock = LoopClock()
        self._node = node
        self._node_index = node_index
        self._slots = slots
        self._inbox = inbox
        self._tracker = tracker
        self._events = events
        self._new_commands = new_commands
        self._telemetry = Telemetry(events.say, telemetry_folder)
        self._findings = Findings(events)
        self._place: tuple[Role, RestartDir] | None = None
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._published = 0
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
            self._watch = watch
        if self.orders.to_end:
            watch.kill()

    def release(self) -> None:
        """The workers have ended. Returns once nothing is being found out about them any more."""
        with self._lock:
            self._watch = None

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join(timeout=evidence.STACK_PATIENCE_S + 5.0)
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
            if number in ENDING:
                self._order_end(number.name)
            elif number == SAVING:
                self._order_stop(f"{number.name}: the time limit is near or the nodes are taken back")
        now_s = time.monotonic()
        if now_s >= self._orders_at_s:
            self._orders_at_s = now_s + ORDERS_S
            for command in self._new_commands():
                self._obey(command)
        with self._lock:
            now_s = time.monotonic()
            if self.clock.tick(now_s):
                self._events.say("this agent stood still for a while; silences are counted from now")
            if self._watch is not None:
                self._judge(self._watch)
            self._publish(now_s)
            self._reap(now_s)
            self.clock.skip(time.monotonic())

    # -----------------------------------------------------------------------------------------------------------------
    # Orders

    def _obey(self, command: AgentCommand) -> None:
        why = f": {command.reason}" if command.reason else ""
        self._events.add("command", f"order from the control plane: {command.kind}{why}", command=command.kind)
        match command.kind:
            case "cancel":
                self.orders.cancel = command.reason or "the user cancelled the run"
                self._kill_workers()
            case "save":
                self._slots.ask_to_save()
                self._events.add("save_requested", "the workers were asked to save and go on")
            case "stop_after_step":
                self._order_stop(command.reason or "the user asked to save and stop")

    def _order_end(self, name: str) -> None:
        if not self.orders.end:
            self.orders.end = name
            self._events.add("killed", f"{name} came: everything is ended", signal=name)
        self._kill_workers()

    def _order_stop(self, reason: str) -> None:
        if not self.orders.stop:
            self.orders.stop = reason
            self._slots.ask_to_stop()
            self._events.add("save_requested", f"the workers were asked to save and end: {reason}")

    def _kill_workers(self) -> None:
        watch = self._watch
        if watch is not None:
            watch.kill()

    # -----------------------------------------------------------------------------------------------------------------
    # Hangs

    def _judge(self, watch: Watch) -> None:
        ranks = watch.living()
        if not ranks or watch.failed:
            return
        self._tracker.observe(ranks)
        suspects = judge(ranks, self._tracker)
        if suspects:
            self._investigate(watch, suspects)

    def _investigate(self, watch: Watch, suspects: list[Suspect]) -> None:
        """Suspect, collect, read again, and only then: verdict, and end all. The first kill spoils the evidence."""
        before = watch.living()
        self._events.add("suspect", "; ".join(map(_describe, suspects)), watch.role)
        logs = {rank.local_rank: watch.restart_dir.log(watch.role, self._node, rank.local_rank) for rank in before}
        missing = evidence.collect(before, logs, watch.restart_dir.incident_dir, self._node)
        ranks = watch.living()
        self._tracker.observe(ranks)
        still = judge(ranks, self._tracker)
        # Evidence takes seconds: somebody may have gone on, or have ended, which is another story.
        if not still or watch.failed or {rank.pid for rank in ranks} != {rank.pid for rank in before}:
            self._events.add("suspect", "withdrawn: the workers went on", watch.role)
            return
        verdict = blame(ranks, [suspect.status.rank for suspect in still])
        blamed = [rank for rank in before if rank.rank in verdict.ranks] or before
        watch.hang = Hang(verdict, tuple(ranks), max(rank.age_s for rank in blamed))
        for problem in missing:
            self._events.say(problem)
        self._events.add("killed", f"hang: {verdict.reason}; all workers are ended", watch.role)
        watch.kill()

    # -----------------------------------------------------------------------------------------------------------------
    # Publishing

    def _publish(self, now_s: float) -> None:
        if self._place is None or now_s < self._publish_at_s:
            return
        self._publish_at_s = now_s + PUBLISH_S
        role, restart_dir = self._place
        watch = self._watch
        ranks = watch.living() if watch is not None else []
        self._published += 1
        telemetry = self._telemetry.read([rank.pid for rank in ranks])
        reading = NodeReading(self._node, self._published, telemetry, tuple(ranks))
        status = AgentStatus(
            node=self._node,
            node_index=self._node_index,
            attempt=restart_dir.attempt,
            restart=restart_dir.restart,
            sequence=self._published,
            role=role,
            ranks=tuple(ranks),
            telemetry=telemetry,
            findings=self._findings.look([reading], now_s),
        )
        try:
            write_model(restart_dir.agent_status(self._node), status)
            self._unwritten = ""
        except OSError as error:
            # Training does not need it; the next one is tried in two seconds.
            self._say_once(f"the status could not be written: {error}")

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


def _describe(suspect: Suspect) -> str:
    rank = suspect.status
    where = "inside a collective" if rank.in_collective else "outside any collective"
    return (
        f"rank {rank.rank} has been silent for {rank.age_s:.1f} s in phase {rank.phase} at step {rank.step}, "
        f"{suspect.limit_s:.1f} s are allowed; {where}, process state {rank.process_state}"
    )
