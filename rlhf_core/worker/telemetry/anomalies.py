"""Anomalies across all nodes' telemetry: findings in agent 0's status, and an event when one begins or ends."""

from collections.abc import Mapping

from rlhf_core.diagnosis.telemetry.imbalance import ImbalanceWatch
from rlhf_core.schemas.agent_messages import NodeState
from rlhf_core.worker.event_log import EventLog


class Anomalies:
    """Compares the nodes, on agent 0. Both threads use it, under the supervisor's lock."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._watch = ImbalanceWatch()
        self._seen: dict[str, int] = {}
        self._present: tuple[str, ...] = ()

    def begin_restart(self) -> None:
        """Discard earlier anomalies: they say nothing about the new workers or role."""
        self._watch = ImbalanceWatch()
        self._seen.clear()
        self._present = ()

    def update(self, states: Mapping[str, NodeState], works: Mapping[str, str], now_s: float) -> tuple[str, ...]:
        """Add new readings and return the current anomalies.

        Args:
            states: The last state of each node, by its name.
            works: Roles running on each of them: only nodes with the same work are compared.
            now_s: This agent's monotonic clock, in seconds.
        """
        for node, state in states.items():
            if self._seen.get(node) != state.published:  # else it is no new reading
                self._seen[node] = state.published
                step = max((rank.step for rank in state.ranks), default=0)
                beats = sum(rank.sequence for rank in state.ranks)
                self._watch.add(node, state.telemetry, step, now_s, beats, works[node])
        found = self._watch.findings()
        for text in found:
            if text not in self._present:
                self._events.add("telemetry", text, finding="begins")
        for text in self._present:
            if text not in found:
                self._events.add("telemetry", f"no longer: {text}", finding="ends")
        self._present = found
        return found
