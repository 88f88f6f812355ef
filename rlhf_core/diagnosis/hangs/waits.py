"""Ranks that wait for each other in process groups, from the flight recorders of all ranks.

A rank that has entered a collective and not left it waits for all members of the group that have not entered it, and
in a send or receive for its peer. These waits form a graph: with tensor, pipeline and data parallel groups, a rank that
hangs keeps some ranks waiting directly, and others through them. The ranks at the ends of the graph keep all others
waiting. If it has no ends, ranks wait for each other in a circle: they enter the collectives of different groups in
different orders, or some skip one.

Torch's own analysis of flight recorders (``torch.distributed.flight_recorder``) compares collectives group by group.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.schemas.reports import GroupPlace, RankStatus


@dataclass(frozen=True)
class GroupWait:
    """A wait of one rank for others, in one process group."""

    rank: int
    place: GroupPlace
    missing: tuple[int, ...]
    """Ranks that it waits for, in ascending order."""
    is_for_peer: bool = False
    """True in a send or receive, False in a collective."""

    @property
    def what(self) -> str:
        """The collective with its number and group, in words."""
        if self.is_for_peer:
            return f"a send or receive in {self.place.group}"
        return f"{self.place.operation}, number {self.place.waits_in} of {self.place.group}"


@dataclass(frozen=True)
class Disagreement:
    """Different operations or shapes of the members of a group, in the same collective."""

    place: GroupPlace
    operations: dict[int, str]
    """Operation by rank, with its shape if all ranks must have the same."""

    @property
    def deviating(self) -> tuple[int, ...]:
        """Ranks that differ from most others; empty if it is unknown which are right."""
        ((common, number),) = Counter(self.operations.values()).most_common(1)
        if number <= len(self.operations) / 2:
            return ()
        return tuple(sorted(rank for rank, operation in self.operations.items() if operation != common))

    @property
    def rarest_first(self) -> list[tuple[int, str]]:
        """Ranks and operations, those first that few ranks have."""
        counts = Counter(self.operations.values())
        return sorted(self.operations.items(), key=lambda pair: (counts[pair[1]], pair[0]))


_OF_ONE_SHAPE = ("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base", "gloo:all_gather")
"""Suffixes of collectives that require the same shape on all ranks. NCCL's ``all_gather`` does not: torch replaces one
with uneven shapes by broadcasts."""


def find_waits(ranks: Sequence[RankStatus]) -> list[GroupWait]:
    """Find all waits of ranks for others.

    A rank without a flight recorder is waited for if it is outside all collectives and no other is missing.
    """
    statuses = {rank.rank: rank for rank in ranks}
    missing: dict[tuple[object, ...], tuple[int, ...]] = {}  # once for all of the thousands that wait in a collective
    found = []
    for rank in ranks:
        for place in rank.process_groups:
            if place.waits_in is not None:
                collective = place.name, place.backend, place.waits_in, place.members
                if collective not in missing:
                    missing[collective] = _missing(place, place.waits_in, statuses)
                found.append(GroupWait(rank.rank, place, missing[collective]))
            found.append(GroupWait(rank.rank, place, _absent_peers(rank.rank, place, statuses), is_for_peer=True))
    return [wait for wait in found if wait.missing]


def find_culprits(waits: Sequence[GroupWait]) -> tuple[int, ...]:
    """Ranks that others wait for and that wait for no other; empty if there are only circles.

    Sends and receives count only if there are culprits with them: a rank may have begun one before it hung.
    """
    return _ends(waits) or _ends(_in_collectives(waits))


def find_circle(waits: Sequence[GroupWait]) -> list[GroupWait]:
    """Waits in collectives of ranks that wait for each other in a circle, beginning with the lowest of these; empty if
    there is none. There must be no culprits."""
    of_rank = {wait.rank: wait for wait in reversed(_in_collectives(waits))}
    if not of_rank:
        return []
    path = [min(of_rank)]
    while path[-1] not in path[:-1]:
        path.append(of_rank[path[-1]].missing[0])
    circle = path[path.index(path[-1]) : -1]
    start = circle.index(min(circle))
    return [of_rank[rank] for rank in circle[start:] + circle[:start]]


def find_disagreement(ranks: Sequence[RankStatus]) -> Disagreement | None:
    """Find a group all of whose members wait in the same collective with different operations or shapes; None if there
    is none."""
    waiting: dict[tuple[str, str], dict[int, GroupPlace]] = {}
    for rank in ranks:
        for place in rank.process_groups:
            if place.waits_in is not None:
                waiting.setdefault((place.name, place.backend), {})[rank.rank] = place
    for places in waiting.values():
        one = next(iter(places.values()))
        operations = {rank: _operation(place) for rank, place in places.items()}
        has_all = {*(one.members or (rank.rank for rank in ranks))} <= {*places}
        is_same = len({place.waits_in for place in places.values()}) == 1
        if has_all and is_same and len(set(operations.values())) > 1:
            return Disagreement(one, operations)
    return None


def _in_collectives(waits: Sequence[GroupWait]) -> list[GroupWait]:
    return [wait for wait in waits if not wait.is_for_peer]


def _ends(waits: Sequence[GroupWait]) -> tuple[int, ...]:
    return tuple(sorted({rank for wait in waits for rank in wait.missing} - {wait.rank for wait in waits}))


def _missing(place: GroupPlace, number: int, statuses: Mapping[int, RankStatus]) -> tuple[int, ...]:
    """Members that have not entered a collective of the group that others wait in."""
    members = [statuses[member] for member in place.members or statuses if member in statuses]
    entered = {one.rank: _entered(one, place) for one in members if one.process_groups}
    behind = [rank for rank, last in entered.items() if last is not None and last < number]
    return tuple(sorted(behind or [one.rank for one in members if not one.process_groups and not one.in_collective]))


def _entered(status: RankStatus, place: GroupPlace) -> int | None:
    """Number of the last collective of a group that a rank has entered; None if its recorder no longer tells."""
    for own in status.process_groups:
        if own.name == place.name and own.backend in (place.backend, ""):
            return own.entered
    return None


def _absent_peers(rank: int, place: GroupPlace, statuses: Mapping[int, RankStatus]) -> tuple[int, ...]:
    """Peers of a pending send or receive that do not take part: two that wait for each other have met."""
    others = [statuses[peer] for peer in place.peers if peer in statuses]
    return tuple(sorted(one.rank for one in others if all(rank not in own.peers for own in one.process_groups)))


def _operation(place: GroupPlace) -> str:
    return f"{place.operation} {place.shape}" if place.operation.endswith(_OF_ONE_SHAPE) else place.operation
