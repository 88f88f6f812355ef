"""Early suspicion: looks at workers that are silent for longer than usual, long before their floors are over.

Agent 0 asks for looks, all agents look at their workers, and agent 0 judges what all of them saw together
(:mod:`rlhf_core.diagnosis.standstill`). While nobody is suspect nothing is read.
"""

from collections.abc import Mapping, Sequence

from rlhf_core.diagnosis.liveness import GapTracker, Suspect, suspect
from rlhf_core.diagnosis.standstill import Standstill, is_promising, prove
from rlhf_core.schemas.agent_messages import InspectionOrder, NodeState
from rlhf_core.schemas.inspections import Inspection
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.worker import collectives
from rlhf_core.worker.heartbeat import SlotFile
from rlhf_core.worker.inspection import inspect_workers

INSPECTION_INTERVAL_S = 2.0
"""Pause between two looks that may prove something together."""
RETRY_INTERVAL_S = 10.0
"""Pause after a look at somebody who is at work, or waits for something outside the job."""
ANSWER_TIMEOUT_S = 5.0
"""Longest wait of agent 0 for the looks of other nodes."""


class NodeInspections:
    """The looks of one node at its workers: one whenever agent 0 asks."""

    def __init__(self, slots: SlotFile) -> None:
        self._slots = slots
        self._question = 0
        self.number = 0
        """Number of the newest look; 0 when none is asked for."""
        self.inspections: tuple[Inspection, ...] = ()
        """That look."""

    def answer(self, order: InspectionOrder, ranks: Sequence[RankStatus], telemetry: Mapping[str, float]) -> None:
        """Look, if that was asked for since the last time."""
        if order.number == self.number:
            return
        self.number = order.number
        if order.collectives:
            ranks = self._with_collectives(ranks)
        self.inspections = tuple(inspect_workers(ranks, _gpu_percents(ranks, telemetry))) if order.number else ()

    def _with_collectives(self, ranks: Sequence[RankStatus]) -> list[RankStatus]:
        """With the answers to the question of the look before: nobody waits for the answer to a question."""
        path, question = self._slots.path, self._question
        answers = collectives.read_answers(ranks, path, question, timeout_s=0.0) if question else {}
        self._question = self._slots.ask_for_collectives()
        return collectives.with_collectives(ranks, answers)


def _gpu_percents(ranks: Sequence[RankStatus], telemetry: Mapping[str, float]) -> dict[int, float]:
    """Utilisation of the GPU of each worker; nothing where the newest reading is an old one."""
    if "slow_reading_age_s" in telemetry:
        return {}
    names = {rank.local_rank: f"gpu{rank.local_rank}_util_percent" for rank in ranks}
    return {local_rank: telemetry[name] for local_rank, name in names.items() if name in telemetry}


class EarlyHangCheck:
    """Judge the looks of all nodes, on agent 0."""

    def __init__(self, tracker: GapTracker) -> None:
        self._tracker = tracker
        self._standstill = Standstill()
        self._asked = 0
        self._asked_at_s = 0.0
        self._next_at_s = 0.0
        self.order = InspectionOrder()
        """Request to all agents just now."""

    def clear(self) -> None:
        """Nobody is suspect, or what was seen does not count any more."""
        self._standstill.clear()
        self._next_at_s = 0.0
        self.order = InspectionOrder()

    def consider(self, ranks: Sequence[RankStatus], states: Sequence[NodeState], now_s: float) -> list[Suspect]:
        """Workers that are proven to stand still; looks are asked for while some are suspect.

        Args:
            ranks: All workers, as just read.
            states: How the nodes stand, with their looks.
            now_s: The monotonic time.
        """
        suspects = suspect(ranks, self._tracker)
        if not suspects:
            if self.order.number or self._next_at_s:
                self.clear()
            return []
        if not self.order.number:
            if now_s >= self._next_at_s:
                self._ask(ranks, now_s)
            return []
        answers = [state for state in states if state.inspection_number == self.order.number]
        if len(answers) < len(states) and now_s < self._asked_at_s + ANSWER_TIMEOUT_S:
            return []
        self._standstill.add([look for state in answers for look in state.inspections])
        still = self._standstill.still
        self._next_at_s = now_s + (INSPECTION_INTERVAL_S if is_promising(still, suspects) else RETRY_INTERVAL_S)
        self.order = InspectionOrder()
        return prove(still, suspects, len(ranks))

    def _ask(self, ranks: Sequence[RankStatus], now_s: float) -> None:
        self._asked += 1
        self._asked_at_s = now_s
        # Only ranks that all wait can disagree, and answering is work, which would look like movement.
        self.order = InspectionOrder(number=self._asked, collectives=all(rank.in_collective for rank in ranks))
