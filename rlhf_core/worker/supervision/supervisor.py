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
from collections.abc import Callable, Collection
from pathlib import Path

from rlhf_core.condition_log import ConditionLog
from rlhf_core.diagnosis.hangs.liveness import GapTracker
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.agent_messages import Orders
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.survival import Survived
from rlhf_core.worker import processes
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.order_book import OrderBook
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.evidence.collection import STACK_TIMEOUT_S
from rlhf_core.worker.groups.base import WorkerGroup
from rlhf_core.worker.signals import ENDING, SAVING, SignalInbox
from rlhf_core.worker.supervision.exit_deadline import ExitDeadline
from rlhf_core.worker.supervision.external_requests import ExternalRequests
from rlhf_core.worker.supervision.failure_detector import FailureDetector
from rlhf_core.worker.supervision.group import SupervisedGroup
from rlhf_core.worker.supervision.main_thread import MainThreadWatch
from rlhf_core.worker.supervision.node import SupervisedNode
from rlhf_core.worker.supervision.status import StatusPublisher

TICK_INTERVAL_S = 0.25
AWAKE_INTERVAL_S = 0.5
COMMANDS_INTERVAL_S = 1.0
REAP_INTERVAL_S = 10.0
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
        self._channel = channel
        self._inbox = inbox
        self._events = events
        self._new_commands = new_commands
        self._deadline = deadline
        self._is_superseded = is_superseded
        self._owned_elsewhere = owned_elsewhere
        self._ending = threading.Event()

        # Shared with the main thread, without the lock below.
        self.requests = ExternalRequests()
        self.orders = OrderBook(channel)
        self.main_thread = MainThreadWatch(spec.setup_floor_s)

        # Used by both threads under the lock, which this thread holds for most of a tick, with all its investigations.
        # External requests to the node do not wait for it.
        self._lock = threading.Lock()
        self._tracker = tracker
        self._node = SupervisedNode(channel, self.requests, self.orders, events)
        self._status = StatusPublisher(channel, tracker, events, run_folder)

        # Used by this thread alone.
        self._failures = FailureDetector(channel, self._node, tracker, events, spec)
        self._num_pauses = 0
        self._may_be_superseded = False
        self._next_commands_at_s = 0.0
        self._next_reap_at_s = 0.0
        self._stumbles = ConditionLog(events.print_line)

    # -----------------------------------------------------------------------------------------------------------------
    # Called by the main thread

    def enter(self, role: Role, restart_dir: RestartDir) -> None:
        """Set the agent's current role and restart."""
        with self._lock:
            self._status.enter(role, restart_dir)

    def supervise(self, group: WorkerGroup, start: int) -> SupervisedGroup:
        """Start supervising these workers, in addition to other groups.

        Args:
            start: See ``GroupState.start``.
        """
        with self._lock:
            self._tracker.begin_restart(group.role)
            self._status.anomalies.begin_restart()
            supervised = SupervisedGroup.of(group, start, self._tracker)
            self._node.add(supervised)
        if self.requests.to_end:
            group.end()
        elif self.requests.stop and not group.is_alone:
            group.seat.slots.request_stop()
        return supervised

    def settle(self) -> None:
        """Wait, after this node's workers have exited, until no investigation of them is in progress."""
        with self._lock:
            pass

    def release(self, role: Role) -> None:
        """Stop supervising a group; all nodes agree on the fate of its workers."""
        with self._lock:
            self._node.remove(role)

    def stop(self) -> None:
        """Stop the thread."""
        self._ending.set()
        self.join(timeout=STACK_TIMEOUT_S + 5.0)
        if not self.is_alive():  # otherwise a file system holds it, which would hold this thread at the same file
            self._status.stop()

    # -----------------------------------------------------------------------------------------------------------------
    # The thread

    def run(self) -> None:
        """Tick until stopped."""
        threading.Thread(target=self._stay_awake, name="awake", daemon=True).start()
        while not self._ending.is_set():
            with Survived() as failed:  # one failed tick must not leave the workers unsupervised
                self._tick()
            if failed.error is not None:
                self._stumbles.log_change(f"supervision stumbled: {failed.problem}")
                time.sleep(TICK_INTERVAL_S)

    def _stay_awake(self) -> None:
        """Tick the pause clock in a dedicated thread: a slow file system or evidence may delay the main loop."""
        while not self._ending.wait(AWAKE_INTERVAL_S):
            self._channel.clock.tick(time.monotonic())

    def _tick(self) -> None:
        for number in self._inbox.wait(TICK_INTERVAL_S):
            self._take_signal(number)
        now_s = time.monotonic()
        if now_s >= self._next_commands_at_s:
            self._next_commands_at_s = now_s + COMMANDS_INTERVAL_S
            for command in self._new_commands():
                self._carry_out(command)
        with self._lock:
            now_s = time.monotonic()
            self._channel.clock.tick(now_s)
            self._notice_suspension()
            if self._may_be_superseded:
                self._leave_if_superseded()
            self._watch_main_thread(now_s)
            is_status_due = self._status.is_due(now_s)
            if is_status_due:
                self._status.read_telemetry(self._node.living_pids())
            state = self._node.state(self._status.num_readings, self._status.telemetry)
            self._channel.send("state", state)
            if refusal := self._channel.new_refusal():
                self._events.add("peer", refusal, refused=True)
            if self._channel.leads:
                self._failures.check()
            else:
                self._follow()
            if self.requests.to_end:
                self._end_in(END_TIMEOUT_S, "the agent was asked to end but has not")
            if is_status_due:
                self._status.publish(state, self._node.groups.values(), now_s)
                self._stumbles.end()
            self._reap(now_s)

    def _notice_suspension(self) -> None:
        """Begin to judge silence anew if this process was suspended, with its job or node."""
        clock = self._channel.clock
        if clock.num_pauses != self._num_pauses:
            self._num_pauses = clock.num_pauses
            self._may_be_superseded = True
            self._events.print_line(
                f"this agent was suspended for {clock.pause_s:.0f} s; silence is measured from now on"
            )
            for one in self._node.groups.values():
                one.hang_check.clear()

    def _leave_if_superseded(self) -> None:
        """Kill this process and its descendants if the run moved on during a suspension."""
        with contextlib.suppress(OSError):  # the file system may not respond yet: looked up again
            if self._is_superseded():
                self._deadline.leave_now()
            self._may_be_superseded = False

    def _take_signal(self, number: signal.Signals) -> None:
        if number == SAVING:
            self._node.save_and_stop(f"{number.name}: the time limit is near or Slurm is reclaiming the nodes")
        elif number == signal.SIGTERM and "SLURM_JOB_ID" in os.environ and not self.requests.stop:
            # So do preemption, scancel, and srun once another task of the step has failed; Slurm then kills by itself.
            self._node.save_and_stop(
                f"{number.name}: Slurm preempts or cancels the job, or srun ends it after another failure"
            )
        elif number in ENDING:
            self._node.end(number.name)

    def _carry_out(self, command: AgentCommand) -> None:
        why = f": {command.reason}" if command.reason else ""
        self._events.add("command", f"order from the control plane: {command.kind}{why}", command=command.kind)
        match command.kind:
            case "cancel":
                self._node.cancel(command.reason or "the user cancelled the run")
            case "stop_after_step":
                self._node.save_and_stop(command.reason or "the user asked to save and stop")

    def _watch_main_thread(self, now_s: float) -> None:
        """Give up this node if its main thread is stuck in a call: all nodes would wait for it forever."""
        stuck_s = self.main_thread.observe(now_s)
        if stuck_s is not None:
            stuck = f"the main thread of the agent of {self._node.name} has been stuck for {stuck_s:.0f} s"
            self._node.give_up(self._node.name, stuck, FailureKind.NODE_LOST)
            self._end_in(LEADER_LOST_TIMEOUT_S, f"{stuck}, and it has not ended")

    def _follow(self) -> None:
        """Follow agent 0, while it is there."""
        orders = self._channel.published("orders", Orders)
        if self._channel.is_lost and not self.requests.broken:
            self._end_in(LEADER_LOST_TIMEOUT_S, "agent 0 is lost, but this agent has not ended")
            self._node.give_up_leader()
        if orders is not None:
            self._node.obey(orders)

    def _end_in(self, seconds: float, why: str) -> None:
        """Set a deadline after which this agent is killed, in case its main thread is stuck in a call."""
        self._deadline.set(seconds, f"{why} within {seconds:.0f} s; its second thread ends it")

    def _reap(self, now_s: float) -> None:
        owned = self._node.started_pids()
        if owned and now_s >= self._next_reap_at_s:
            self._next_reap_at_s = now_s + REAP_INTERVAL_S
            # A young child may be a worker that is just being started; its group reaps it.
            processes.reap_orphans(owned | set(self._owned_elsewhere()), min_age_s=REAP_INTERVAL_S)
