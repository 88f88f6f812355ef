"""Telemetry and status of the node, which its agent publishes every two seconds (``agents/<node>.json``)."""

import time
from collections.abc import Collection
from pathlib import Path

from rlhf_core.condition_log import ConditionLog
from rlhf_core.diagnosis.hangs.liveness import GapTracker
from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.agent_messages import NodeState
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import AgentStatus
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.supervision.group import SupervisedGroup
from rlhf_core.worker.telemetry.anomalies import Anomalies
from rlhf_core.worker.telemetry.node import Telemetry
from rlhf_core.worker.telemetry.series import TelemetrySeries

PUBLISH_INTERVAL_S = 2.0


class StatusPublisher:
    """Publishes the status of one node. Both threads of the agent use it, under the supervisor's lock until
    :meth:`stop`."""

    def __init__(self, channel: AgentChannel, tracker: GapTracker, events: EventLog, run_folder: Path) -> None:
        self.telemetry: dict[str, float] = {}
        """Last telemetry reading."""
        self.num_readings = 0
        """Number of telemetry readings so far."""
        self.anomalies = Anomalies(events)
        self._channel = channel
        self._tracker = tracker
        self._source = Telemetry(events.print_line, run_folder)
        self._series = TelemetrySeries(channel.nodes.name, events.print_line)
        self._problems = ConditionLog(events.print_line)
        self._place: tuple[Role, RestartDir] | None = None
        self._next_at_s = 0.0

    def enter(self, role: Role, restart_dir: RestartDir) -> None:
        """Publish at once, and from now on for this role and restart."""
        self._place = (role, restart_dir)
        self._next_at_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """True if it is time for the next status."""
        return self._place is not None and now_s >= self._next_at_s

    def read_telemetry(self, worker_pids: Collection[int]) -> None:
        """Take a new telemetry reading, for the next status."""
        self.num_readings += 1
        self.telemetry = self._source.read(worker_pids)

    def publish(self, state: NodeState, groups: Collection[SupervisedGroup], now_s: float) -> None:
        """Publish the state of this node.

        Args:
            groups: Groups of the current phase.
        """
        assert self._place is not None
        self._next_at_s = now_s + PUBLISH_INTERVAL_S
        role, restart_dir = self._place
        self._series.add(restart_dir, state.telemetry, now_s)
        nodes = self._channel.nodes
        status = AgentStatus(
            node=nodes.name,
            node_index=nodes.index,
            attempt=restart_dir.attempt,
            restart=restart_dir.restart,
            sequence=state.published,
            role=role,
            ranks=state.ranks,
            telemetry=state.telemetry,
            longest_gaps_s=self._tracker.all_longest_s,
            findings=self._find_anomalies(groups, now_s) if self._channel.leads else (),
        )
        try:
            write_model(restart_dir.agent_status(nodes.name), status)
            self._problems.end()
        except OSError as error:  # training does not depend on it, and the next status is soon due
            self._problems.log_change(f"failed to write the status: {error}")

    def stop(self) -> None:
        """Write what is pending and stop measuring."""
        self._series.stop(time.monotonic())
        self._source.stop()

    def _find_anomalies(self, groups: Collection[SupervisedGroup], now_s: float) -> tuple[str, ...]:
        received, names = self._channel.received("state", NodeState), self._channel.nodes.names
        states = {names[index]: state for index, state in received.items()}
        return self.anomalies.update(states, {names[index]: _work_of(index, groups) for index in received}, now_s)


def _work_of(index: int, groups: Collection[SupervisedGroup]) -> str:
    """Roles of a node's groups that restart as a whole or, if it has none, of those with individual restarts."""
    here = [one for one in groups if index in one.group.plan.nodes]
    return " ".join(one.group.role for one in here if not one.is_alone) or " ".join(one.group.role for one in here)
