"""Anomalies across all nodes' telemetry: findings in agent 0's status, and an event when one begins or ends."""

from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_core.diagnosis.telemetry.imbalance import ImbalanceWatch
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.worker.event_log import EventLog


@dataclass(frozen=True)
class NodeReading:
    """The last published telemetry of one node."""

    node: str
    sequence: int
    """Number of publications so far; if it has not changed since the last poll, there is no new reading."""
    telemetry: dict[str, float]
    ranks: tuple[RankStatus, ...]
    work: str = ""
    """Roles running on the node: only nodes with the same work are compared."""


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

    def update(self, readings: Iterable[NodeReading], now_s: float) -> tuple[str, ...]:
        """Add new readings and return the current anomalies.

        Args:
            readings: The last reading of each node.
            now_s: This agent's monotonic clock, in seconds.
        """
        for reading in readings:
            if self._seen.get(reading.node) != reading.sequence:
                self._seen[reading.node] = reading.sequence
                step = max((rank.step for rank in reading.ranks), default=0)
                beats = sum(rank.sequence for rank in reading.ranks)
                self._watch.add(reading.node, reading.telemetry, step, now_s, beats, reading.work)
        found = self._watch.findings()
        for text in found:
            if text not in self._present:
                self._events.add("telemetry", text, finding="begins")
        for text in self._present:
            if text not in found:
                self._events.add("telemetry", f"no longer: {text}", finding="ends")
        self._present = found
        return found
