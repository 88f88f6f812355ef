"""Judgement of a group on agent 0: ranks that have ended count beside those that are silent."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from given_process import GivenProcess
from made_reports import rank_status

from rlhf_core.diagnosis.hangs.liveness import GapTracker
from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.order_book import OrderBook
from rlhf_core.worker.channel.store import MemoryAgentStore
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import GroupSeat
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.supervision.group import SupervisedGroup
from rlhf_core.worker.supervision.hang_judge import HangJudge


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
    tmp_path: Path,
    slots: SlotFile,
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    kind: FailureKind,
    blamed: tuple[int, ...],
) -> None:
    monkeypatch.setattr("rlhf_core.worker.evidence.collection.collect", lambda *_: [])
    channel = AgentChannel(Nodes(("here",), ("127.0.0.1",), 0), MemoryAgentStore())
    orders, tracker = OrderBook(channel), GapTracker(SuperviseSpec(floor_s=60.0, setup_floor_s=60.0))
    orders.change(stop=stop)
    folder = AttemptDir(tmp_path, 1).restart(0)
    group = OneWaits(GroupPlan.on_all_nodes(Role.TRAINER, 2, 1), 0, folder, GroupSeat("here", 0, slots, channel.clock))
    supervised = SupervisedGroup.of(group, 0, tracker)
    judge = HangJudge(channel, orders, tracker, EventLog("here", folder), evidence_timeout_s=0.0)
    judge.judge(supervised, [supervised.state(orders.group(Role.TRAINER), {})], {})
    assert group.hang is not None
    assert (group.hang.verdict.kind, group.hang.verdict.ranks) == (kind, blamed)
