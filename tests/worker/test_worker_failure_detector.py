"""Agent 0's checks of all nodes: a node whose agent is silent, and the newest step of a group."""

from pathlib import Path

import pytest
from given_process import GivenProcess
from process_tools import until

from rlhf_core.diagnosis.hangs.liveness import GapTracker, overdue
from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.run_dir.run import new_run_id
from rlhf_core.schemas.agent_messages import GroupState, NodeState, Orders
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import Phase, RankStatus
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.order_book import OrderBook
from rlhf_core.worker.channel.signing import MessageSigner
from rlhf_core.worker.channel.store import MemoryAgentStore
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import GroupSeat
from rlhf_core.worker.liveness.heartbeat import Beat, SlotFile
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.supervision import failure_detector
from rlhf_core.worker.supervision.external_requests import ExternalRequests
from rlhf_core.worker.supervision.failure_detector import FailureDetector
from rlhf_core.worker.supervision.group import SupervisedGroup
from rlhf_core.worker.supervision.node import SupervisedNode

TRAINERS = GroupPlan.on_all_nodes(Role.TRAINER, 1, 2)


@pytest.mark.parametrize("counts", [True, False], ids=["missing", "control: as its agent has said last"])
def test_an_engine_with_a_silent_agent_is_blamed_for_waiting_trainers(
    tmp_path: Path, slots: SlotFile, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """The node of the engine lost power: a trainer that is silent meanwhile is not hung.

    By its last status the engine would be healthy, and the trainer would be blamed.
    """
    if not counts:
        monkeypatch.setattr(failure_detector, "UNHEARD_TIMEOUT_S", float("inf"))
    names, key, store = ("here", "there"), b"0" * 64, MemoryAgentStore()
    leader, other = (
        AgentChannel(Nodes(names, ("127.0.0.1",) * 2, index), store, MessageSigner(key, "toy/1", index))
        for index in range(2)
    )
    restart_dir = AttemptDir(tmp_path, 1).restart(0)
    tracker = GapTracker(SuperviseSpec(floor_s=5.0, setup_floor_s=5.0, weight_sync_floor_s=5.0))
    plan = GroupPlan(role=Role.ROLLOUT, nodes=(1,), workers_per_node=1, restart="alone")
    engines = GivenProcess(plan, 0, restart_dir, GroupSeat("here", -1, slots, leader.clock))
    supervised, events = SupervisedGroup.of(engines, 0, tracker), EventLog("here", restart_dir)
    node = SupervisedNode(leader, ExternalRequests(), OrderBook(leader), events)
    node.add(supervised)
    detector = FailureDetector(leader, node, tracker, events, SuperviseSpec())
    engine = rank_of(Role.ROLLOUT, Phase.ROLLOUT, "there", age_s=0.1)
    other.send("state", NodeState(wall_s=0.0, groups=(GroupState(role=Role.ROLLOUT, start=0, ranks=(engine,)),)))
    until(lambda: leader.received("state", NodeState))
    detector.check()
    assert not supervised.condition.is_at_fault
    other.close()
    until(lambda: leader.silence_s(1) > 3.5)
    detector.check()
    trainer = rank_of(Role.TRAINER, Phase.WEIGHT_SYNC, "here", age_s=6.0)
    blamed = overdue([trainer], tracker.limit_s, {Role.ROLLOUT: supervised.condition})
    leader.close()
    assert [one.status.rank for one in blamed] == ([] if counts else [0])


@pytest.mark.parametrize("generation", [0, 1], ids=["", "control: of an earlier start"])
def test_the_newest_step_of_any_rank_is_shown_to_all(tmp_path: Path, slots: SlotFile, generation: int) -> None:
    """Only the rank on the second node prints steps. A restart may begin at an earlier step than the start before."""
    store = MemoryAgentStore()
    names, key = ("here", "there"), b"0" * 64
    leader, other = (
        AgentChannel(Nodes(names, ("127.0.0.1",) * 2, index), store, MessageSigner(key, "toy/1", index))
        for index in range(2)
    )
    restart_dir = AttemptDir(tmp_path, 1).restart(0)
    tracker = GapTracker(SuperviseSpec())
    there = SlotFile(new_run_id("toy"), 1, "there", 1)
    groups = []
    for name, position, file in (("here", 0, slots), ("there", 1, there)):
        group = GivenProcess(TRAINERS, 0, restart_dir, GroupSeat(name, position, file, leader.clock))
        groups.append(SupervisedGroup.of(group, 0, tracker))
    events = EventLog("here", restart_dir)
    node = SupervisedNode(leader, ExternalRequests(), OrderBook(leader), events)
    node.add(groups[0])
    printing = rank_of(Role.TRAINER, Phase.TRAIN, "there", age_s=0.1)
    other.send("state", NodeState(wall_s=0.0, groups=(GroupState(role=Role.TRAINER, start=0, ranks=(printing,)),)))
    until(lambda: leader.received("state", NodeState))
    FailureDetector(leader, node, tracker, events, SuperviseSpec()).check()
    orders = until(lambda: other.published("orders", Orders))
    groups[1].group.generation = generation
    groups[1].obey(orders.groups[Role.TRAINER], 1, print)
    shown = [Beat(file.path, 0).step_of_group() for file in (slots, there)]
    for channel in (other, leader):
        channel.close()
    there.remove()
    assert shown == [5, 0 if generation else 5]


def rank_of(role: Role, phase: Phase, node: str, age_s: float) -> RankStatus:
    return RankStatus(
        role=role,
        node=node,
        rank=0,
        local_rank=0,
        pid=1,
        sequence=5,
        collectives=0,
        in_collective=False,
        step=5,
        phase=phase,
        age_s=age_s,
        process_state="S",
        warm=True,
    )
