"""Detection of silent workers: a pure rule over beats and a clock.

A worker hangs when it has been silent for longer than ``max(floor, factor x longest silence that ended well)`` in its
phase. The rule limits the gap between two beats, not the length of a phase: long phases also send beats. Long before
that, a worker is inspected (:meth:`GapTracker.suspicion_s`), and a proven standstill is acted upon at once
(``standstill.py``). Three exceptions prevent false alarms:

- a worker that waits inside a collective is not judged while a peer that it may wait for is within its own limit: a
  trainer that waits for a slow rollout is not hung;
- a worker that waits for another group (:data:`WAITS_FOR`) is not judged while that group is at fault;
- a worker in its first pass through a phase has the limit of the set-up (compilation, cold caches), and nothing is
  learned from its longest silence there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import STOPPED_STATES, Phase, RankStatus
from rlhf_core.schemas.supervision import SuperviseSpec

WAITS_FOR: Mapping[Role, Mapping[Phase, Role]] = {
    Role.TRAINER: {
        Phase.ROLLOUT: Role.ROLLOUT,
        Phase.WEIGHT_SYNC: Role.ROLLOUT,
        Phase.EVALUATE: Role.ROLLOUT,
        Phase.REWARD: Role.REWARD,
    },
    Role.EVALUATOR: {Phase.EVALUATE: Role.ROLLOUT},
}
"""Groups that a worker waits for in a phase, if they run beside it."""


@dataclass(frozen=True)
class Suspect:
    """A worker that has been silent for too long."""

    status: RankStatus
    limit_s: float
    """Allowed silence, in seconds."""
    evidence: str = ""
    """Proof of a standstill before the floor has passed; empty if the silence alone decides."""


@dataclass(frozen=True)
class Condition:
    """State of a group that another group waits for."""

    is_at_fault: bool
    """True if a worker of it is missing, still in set-up, stopped, or silent for longer than usual."""
    well_for_s: float = float("inf")
    """Time since it was last at fault, in seconds; infinite if it never was."""


class ConditionClock:
    """Condition of one group over time."""

    def __init__(self) -> None:
        self._fault_at_s = float("-inf")

    def observe(self, ranks: Sequence[RankStatus], num_missing: int, tracker: "GapTracker", now_s: float) -> Condition:
        """Judge a reading of the group.

        Args:
            ranks: Its running workers.
            num_missing: Number of workers that should run but do not.
            tracker: Thresholds and what was learned.
            now_s: The monotonic time, in seconds.
        """
        silent = any(rank.age_s > tracker.suspicion_s(rank) for rank in ranks)
        setting_up = any(rank.phase is Phase.SETUP for rank in ranks)
        at_fault = num_missing > 0 or silent or setting_up or any(rank.is_stopped for rank in ranks)
        if at_fault:
            self._fault_at_s = now_s
        return Condition(at_fault, now_s - self._fault_at_s)


Conditions = Mapping[Role, Condition]
"""Condition of each group that runs beside the judged one."""


class GapTracker:
    """Longest silence of each role and phase that ended well, over all restarts."""

    def __init__(self, spec: SuperviseSpec, longest_s: Mapping[str, float] = MappingProxyType({})) -> None:
        """Apply the thresholds of a run.

        Args:
            longest_s: Longest silences of earlier runs of the same shape: ``role/phase`` to seconds.
        """
        self._spec = spec
        self._earlier_s = dict(longest_s)
        self._longest_s: dict[str, float] = {}
        self._last: dict[Place, RankStatus] = {}
        self._spoiled: set[Place] = set()
        self._first_pass_s: dict[tuple[str, int, Phase], float] = {}
        self._recurring_s: dict[str, float] = {}

    def begin_restart(self, role: Role) -> None:
        """Forget the observed workers of a role that restarts; the learned silences remain."""
        self._last = {place: rank for place, rank in self._last.items() if rank.role is not role}
        self._spoiled = {place for place in self._spoiled if place[0] is not role}

    def longest_s(self, phase: Phase, role: Role = Role.TRAINER) -> float:
        """Longest silence of a phase that ended well, in seconds; 0 if there was none."""
        place = f"{role}/{phase}"
        return max(self._earlier_s.get(place, 0.0), self._longest_s.get(place, 0.0))

    @property
    def all_longest_s(self) -> dict[str, float]:
        """Longest silences of this run that ended well: ``role/phase`` to seconds. Those of earlier runs are excluded,
        because they would be passed on forever."""
        return dict(self._longest_s)

    def observe(self, ranks: Sequence[RankStatus], waits_for: Conditions = MappingProxyType({})) -> None:
        """Record one reading of all workers of a group.

        A silence counts once it has ended, with the age at the last reading. It is ignored if its own process or a
        peer's was stopped meanwhile, or if the worker waited in a collective for a peer outside it, or for a group at
        fault.
        """
        for rank in ranks:
            last = self._last.get(_place(rank))
            if last is not None and last.pid == rank.pid and last.sequence != rank.sequence:
                self._learn(last)
            self._last[_place(rank)] = rank
        stopped = any(rank.is_stopped for rank in ranks)
        outside = any(not rank.in_collective for rank in ranks)
        waiting = any(_waits_for_fault(rank, 0.0, waits_for) for rank in ranks)
        spoils = stopped or waiting
        self._spoiled.update(_place(rank) for rank in ranks if spoils or (outside and rank.in_collective))

    def _learn(self, ended: RankStatus) -> None:
        if _place(ended) not in self._spoiled:
            place = f"{ended.role}/{ended.phase}"
            if ended.warm:
                self._longest_s[place] = max(self._longest_s.get(place, 0.0), ended.age_s)
            else:
                self._recurring_s[place] = max(self._recurring_s.get(place, 0.0), self._besides_longest_s(ended))
        self._spoiled.discard(_place(ended))

    def _besides_longest_s(self, ended: RankStatus) -> float:
        """Longest silence of a process's first pass through a phase, apart from the longest of all, in seconds.

        The longest may be compilation. Another one like it may recur, as while a server samples for an external
        trainer, which never leaves its phase. As it may also be a second compilation, it raises only the limit, and
        only in this run: a standstill that can be proven is still found at once.
        """
        key = ended.node, ended.pid, ended.phase
        longest_s = self._first_pass_s.get(key, 0.0)
        self._first_pass_s[key] = max(longest_s, ended.age_s)
        return min(longest_s, ended.age_s)

    def limit_s(self, rank: RankStatus) -> float:
        """Allowed silence of a worker in its current phase, in seconds."""
        recurring_s = self._recurring_s.get(f"{rank.role}/{rank.phase}", 0.0)
        learned = self._spec.gap_factor * max(self.longest_s(rank.phase, rank.role), recurring_s)
        floor_s = self._spec.phase_floor_s(rank.phase)
        if not rank.warm:
            floor_s = max(floor_s, self._spec.setup_floor_s)
        return max(floor_s, learned)

    def suspicion_s(self, rank: RankStatus) -> float:
        """Silence after which a worker is inspected, in seconds; at most its limit.

        An inspection ends nothing, so the factor is omitted. But it is at least the longest silence that ended well,
        because usual waits should not be inspected. A stopped process is unusual in any phase.
        """
        limit_s = self.limit_s(rank)
        if rank.is_stopped:
            return min(limit_s, self._spec.suspect_s)
        if rank.phase is Phase.SETUP or not rank.warm:
            return limit_s
        return min(limit_s, max(self._spec.suspect_s, self.longest_s(rank.phase, rank.role)))


Place = tuple[Role, str, int]
"""Role, node and local rank."""


def _place(rank: RankStatus) -> Place:
    return rank.role, rank.node, rank.local_rank


def _waits_for_fault(rank: RankStatus, limit_s: float, waits_for: Conditions) -> bool:
    """True if its silence may be caused by a group that it waits for and that is, or was just now, at fault."""
    awaited = WAITS_FOR.get(rank.role, {}).get(rank.phase)
    condition = waits_for.get(awaited) if awaited is not None else None
    return condition is not None and (condition.is_at_fault or condition.well_for_s < limit_s)


def overdue(
    ranks: Sequence[RankStatus],
    limit_s: Callable[[RankStatus], float],
    waits_for: Conditions = MappingProxyType({}),
    *,
    alone: bool = False,
) -> list[Suspect]:
    """Workers that have been silent for too long.

    Args:
        ranks: All running workers of the group, as just read; ``observe`` was called with them before.
        limit_s: Silence allowed to a worker, in seconds: ``GapTracker.limit_s`` for those that hang,
            ``GapTracker.suspicion_s`` for those to be inspected.
        waits_for: Groups beside it. While one is at fault, a worker that waits for it is not hung; afterwards, its
            whole limit starts again.
        alone: True if the workers do not wait for each other, so each is judged separately.
    """
    if alone:
        return [one for rank in ranks for one in overdue([rank], limit_s, waits_for)]
    limits_s = [(rank, limit_s(rank)) for rank in ranks]
    silent = [
        Suspect(rank, allowed_s)
        for rank, allowed_s in limits_s
        if rank.age_s > allowed_s and (rank.is_stopped or not _waits_for_fault(rank, allowed_s, waits_for))
    ]
    suspects = [one for one in silent if not one.status.in_collective or one.status.is_stopped]
    if suspects:
        return suspects
    # All silent workers wait in a collective. It is a hang only if there is no other peer to wait for.
    return silent if len(silent) == len(ranks) else []


def describe(suspect: Suspect) -> str:
    """Format a suspect as text."""
    rank = suspect.status
    who = "rank" if rank.role is Role.TRAINER else f"{rank.role} rank"
    where = "inside a collective" if rank.in_collective else "outside any collective"
    why = f"inspected after {suspect.limit_s:.1f} s" if suspect.evidence else f"{suspect.limit_s:.1f} s are allowed"
    return (
        f"{who} {rank.rank} on {rank.node} has been silent for {rank.age_s:.1f} s in phase {rank.phase} at step "
        f"{rank.step}, {why}; {where}, process state {rank.process_state}"
        f"{f'; it {suspect.evidence}' if suspect.evidence and not rank.in_collective else ''}"
    )


def stop_of(rank: RankStatus) -> str:
    """Format the stop of a worker, or of a process that it represents, as text."""
    pids = ", ".join(str(one.pid) for one in rank.speaks_for if one.process_state in STOPPED_STATES)
    if rank.process_state in STOPPED_STATES or not pids:
        return "was stopped (process state T)"
    return f"represents process {pids}, which was stopped (process state T)"
