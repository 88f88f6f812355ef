"""One group of workers under supervision: inspected, judged, and killed by order of agent 0."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_core.diagnosis.hangs.liveness import Condition, ConditionClock, GapTracker
from rlhf_core.schemas.agent_messages import GroupOrders, GroupState, NodeState, WorkerExit
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.evidence import collection as evidence
from rlhf_core.worker.groups.base import Hang, WorkerGroup
from rlhf_core.worker.groups.independent import IndependentGroup
from rlhf_core.worker.liveness import collectives
from rlhf_core.worker.liveness.process_groups import with_process_groups
from rlhf_core.worker.supervision.early_hang_check import EarlyHangCheck, NodeInspections

Place = tuple[str, int]
"""Node and process id of a worker."""


@dataclass
class SupervisedGroup:
    """A group of the current phase on this node, with agent 0's knowledge of it on all nodes."""

    group: WorkerGroup
    start: int
    """See ``GroupState.start``."""
    inspections: NodeInspections
    hang_check: EarlyHangCheck
    condition_clock: ConditionClock = field(default_factory=ConditionClock)
    condition: Condition = field(default_factory=lambda: Condition(is_at_fault=True))
    failed_at_s: float | None = None
    """Time at which agent 0 saw a failed worker, by its monotonic clock."""
    hangs: dict[Place, Hang] = field(default_factory=dict)
    """Workers that agent 0 had killed individually because they hung."""
    exits: dict[int, WorkerExit] = field(default_factory=dict)
    """Workers on this node that exited or did not start, and were not restarted, by local rank; for groups with
    individual restarts."""
    well: frozenset[int] = frozenset()
    """Ranks that have completed their work; for groups with individual restarts."""

    @classmethod
    def of(cls, group: WorkerGroup, start: int, tracker: GapTracker) -> "SupervisedGroup":
        """Supervise a group that is about to be started."""
        inspections = NodeInspections(group.seat.slots, group.plan)
        return cls(group, start, inspections, EarlyHangCheck(tracker, alone=group.is_alone))

    @property
    def is_alone(self) -> bool:
        """True if its workers restart individually."""
        return self.group.is_alone

    def state(self, orders: GroupOrders, telemetry: dict[str, float]) -> GroupState:
        """State on this node, after an inspection if one was requested."""
        ranks = tuple(self.group.living())
        self.inspections.answer(orders.inspect, ranks, telemetry)
        return GroupState(
            role=self.group.role,
            start=self.start,
            started=self.group.started,
            failed=not self.is_alone and self.group.failed,
            ranks=ranks,
            inspection_number=self.inspections.number,
            inspections=self.inspections.inspections,
            exits=tuple(self.exits.values()),
        )

    def obey(self, orders: GroupOrders, node_index: int, log_killed: Callable[[str], object]) -> None:
        """Kill this node's workers as ordered by agent 0.

        Args:
            log_killed: Receives a sentence when workers are killed.
        """
        group = self.group
        if not self.is_alone:
            self.show_step(orders)
            if orders.kill == group.generation and not group.killing:
                log_killed("agent 0 ends all workers")
                group.end()
            return
        pids = {one.pid for one in orders.end_workers if one.node_index == node_index}
        found = {local for local, one in group.workers.items() if one.pid in pids and local not in group.exits}
        if found:
            group.end(found)

    def show_step(self, orders: GroupOrders) -> None:
        """Show this node's workers the newest step of any worker of this start."""
        if orders.newest.generation == self.group.generation:
            self.group.seat.slots.show_step(orders.newest.step)

    def observe(self, ranks: Sequence[RankStatus], tracker: GapTracker, now_s: float) -> None:
        """Record, on agent 0, the group's state on all nodes."""
        num_missing = self.group.plan.num_workers - len(ranks) - len(self.well)
        self.condition = self.condition_clock.observe(ranks, num_missing, tracker, now_s)

    def collect(self, wanted: Iterable[int], events: EventLog) -> tuple[RankStatus, ...]:
        """Save evidence of this node's workers.

        Args:
            wanted: Ranks; empty for all.

        Returns:
            Their statuses afterwards, with their reported collectives.
        """
        group, node = self.group, self.group.seat.node
        question = group.seat.slots.request_collectives()
        chosen = frozenset(wanted)
        ranks = [rank for rank in group.living() if not chosen or rank.rank in chosen]
        missing: list[str] = []
        for folder in {group.folder(rank.local_rank) for rank in ranks}:
            here = [rank for rank in ranks if group.folder(rank.local_rank) == folder]
            logs = {rank.local_rank: folder.log(group.role, node, rank.local_rank) for rank in here}
            missing += evidence.collect(here, logs, folder.evidence_dir, node)
        if ranks:
            named = group.folder(ranks[0].local_rank).evidence_dir.name
            events.add("evidence", f"saved stacks, states and logs of {len(ranks)} workers in {named}/", group.role)
        answers = collectives.read_answers(ranks, group.seat.slots.path, question)
        for local_rank, content in answers.items():
            path = group.folder(local_rank).evidence_dir / f"collectives-{node}-{local_rank}.json"
            evidence.save(path, content, missing)
        for problem in missing:
            events.print_line(problem)
        again = [rank for rank in group.living() if not chosen or rank.rank in chosen]
        return tuple(with_process_groups(again, answers))

    def starts_here(self, orders: GroupOrders, node_index: int) -> list[tuple[int, int]]:
        """Local rank and generation of this node's workers that agent 0 has ordered to restart."""
        if not isinstance(self.group, IndependentGroup):
            return []
        newest = {one.local_rank: one.generation for one in orders.start_workers if one.node_index == node_index}
        known = self.group.generations
        return [(local, number) for local, number in newest.items() if number > known[local] and local in self.exits]


def states_of(one: SupervisedGroup, states: Mapping[int, NodeState]) -> dict[int, GroupState]:
    """State of a group by node index, for nodes at the same start."""
    return {
        index: group
        for index, state in states.items()
        for group in state.groups
        if group.role is one.group.role and group.start == one.start
    }
