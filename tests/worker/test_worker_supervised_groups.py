"""Groups under supervision: requests to them, silent agents, the newest step of any rank, ranks that have ended."""

from collections.abc import Sequence

import pytest
from agents_in_memory import GivenProcess, channels_of, lone_channel
from made_reports import rank_status
from process_tools import until

from rlhf_core.diagnosis.hangs.liveness import GapTracker, overdue
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import new_run_id
from rlhf_core.schemas.agent_messages import GroupState, NodeState, Orders
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import Phase, RankStatus
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.order_book import OrderBook
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.liveness.heartbeat import Beat, SlotFile
from rlhf_core.worker.supervision import failure_detector
from rlhf_core.worker.supervision.external_requests import ExternalRequests
from rlhf_core.worker.supervision.failure_detector import FailureDetector
from rlhf_core.worker.supervision.group import SupervisedGroup
from rlhf_core.worker.supervision.hang_judge import HangJudge
from rlhf_core.worker.supervision.node import SupervisedNode


def node_of(channel: AgentChannel, events: EventLog) -> SupervisedNode:
    return SupervisedNode(channel, ExternalRequests(), OrderBook(channel), events)


def send_state(channel: AgentChannel, role: Role, rank: RankStatus) -> None:
    channel.send("state", NodeState(wall_s=0.0, groups=(GroupState(role=role, start=0, ranks=(rank,)),)))


def test_a_request_is_completed_although_a_group_is_added_meanwhile(
    restart_dir: RestartDir, events: EventLog, slots: SlotFile
) -> None:
    """A request that fails half-way is not repeated: it counts as received."""
    node, tracker = node_of(lone_channel(), events), GapTracker(SuperviseSpec())
    plan = GroupPlan.on_all_nodes(Role.ROLLOUT, 1, 1)
    added = SupervisedGroup.of(GivenProcess(slots, restart_dir, plan=plan), 0, tracker)

    class Interrupted(GivenProcess):
        """A group at which the supervising thread is interrupted by the main thread."""

        @property
        def is_alone(self) -> bool:
            if node.groups:
                node.add(added)
            return False

    node.add(SupervisedGroup.of(Interrupted(slots, restart_dir), 0, tracker))
    node.save_and_stop("the time limit is near")
    assert set(node.groups) == {Role.TRAINER, Role.ROLLOUT}
    assert (node.requests.stop, node.orders.current.stop) == ("the time limit is near",) * 2


@pytest.mark.parametrize("counts", [True, False], ids=["missing", "control: as its agent has said last"])
def test_an_engine_with_a_silent_agent_is_blamed_for_waiting_trainers(
    restart_dir: RestartDir, events: EventLog, slots: SlotFile, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """The node of the engine lost power: a trainer that is silent meanwhile is not hung.

    By its last status the engine would be healthy, and the trainer would be blamed.
    """
    if not counts:
        monkeypatch.setattr(failure_detector, "UNHEARD_TIMEOUT_S", float("inf"))
    leader, other = channels_of("here", "there")
    tracker = GapTracker(SuperviseSpec(floor_s=5.0, setup_floor_s=5.0, weight_sync_floor_s=5.0))
    plan = GroupPlan(role=Role.ROLLOUT, nodes=(1,), workers_per_node=1, restart="alone")
    supervised = SupervisedGroup.of(GivenProcess(slots, restart_dir, plan=plan, position=-1), 0, tracker)
    node = node_of(leader, events)
    node.add(supervised)
    detector = FailureDetector(leader, node, tracker, events, SuperviseSpec())
    send_state(other, Role.ROLLOUT, rank_status(0, role=Role.ROLLOUT, phase=Phase.ROLLOUT, node="there", warm=True))
    until(lambda: leader.received("state", NodeState))
    detector.check()
    assert not supervised.condition.is_at_fault
    other.close()
    until(lambda: leader.silence_s(1) > 3.5)
    detector.check()
    trainer = rank_status(0, phase=Phase.WEIGHT_SYNC, node="here", age_s=6.0, warm=True)
    blamed = overdue([trainer], tracker.limit_s, {Role.ROLLOUT: supervised.condition})
    leader.close()
    assert [one.status.rank for one in blamed] == ([] if counts else [0])


@pytest.mark.parametrize("generation", [0, 1], ids=["", "control: of an earlier start"])
def test_the_newest_step_of_any_rank_is_shown_to_all(
    restart_dir: RestartDir, events: EventLog, slots: SlotFile, generation: int
) -> None:
    """Only the rank on the second node prints steps. A restart may begin at an earlier step than the start before."""
    leader, other = channels_of("here", "there")
    tracker, plan = GapTracker(SuperviseSpec()), GroupPlan.on_all_nodes(Role.TRAINER, 1, 2)
    there = SlotFile(new_run_id("toy"), 1, "there", 1)
    own, others = (
        SupervisedGroup.of(GivenProcess(file, restart_dir, plan=plan, node=name, position=position), 0, tracker)
        for name, position, file in (("here", 0, slots), ("there", 1, there))
    )
    node = node_of(leader, events)
    node.add(own)
    send_state(other, Role.TRAINER, rank_status(0, node="there", step=5, warm=True))
    until(lambda: leader.received("state", NodeState))
    FailureDetector(leader, node, tracker, events, SuperviseSpec()).check()
    orders = until(lambda: other.published("orders", Orders))
    others.group.generation = generation
    others.obey(orders.groups[Role.TRAINER], 1, print)
    shown = [Beat(file.path, 0).step_of_group() for file in (slots, there)]
    for channel in (other, leader):
        channel.close()
    there.remove()
    assert shown == [5, 0 if generation else 5]


class OneWaits(GivenProcess):
    """Two ranks, of which one has ended with exit code 0 and the other waits in a collective."""

    def living(self) -> Sequence[RankStatus]:
        """The rank that waits."""
        return [rank_status(0, node="here", in_collective=True, collectives=41, age_s=90.0, sequence=0)]

    def end(self, workers: object = None) -> None:
        """End nothing: the process of the rank is made up."""
        self.killing = True


@pytest.mark.parametrize(
    ("stop", "kind", "blamed"),
    [
        ("", FailureKind.COLLECTIVE_MISMATCH, (1,)),
        ("the user asked to save and stop", FailureKind.COLLECTIVE_HANG, ()),
    ],
    ids=["", "control: a rank that saved and ended by order"],
)
def test_a_rank_that_ended_while_another_waits_for_it_is_blamed(
    restart_dir: RestartDir,
    events: EventLog,
    slots: SlotFile,
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    kind: FailureKind,
    blamed: tuple[int, ...],
) -> None:
    monkeypatch.setattr("rlhf_core.worker.evidence.collection.collect", lambda *_: [])
    channel = lone_channel()
    orders, tracker = OrderBook(channel), GapTracker(SuperviseSpec(floor_s=60.0, setup_floor_s=60.0))
    orders.change(stop=stop)
    group = OneWaits(slots, restart_dir, plan=GroupPlan.on_all_nodes(Role.TRAINER, 2, 1))
    supervised = SupervisedGroup.of(group, 0, tracker)
    judge = HangJudge(channel, orders, tracker, events, evidence_timeout_s=0.0)
    judge.judge(supervised, [supervised.state(orders.group(Role.TRAINER), {})], {})
    assert group.hang is not None
    assert (group.hang.verdict.kind, group.hang.verdict.ranks) == (kind, blamed)
