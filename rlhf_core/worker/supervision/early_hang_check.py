"""Early hang check: inspects workers that are silent for longer than usual, long before their timeout floors.

Agent 0 requests inspections, all agents inspect their workers, and agent 0 judges the combined results
(:mod:`rlhf_core.diagnosis.hangs.standstill`). While no worker is suspect, nothing is inspected.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rlhf_core.diagnosis.hangs.liveness import Conditions, GapTracker, Suspect, overdue
from rlhf_core.diagnosis.hangs.standstill import Standstill, is_promising, prove
from rlhf_core.schemas.agent_messages import GroupState, InspectionOrder
from rlhf_core.schemas.inspections import Inspection
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.groups.gpus import gpus_of
from rlhf_core.worker.liveness import collectives
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.liveness.inspection import inspect_workers
from rlhf_core.worker.liveness.process_groups import with_process_groups

INSPECTION_INTERVAL_S = 2.0
"""Time between two inspections that are compared with each other, in seconds."""
RETRY_INTERVAL_S = 10.0
"""Delay after an inspection found the worker active or waiting for something outside the job, in seconds."""
ANSWER_TIMEOUT_S = 5.0
"""Longest wait of agent 0 for other nodes' inspections, in seconds."""


class NodeInspections:
    """One node's inspections of its workers, made when agent 0 requests them."""

    def __init__(self, slots: SlotFile, plan: GroupPlan) -> None:
        """Args:
        slots: Slots of the group.
        plan: Workers and GPUs of the group.
        """
        self._slots = slots
        self._plan = plan
        self._question = 0
        self.number = 0
        """Number of the newest inspection; 0 if none is requested."""
        self.inspections: tuple[Inspection, ...] = ()
        """Results of the newest inspection."""

    def answer(self, order: InspectionOrder, ranks: Sequence[RankStatus], telemetry: Mapping[str, float]) -> None:
        """Inspect the workers if agent 0 has requested a new inspection."""
        if order.number == self.number:
            return
        self.number = order.number
        if order.collectives:
            ranks = self._with_collectives(ranks)
        self.inspections = (
            tuple(inspect_workers(ranks, _gpu_percents(ranks, telemetry, self._plan))) if order.number else ()
        )

    def _with_collectives(self, ranks: Sequence[RankStatus]) -> list[RankStatus]:
        """Add the answers to the previous inspection's question, so that no thread has to wait for answers."""
        path, question = self._slots.path, self._question
        answers = collectives.read_answers(ranks, path, question, timeout_s=0.0) if question else {}
        self._question = self._slots.request_collectives()
        return with_process_groups(ranks, answers)


def _gpu_percents(ranks: Sequence[RankStatus], telemetry: Mapping[str, float], plan: GroupPlan) -> dict[int, float]:
    """Utilisation of each worker's GPU, or of its busiest one; empty if the newest reading is stale."""
    if "slow_reading_age_s" in telemetry:
        return {}
    found = {}
    for local_rank in (rank.local_rank for rank in ranks):
        own = gpus_of(plan, local_rank)
        percents = [telemetry[name] for gpu in own if (name := f"gpu{gpu}_util_percent") in telemetry]
        if percents:
            found[local_rank] = max(percents)
    return found


class EarlyHangCheck:
    """Judges, on agent 0, the inspections of one group's workers on all nodes."""

    def __init__(self, tracker: GapTracker, *, alone: bool = False) -> None:
        """Args:
        alone: The workers do not wait for each other, so each is judged by itself.
        """
        self._tracker = tracker
        self._alone = alone
        self._standstill = Standstill()
        self._num_requests = 0
        self._requested_at_s = 0.0
        self._next_at_s = 0.0
        self.order = InspectionOrder()
        """The current request to all agents."""

    def clear(self) -> None:
        """Reset: no worker is suspect, or earlier inspections no longer count."""
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
        """Workers proven to be at a standstill; requests inspections while some are suspect.

        Args:
            ranks: Current statuses of all workers of the group.
            states: State of the group on each node, with the inspections of its workers.
            now_s: The monotonic time.
            waits_for: Condition of the other groups.
        """
        suspects = overdue(ranks, self._tracker.suspicion_s, waits_for, alone=self._alone)
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
        self._standstill.add([inspection for state in answers for inspection in state.inspections])
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
        # Ranks can disagree only if all of them wait, and answering is work, which would look like activity.
        all_wait = not self._alone and all(rank.in_collective for rank in ranks)
        self.order = InspectionOrder(number=self._num_requests, collectives=all_wait)
