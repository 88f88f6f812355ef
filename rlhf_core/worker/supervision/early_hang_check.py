"""Early suspicion: looks at workers that are silent for longer than usual, long before their floors are over.

Agent 0 asks for looks, all agents look at their workers, and agent 0 judges what all of them saw together
(:mod:`rlhf_core.diagnosis.hangs.standstill`). While no worker is suspect nothing is read.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rlhf_core.diagnosis.hangs.liveness import Conditions, GapTracker, Suspect, suspect
from rlhf_core.diagnosis.hangs.standstill import Standstill, is_promising, prove
from rlhf_core.schemas.agent_messages import GroupState, InspectionOrder
from rlhf_core.schemas.inspections import Inspection
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.groups.gpus import gpus_of
from rlhf_core.worker.liveness import collectives
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.liveness.inspection import inspect_workers

INSPECTION_INTERVAL_S = 2.0
"""Pause between two looks that may prove something together."""
RETRY_INTERVAL_S = 10.0
"""Pause after an inspection of a worker that is at work, or waits for something outside the job."""
ANSWER_TIMEOUT_S = 5.0
"""Longest wait of agent 0 for the looks of other nodes."""


class NodeInspections:
    """The looks of one node at its workers: one whenever agent 0 asks."""

    def __init__(self, slots: SlotFile, plan: GroupPlan | None = None) -> None:
        """Args:
        slots: Slots of the group.
        plan: Its workers and GPUs; None where worker ``i`` has GPU ``i``.
        """
        self._slots = slots
        self._plan = plan
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
        self.inspections = (
            tuple(inspect_workers(ranks, _gpu_percents(ranks, telemetry, self._plan))) if order.number else ()
        )

    def _with_collectives(self, ranks: Sequence[RankStatus]) -> list[RankStatus]:
        """With the answers to the question of the look before: no thread waits for the answer to a question."""
        path, question = self._slots.path, self._question
        answers = collectives.read_answers(ranks, path, question, timeout_s=0.0) if question else {}
        self._question = self._slots.ask_for_collectives()
        return collectives.with_collectives(ranks, answers)


def _gpu_percents(
    ranks: Sequence[RankStatus], telemetry: Mapping[str, float], plan: GroupPlan | None
) -> dict[int, float]:
    """Utilisation of the GPU of each worker, or of the one of its GPUs that works most; nothing where the newest
    reading is an old one."""
    if "slow_reading_age_s" in telemetry:
        return {}
    found = {}
    for local_rank in (rank.local_rank for rank in ranks):
        own = (local_rank,) if plan is None else gpus_of(plan, local_rank)
        percents = [telemetry[name] for gpu in own if (name := f"gpu{gpu}_util_percent") in telemetry]
        if percents:
            found[local_rank] = max(percents)
    return found


class EarlyHangCheck:
    """Judges the inspections of the workers of one group on all nodes, on agent 0."""

    def __init__(self, tracker: GapTracker, *, alone: bool = False) -> None:
        """Args:
        alone: The workers do not wait for each other: each is judged by itself.
        """
        self._tracker = tracker
        self._alone = alone
        self._standstill = Standstill()
        self._num_requests = 0
        self._requested_at_s = 0.0
        self._next_at_s = 0.0
        self.order = InspectionOrder()
        """Request to all agents just now."""

    def clear(self) -> None:
        """No worker is suspect, or what was seen does not count any more."""
        self._standstill.clear()
        self._next_at_s = 0.0
        self.order = InspectionOrder()

    def consider(
        self,
        ranks: Sequence[RankStatus],
        states: Sequence[GroupState],
        now_s: float,
        waits_for: Conditions = MappingProxyType({}),
    ) -> list[Suspect]:
        """Workers that are proven to stand still; inspections are requested while some are suspect.

        Args:
            ranks: All workers of the group, as just read.
            states: State of the group on each node, with the inspections of its workers.
            now_s: The monotonic time.
            waits_for: Condition of the groups beside it.
        """
        suspects = suspect(ranks, self._tracker, waits_for, alone=self._alone)
        if not suspects:
            if self.order.number or self._next_at_s:
                self.clear()
            return []
        if not self.order.number:
            if now_s >= self._next_at_s:
                self._request(ranks, now_s)
            return []
        answers = [state for state in states if state.inspection_number == self.order.number]
        if len(answers) < len(states) and now_s < self._requested_at_s + ANSWER_TIMEOUT_S:
            return []
        self._standstill.add([look for state in answers for look in state.inspections])
        still = self._standstill.still
        self._next_at_s = now_s + (INSPECTION_INTERVAL_S if is_promising(still, suspects) else RETRY_INTERVAL_S)
        self.order = InspectionOrder()
        if not self._alone:
            return prove(still, suspects, len(ranks))
        places = [(one, (one.status.node, one.status.local_rank)) for one in suspects]
        seen = [(one, {place: still[place]}) for one, place in places if place in still]
        return [proven for one, own in seen for proven in prove(own, [one], 1)]

    def _request(self, ranks: Sequence[RankStatus], now_s: float) -> None:
        self._num_requests += 1
        self._requested_at_s = now_s
        # Only ranks that all wait can disagree, and answering is work, which would look like movement.
        all_wait = not self._alone and all(rank.in_collective for rank in ranks)
        self.order = InspectionOrder(number=self._num_requests, collectives=all_wait)
