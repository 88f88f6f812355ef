"""The early hang check: times of inspections, their answers, and the limits that keep them rare."""

import os
from typing import Any

import pytest
from made_reports import rank_status

from rlhf_core.diagnosis.hangs.liveness import GapTracker, Suspect
from rlhf_core.schemas.agent_messages import GroupState, InspectionOrder
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.inspections import Inspection, Wait
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.supervision.early_hang_check import (
    ANSWER_TIMEOUT_S,
    INSPECTION_INTERVAL_S,
    RETRY_INTERVAL_S,
    EarlyHangCheck,
    NodeInspections,
)


def rank(number: int, age_s: float, *, inside: bool = False, state: str = "S") -> RankStatus:
    return rank_status(
        number,
        node=f"node{number}",
        local_rank=0,
        pid=os.getpid(),
        sequence=7,
        collectives=3 if inside else 2,
        in_collective=inside,
        step=20,
        age_s=age_s,
        process_state=state,
        warm=True,
    )


class Job:
    """Two nodes with one rank each, and agent 0's suspicion; time is advanced by hand."""

    def __init__(self, *ranks: RankStatus) -> None:
        self.suspicion = EarlyHangCheck(GapTracker(SuperviseSpec()))
        self.ranks = list(ranks)
        self.now_s = 100.0

    def consider(self, *answering: int, **changes: Any) -> list[Suspect]:
        """One round of agent 0, with the answers of some nodes to its current request."""
        order = self.suspicion.order
        states = [GroupState(role=Role.TRAINER, start=0, ranks=(one,)) for one in self.ranks]
        for index in answering:
            inspections = (Inspection(status=self.ranks[index], at_s=self.now_s, **changes),)
            states[index] = states[index].model_copy(
                update={"inspection_number": order.number, "inspections": inspections}
            )
        return self.suspicion.consider(self.ranks, states, self.now_s)

    def requested_after(self, seconds: float) -> bool:
        """True if an inspection is requested once this time has passed."""
        self.now_s += seconds
        self.consider()
        return self.suspicion.order.number > 0


def test_without_a_suspect_no_inspection_is_requested() -> None:
    job = Job(rank(0, 9.0, inside=True), rank(1, 9.0))
    assert job.consider() == []
    assert job.suspicion.order == InspectionOrder()


def test_three_inspections_of_all_nodes_are_proof_and_two_are_not() -> None:
    job = Job(rank(0, 11.0, inside=True), rank(1, 11.0, state="T"))
    assert job.requested_after(0.0)
    for _ in range(2):
        assert job.consider(0, 1, main=Wait.STOPPED) == []
        assert not job.requested_after(INSPECTION_INTERVAL_S / 2), "not in quick succession"
        assert job.requested_after(INSPECTION_INTERVAL_S / 2)
    found = job.consider(0, 1, main=Wait.STOPPED)
    assert [one.status.rank for one in found] == [1]
    assert "was stopped" in found[0].evidence


def test_a_suspect_that_is_at_work_is_inspected_rarely() -> None:
    """With the control: the shorter pause between inspections that may prove a hang."""
    job = Job(rank(0, 11.0, inside=True), rank(1, 11.0))
    assert job.requested_after(0.0)
    assert job.consider(0, 1, main=Wait.OUTSIDE) == []
    assert not job.requested_after(INSPECTION_INTERVAL_S)
    assert job.requested_after(RETRY_INTERVAL_S - INSPECTION_INTERVAL_S)
    assert job.consider(0, 1, main=Wait.LOCK) == []
    assert job.requested_after(INSPECTION_INTERVAL_S)


def test_the_wait_for_a_node_that_does_not_answer_is_short() -> None:
    job = Job(rank(0, 11.0, inside=True), rank(1, 11.0))
    assert job.requested_after(0.0)
    number = job.suspicion.order.number
    job.consider(0)
    assert job.suspicion.order.number == number
    job.now_s += ANSWER_TIMEOUT_S
    assert job.consider(0) == []
    assert job.suspicion.order.number == 0


def test_progress_clears_earlier_inspections() -> None:
    job = Job(rank(0, 11.0, inside=True), rank(1, 11.0, state="T"))
    for _ in range(2):
        assert job.requested_after(INSPECTION_INTERVAL_S)
        job.consider(0, 1, main=Wait.STOPPED)
    before = job.ranks
    job.ranks = [rank(0, 0.1), rank(1, 0.1)]
    assert not job.requested_after(INSPECTION_INTERVAL_S)
    job.ranks = before
    assert job.requested_after(0.0)
    assert job.consider(0, 1, main=Wait.STOPPED) == [], "the inspections start over"


@pytest.mark.parametrize("last_inside", [False, True])
def test_collectives_are_requested_only_if_all_workers_wait_in_one(last_inside: bool) -> None:
    """Answering is work, which would make the inspected process look active."""
    job = Job(rank(0, 11.0, inside=True), rank(1, 11.0, inside=last_inside))
    assert job.requested_after(0.0)
    assert job.suspicion.order.collectives is last_inside


def test_a_node_inspects_once_per_order_and_keeps_nothing(slots: SlotFile) -> None:
    node, ranks = NodeInspections(slots, GroupPlan.on_all_nodes(Role.TRAINER, 1, 1, 1)), [rank(0, 11.0)]
    node.answer(InspectionOrder(), ranks, {})
    assert node.inspections == ()
    node.answer(InspectionOrder(number=1), ranks, {"gpu0_util_percent": 3.0})
    (first,) = node.inspections
    assert (first.main, first.gpu_percent) == (Wait.RUNNING, 3.0)
    node.answer(InspectionOrder(number=1), ranks, {})
    assert node.inspections == (first,), "the same order is not carried out twice"
    node.answer(InspectionOrder(number=2), ranks, {"gpu0_util_percent": 3.0, "slow_reading_age_s": 20.0})
    assert node.inspections[0].gpu_percent is None, "an old reading of a GPU is no evidence"
    node.answer(InspectionOrder(), ranks, {})
    assert (node.number, node.inspections) == (0, ())


def test_a_worker_with_several_gpus_is_as_busy_as_its_busiest_gpu(slots: SlotFile) -> None:
    engines = GroupPlan(role=Role.ROLLOUT, nodes=(0,), workers_per_node=2, gpus=(2, 3, 4, 5), restart="alone")
    node, second = NodeInspections(slots, engines), rank(1, 11.0).model_copy(update={"local_rank": 1})
    busy = {"gpu0_util_percent": 90.0, "gpu3_util_percent": 1.0, "gpu4_util_percent": 0.0, "gpu5_util_percent": 99.0}
    node.answer(InspectionOrder(number=1), [rank(0, 11.0), second], busy)
    assert [one.gpu_percent for one in node.inspections] == [1.0, 99.0]
