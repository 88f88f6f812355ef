"""The agent's node under supervision: its groups of workers, and the requests and orders that they follow."""

import time
from functools import partial

from rlhf_core.schemas.agent_messages import Collected, GroupOrders, NodeState, Orders
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.order_book import OrderBook
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.supervision.external_requests import ExternalRequests
from rlhf_core.worker.supervision.group import SupervisedGroup


class SupervisedNode:
    """The groups of the current phase on this node.

    The main thread adds and removes groups; the supervising thread does everything else. Both hold the supervisor's
    lock, except for external requests, which do not wait for it: these iterate over copies of the groups, and the main
    thread repeats earlier requests to a group that it has added.
    """

    def __init__(self, channel: AgentChannel, requests: ExternalRequests, orders: OrderBook, events: EventLog) -> None:
        self.name = channel.nodes.name
        self.requests = requests
        self.orders = orders
        self.groups: dict[Role, SupervisedGroup] = {}
        self._channel = channel
        self._events = events

    def add(self, one: SupervisedGroup) -> None:
        """Add a group, or a new start of one."""
        role = one.group.role
        if role in self.orders.current.groups:
            # Orders to start or kill single workers belong to a phase; request numbers only ever increase.
            before = self.orders.current.groups[role]
            self.orders.set_group(role, GroupOrders(collect=before.collect))
        self.groups[role] = one

    def remove(self, role: Role) -> None:
        """Remove a group, if it is there."""
        self.groups.pop(role, None)

    @property
    def joint_groups(self) -> list[SupervisedGroup]:
        """Groups whose state is saved. Groups with individual restarts only serve these, until these have finished."""
        return [one for one in list(self.groups.values()) if not one.is_alone]

    def started_pids(self) -> set[int]:
        """Process ids of all workers that were started."""
        return {worker.pid for one in self.groups.values() for worker in one.group.workers.values()}

    def living_pids(self) -> list[int]:
        """Process ids of the running workers and of the processes that they represent."""
        ranks = [rank for one in self.groups.values() for rank in one.group.living()]
        return [pid for rank in ranks for pid in (rank.pid, *(other.pid for other in rank.speaks_for))]

    def state(self, num_readings: int, telemetry: dict[str, float]) -> NodeState:
        """State of this node, after the inspections that were requested.

        Args:
            num_readings: Number of telemetry readings so far.
            telemetry: The last one.
        """
        groups = tuple(one.state(self.orders.group(role), telemetry) for role, one in self.groups.items())
        is_broken = self.requests.broken_node == self.name
        return NodeState(
            wall_s=time.time(),
            groups=groups,
            ended_by=self.requests.end,
            broken=self.requests.broken if is_broken else "",
            broken_kind=self.requests.broken_kind,
            published=num_readings,
            telemetry=telemetry,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # External requests

    def kill_workers(self) -> None:
        """Kill all workers."""
        for one in list(self.groups.values()):
            one.group.end()

    def cancel(self, reason: str) -> None:
        """Kill all workers, because the user cancelled the run."""
        self.requests.cancel = reason
        self.kill_workers()
        if self._channel.leads:
            self.orders.change(cancel=reason)

    def end(self, name: str) -> None:
        """Kill all workers, because of a signal.

        Args:
            name: Name of the signal, with the node if it is another one.
        """
        if not self.requests.end:
            self.requests.end = name
            self._events.add("killed", f"{name} received: ending everything", signal=name)
        self.kill_workers()

    def give_up(self, node: str, message: str, kind: FailureKind) -> None:
        """Kill all workers, because a node cannot continue or is considered lost."""
        if not self.requests.broken:
            self.requests.broken, self.requests.broken_kind, self.requests.broken_node = message, kind, node
            self._events.add("peer", f"{message}; ending everything", node_lost=node)
            self.kill_workers()

    def give_up_leader(self) -> None:
        """Kill all workers, because agent 0 is lost."""
        self.requests.broken = "agent 0 no longer responds"
        self.kill_workers()
        # The controller acts on this line, which saves it waiting for agent 0's files to go stale.
        self._events.add("peer", f"{self.requests.broken}; ending everything", leader_lost=True)

    def save_and_stop(self, reason: str) -> None:
        """Let the workers save their state and end."""
        if not self.requests.stop:
            self.requests.stop = reason
            for one in self.joint_groups:
                one.group.seat.slots.request_stop()
            self._events.add("save_requested", f"the workers were asked to save and end: {reason}")
            if self._channel.leads:
                self.orders.change(stop=reason)

    # -----------------------------------------------------------------------------------------------------------------
    # Orders of agent 0

    def obey(self, orders: Orders) -> None:
        """Carry out the newest orders of agent 0."""
        before = self.orders.take(orders)
        if orders.cancel and not self.requests.cancel:
            self.cancel(orders.cancel)
        if orders.stop:
            self.save_and_stop(orders.stop)
        if orders.over is not None:
            self.kill_workers()
        for role, one in list(self.groups.items()):
            wanted = self.orders.group(role)
            one.obey(wanted, self._channel.nodes.index, partial(self._events.add, "killed", role=role))
            if wanted.collect > before.groups.get(role, GroupOrders()).collect:
                ranks = one.collect(wanted.collect_ranks, self._events)
                self._channel.send(f"evidence/{role}/{wanted.collect}", Collected(ranks=ranks))
