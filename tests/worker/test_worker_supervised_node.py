"""Requests to a node arrive while its main thread adds groups."""

from pathlib import Path

import pytest
from given_process import GivenProcess

from rlhf_core.diagnosis.hangs.liveness import GapTracker
from rlhf_core.run_dir.attempt import AttemptDir, RestartDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.order_book import OrderBook
from rlhf_core.worker.channel.store import MemoryAgentStore
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import GroupSeat
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.supervision.external_requests import ExternalRequests
from rlhf_core.worker.supervision.group import SupervisedGroup
from rlhf_core.worker.supervision.node import SupervisedNode

CHANNEL = AgentChannel(Nodes(("here",), ("127.0.0.1",), 0), MemoryAgentStore())


@pytest.fixture
def folder(tmp_path: Path) -> RestartDir:
    return AttemptDir(tmp_path, 1).restart(0)


@pytest.fixture
def node(folder: RestartDir) -> SupervisedNode:
    return SupervisedNode(CHANNEL, ExternalRequests(), OrderBook(CHANNEL), EventLog("here", folder))


def group_of(role: Role, folder: RestartDir, slots: SlotFile, kind: type[GivenProcess] = GivenProcess) -> GivenProcess:
    seat = GroupSeat("here", 0, slots, CHANNEL.clock)
    return kind(GroupPlan.on_all_nodes(role, 1, 1), 0, folder, seat)


def test_a_request_is_completed_although_a_group_is_added_meanwhile(
    node: SupervisedNode, folder: RestartDir, slots: SlotFile
) -> None:
    """A request that fails half-way is not repeated: it counts as received."""
    tracker = GapTracker(SuperviseSpec())
    added = SupervisedGroup.of(group_of(Role.ROLLOUT, folder, slots), 0, tracker)

    class Interrupted(GivenProcess):
        """A group at which the supervising thread is interrupted by the main thread."""

        @property
        def is_alone(self) -> bool:
            if node.groups:
                node.add(added)
            return False

    node.add(SupervisedGroup.of(group_of(Role.TRAINER, folder, slots, Interrupted), 0, tracker))
    node.save_and_stop("the time limit is near")
    assert set(node.groups) == {Role.TRAINER, Role.ROLLOUT}
    assert (node.requests.stop, node.orders.current.stop) == ("the time limit is near",) * 2
