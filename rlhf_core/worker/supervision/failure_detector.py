"""Agent 0's checks of all nodes for lost agents, failed workers and hung workers."""

import time
from collections.abc import Iterable, Mapping

from rlhf_core.diagnosis.hangs.liveness import GapTracker
from rlhf_core.schemas.agent_messages import NewestStep, NodeState
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import PEER_TIMEOUT_S
from rlhf_core.worker.supervision.agent_loss import find_loss
from rlhf_core.worker.supervision.group import SupervisedGroup, states_of
from rlhf_core.worker.supervision.hang_judge import HangJudge
from rlhf_core.worker.supervision.node import SupervisedNode

LAST_STATE_TIMEOUT_S = 15.0
"""Silence of an agent after which its node is given up while all workers are being killed, in seconds."""
UNHEARD_TIMEOUT_S = 3.0
"""Silence of an agent, several heartbeats long, after which its workers count as missing for those that wait for them:
a lost node of rollout engines is diagnosed as such rather than as a hang of the trainers."""


class FailureDetector:
    """Detects failures on all nodes and has the workers killed. Used only by agent 0's supervising thread."""

    def __init__(
        self, channel: AgentChannel, node: SupervisedNode, tracker: GapTracker, events: EventLog, spec: SuperviseSpec
    ) -> None:
        """Args:
        node: The node of agent 0.
        """
        self._channel = channel
        self._node = node
        self._tracker = tracker
        self._agent_floor_s = spec.agent_floor_s
        self._judge = HangJudge(channel, node.orders, tracker, events, spec.evidence_s)

    def check(self) -> None:
        """Check all nodes by their newest states."""
        groups, orders = self._node.groups, self._node.orders
        states = self._channel.received("state", NodeState)
        self._find_lost_agents(states)
        now_s = time.monotonic()
        here = {role: states_of(one, states) for role, one in groups.items()}
        reachable = {index for index in states if self._channel.silence_s(index) <= UNHEARD_TIMEOUT_S}
        for role, one in groups.items():
            found = [state for index, state in here[role].items() if index in reachable]
            ranks = orders.still_wanted(role, found)
            one.observe(ranks, self._tracker, now_s)
            if not one.is_alone:
                self._share_newest_step(one, ranks)
        conditions = {role: one.condition for role, one in groups.items()}
        for role, one in groups.items():
            states_here = here[role]
            if self._node.requests.to_end or any(state.failed for state in states_here.values()):
                self._end_all(one)
            elif len(states_here) == self._channel.nodes.num and all(state.started for state in states_here.values()):
                self._judge.judge(one, [states_here[index] for index in sorted(states_here)], conditions)

    def _find_lost_agents(self, states: Mapping[int, NodeState]) -> None:
        names = self._channel.nodes.names
        for index, state in states.items():
            if state.ended_by and index != self._channel.nodes.index:
                self._node.end(f"{state.ended_by} on {names[index]}")
            if state.broken:
                self._node.give_up(names[index], state.broken, state.broken_kind)
        loss = find_loss(self._channel, self._agent_timeout_s())
        if loss is not None:
            self._node.give_up(loss.node, loss.message, FailureKind.NODE_LOST)

    def _agent_timeout_s(self) -> float:
        """Allowed silence of an agent; shorter while all workers are being killed, when every node waits for it."""
        orders = self._node.orders
        ending = any(orders.group(one.group.role).kill == one.group.generation for one in self._node.joint_groups)
        return min(LAST_STATE_TIMEOUT_S, self._agent_floor_s) if ending else self._agent_floor_s

    def _share_newest_step(self, one: SupervisedGroup, ranks: Iterable[RankStatus]) -> None:
        """Tell all workers of a group the newest step of any.

        Often one rank alone prints the steps of an external program, on any node.
        """
        role, generation, orders = one.group.role, one.group.generation, self._node.orders
        known = orders.group(role).newest
        step = max((rank.step for rank in ranks), default=0)
        if step > (known.step if known.generation == generation else 0):
            orders.change_group(role, newest=NewestStep(generation=generation, step=step))
        one.show_step(orders.group(role))

    def _end_all(self, one: SupervisedGroup) -> None:
        """Order all workers of a failed group killed on every node, after their peers had time to report."""
        group, orders, now_s = one.group, self._node.orders, time.monotonic()
        if one.is_alone:
            group.end()  # the attempt is ending, and nothing else kills all of them
            return
        if one.failed_at_s is None:
            one.failed_at_s = now_s
        timeout_s = 0.0 if self._node.requests.to_end or group.hang is not None else PEER_TIMEOUT_S
        if now_s - one.failed_at_s >= timeout_s and orders.group(group.role).kill != group.generation:
            orders.change_group(group.role, kill=group.generation)
            group.end()
