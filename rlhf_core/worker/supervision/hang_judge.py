"""Agent 0's handling of silent workers: suspicion, evidence from all nodes, verdict, and the order to kill."""

import time
from collections.abc import Iterable, Mapping, Sequence

from rlhf_core.diagnosis.hangs.liveness import Condition, GapTracker, Suspect, describe, overdue
from rlhf_core.diagnosis.hangs.standstill import confirm
from rlhf_core.diagnosis.hangs.verdict import MAX_DESCRIBED, blame
from rlhf_core.schemas.agent_messages import Collected, GroupState, NodeState, WorkerEndOrder
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.text.formatting import listed
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.order_book import OrderBook
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import Hang
from rlhf_core.worker.supervision.group import SupervisedGroup, states_of


class HangJudge:
    """Judges hangs. Used only by agent 0's supervising thread."""

    def __init__(
        self,
        channel: AgentChannel,
        orders: OrderBook,
        tracker: GapTracker,
        events: EventLog,
        evidence_timeout_s: float,
    ) -> None:
        """Args:
        evidence_timeout_s: Longest wait for other nodes' evidence, in seconds.
        """
        self._channel = channel
        self._orders = orders
        self._tracker = tracker
        self._events = events
        self._evidence_timeout_s = evidence_timeout_s

    def judge(self, one: SupervisedGroup, states: Sequence[GroupState], conditions: Mapping[Role, Condition]) -> None:
        """Judge one group by the current state of its workers on all nodes.

        Args:
            states: State of the group on each node.
            conditions: Condition of all groups of the phase.
        """
        role = one.group.role
        ranks = self._orders.still_wanted(role, states)
        if not ranks:
            return
        self._tracker.observe(ranks, conditions)
        suspects = overdue(ranks, self._tracker.limit_s, conditions, alone=one.is_alone)
        suspects = suspects or one.hang_check.consider(ranks, states, time.monotonic(), conditions)
        if one.hang_check.order != self._orders.group(role).inspect:
            self._orders.change_group(role, inspect=one.hang_check.order)
        if suspects:
            self._investigate(one, ranks, suspects, conditions)

    def _investigate(
        self,
        one: SupervisedGroup,
        before: list[RankStatus],
        suspects: list[Suspect],
        conditions: Mapping[Role, Condition],
    ) -> None:
        """Collect evidence on all nodes, read the statuses again, and only then reach a verdict and kill.

        The first kill spoils the evidence.
        """
        group = one.group
        self._events.add("suspect", listed([*map(describe, suspects)], MAX_DESCRIBED, "; "), group.role)
        wanted = tuple(suspect.status.rank for suspect in suspects) if one.is_alone else ()
        number = self._orders.group(group.role).collect + 1
        self._orders.change_group(group.role, collect=number, collect_ranks=wanted)
        ranks = self._receive_evidence(number, one, one.collect(wanted, self._events))
        before = [rank for rank in before if not wanted or rank.rank in wanted]
        self._tracker.observe(ranks, conditions)
        still = confirm(suspects, ranks) or overdue(ranks, self._tracker.limit_s, conditions, alone=one.is_alone)
        # Collecting evidence takes seconds: a suspect may have resumed or exited, which is handled elsewhere.
        gone = _processes(before) - _processes(ranks)
        if one.is_alone:
            still = [suspect for suspect in still if _processes([suspect.status]) <= _processes(before)]
        if not still or (not one.is_alone and (group.failed or gone or _processes(ranks) - _processes(before))):
            self._events.add("suspect", "withdrawn: the workers continued", group.role)
            return
        if one.is_alone:
            for suspect in still:
                self._end_hung(one, suspect)
        else:
            self._end_all_hung(one, before, ranks, still)

    def _end_all_hung(
        self, one: SupervisedGroup, before: list[RankStatus], ranks: list[RankStatus], still: list[Suspect]
    ) -> None:
        group = one.group
        proven = {suspect.status.rank: suspect.evidence for suspect in still if suspect.evidence}
        # Ranks that save and end by order may do so a step apart, which is no fault of the code.
        is_stopping = bool(self._orders.current.stop)
        ended = set() if is_stopping else set(range(group.plan.num_workers)) - {rank.rank for rank in ranks}
        verdict = blame(ranks, [suspect.status.rank for suspect in still], proven, ended)
        blamed = [rank for rank in before if rank.rank in verdict.ranks] or before
        group.hang = Hang(verdict, tuple(ranks), max(rank.age_s for rank in blamed))
        self._events.add("verdict", verdict.reason, group.role, ranks=list(verdict.ranks))
        self._events.add("killed", f"hang: {verdict.reason}; ending all workers", group.role)
        self._orders.change_group(group.role, kill=group.generation)
        group.end()

    def _end_hung(self, one: SupervisedGroup, suspect: Suspect) -> None:
        """Kill one worker of a group whose workers do not wait for each other."""
        rank, role = suspect.status, one.group.role
        verdict = blame([rank], [rank.rank], {rank.rank: suspect.evidence} if suspect.evidence else {})
        one.hangs[rank.node, rank.pid] = Hang(verdict, (rank,), rank.age_s)
        self._events.add("verdict", verdict.reason, role, ranks=list(verdict.ranks))
        self._events.add("killed", f"hang: {verdict.reason}; ending this worker", role)
        end = WorkerEndOrder(node_index=self._channel.nodes.names.index(rank.node), pid=rank.pid)
        self._orders.end_worker(role, end)
        one.obey(self._orders.group(role), self._channel.nodes.index, lambda text: None)

    def _receive_evidence(
        self, number: int, one: SupervisedGroup, answers_here: Sequence[RankStatus]
    ) -> list[RankStatus]:
        """Statuses of all nodes' workers after the evidence was saved; for a node that does not answer, from before."""
        channel, role = self._channel, one.group.role
        deadline = time.monotonic() + self._evidence_timeout_s
        while len(answers := channel.received(f"evidence/{role}/{number}", Collected)) < channel.nodes.num - 1:
            if time.monotonic() > deadline:
                break
            channel.wait(0.1)
        last = states_of(one, channel.received("state", NodeState))
        wanted = self._orders.group(role).collect_ranks
        ranks = list(answers_here)
        for index in range(1, channel.nodes.num):
            found = answers[index].ranks if index in answers else last[index].ranks if index in last else ()
            ranks += [rank for rank in found if not wanted or rank.rank in wanted]
            if index not in answers:
                node = channel.nodes.names[index]
                self._events.print_line(f"no evidence from {node} within {self._evidence_timeout_s:.0f} s")
        return ranks


def _processes(ranks: Iterable[RankStatus]) -> set[tuple[str, int]]:
    return {(rank.node, rank.pid) for rank in ranks}
