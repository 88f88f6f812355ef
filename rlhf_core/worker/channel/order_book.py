"""One agent's copy of agent 0's orders: agent 0 changes and publishes them, the others adopt them."""

import threading
from collections.abc import Iterable

from rlhf_core.schemas.agent_messages import GroupOrders, GroupState, Orders, WorkerEndOrder, WorkerStartOrder
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.worker.channel.messages import AgentChannel


class OrderBook:
    """The newest orders. Shared by both threads of an agent."""

    def __init__(self, channel: AgentChannel) -> None:
        self._channel = channel
        self._lock = threading.RLock()
        self.current = Orders()
        """The newest orders."""

    def change(self, **changes: object) -> None:
        """Change and publish orders; for agent 0."""
        with self._lock:
            self.current = self.current.model_copy(update=changes)
            self._channel.publish("orders", self.current)

    def take(self, orders: Orders) -> Orders:
        """Adopt the orders that agent 0 has published.

        Returns:
            The previous orders.
        """
        with self._lock:
            before, self.current = self.current, orders
        return before

    def group(self, role: Role) -> GroupOrders:
        """The newest orders about a group."""
        return self.current.groups.get(role, GroupOrders())

    def set_group(self, role: Role, orders: GroupOrders) -> None:
        """Replace the orders about a group; agent 0 publishes them."""
        with self._lock:
            self.current = self.current.model_copy(update={"groups": {**self.current.groups, role: orders}})
            if self._channel.leads:
                self._channel.publish("orders", self.current)

    def change_group(self, role: Role, **changes: object) -> None:
        """Change some of the orders about a group."""
        with self._lock:
            self.set_group(role, self.group(role).model_copy(update=changes))

    def start_worker(self, role: Role, start: WorkerStartOrder) -> None:
        """Order the start of a single worker."""
        with self._lock:
            self.change_group(role, start_workers=(*self.group(role).start_workers, start))

    def end_worker(self, role: Role, end: WorkerEndOrder) -> None:
        """Order the end of a single worker."""
        with self._lock:
            self.change_group(role, end_workers=(*self.group(role).end_workers, end))

    def still_wanted(self, role: Role, states: Iterable[GroupState]) -> list[RankStatus]:
        """The living workers of a group on all nodes, except those being killed individually."""
        names = self._channel.nodes.names
        ended = {(names[one.node_index], one.pid) for one in self.group(role).end_workers}
        return [rank for state in states for rank in state.ranks if (rank.node, rank.pid) not in ended]
