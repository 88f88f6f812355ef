"""Ranks responsible for a hang: a pure rule over the states of all ranks.

Recovery does not need it, because all workers are restarted anyway. It is for the reader of the incident, and for the
exclusion of a node.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlhf_core.diagnosis.hangs.liveness import stop_of
from rlhf_core.diagnosis.hangs.waits import GroupWait, find_circle, find_culprits, find_disagreement, find_waits
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.text.formatting import listed

MAX_DESCRIBED = 8
"""Maximum number of ranks described in a sentence: it is printed, stored and shown on pages, and may concern hundreds
of ranks."""


@dataclass(frozen=True)
class HangVerdict:
    """Verdict on a hang, from the states of all ranks: evidence that decides the failure once the workers are
    killed."""

    kind: FailureKind
    """``HANG`` if a rank is at a standstill by itself, ``COLLECTIVE_HANG`` if all of them wait for each other."""
    ranks: tuple[int, ...]
    """Responsible ranks; empty if no single rank is."""
    reason: str
    """Evidence for it, in a sentence."""
    collective: str = ""
    """The collective that others wait in or that ranks disagree about; empty if unknown."""
    collective_sequence: int | None = None
    """Number of that collective in its process group."""
    is_undecided: bool = False
    """True if something else would look the same."""


def blame(
    ranks: Sequence[RankStatus],
    silent: Collection[int] = (),
    proven: Mapping[int, str] = MappingProxyType({}),
    ended: Collection[int] = (),
) -> HangVerdict:
    """Determine the responsible ranks. The first rule that applies decides.

    0. If there are ranks with a proven standstill, only they are responsible.
    1. A process that was stopped (state T) cannot do anything.
    2. Ranks that others wait for in a process group, directly or through others, and that wait for no other, by the
       flight recorders (:mod:`rlhf_core.diagnosis.hangs.waits`). If most ranks still wait in a collective that a few
       have left, as the root of a broadcast does early, no single rank is responsible.
    3. The ranks that have entered the fewest collectives keep the others waiting, with the same exception.
    4. A rank outside while others wait inside a collective keeps them waiting.
    5. Ranks with different operations or shapes for the same collective disagree, which is a bug in the code. Ranks
       that wait for each other in a circle probably do: a checkpoint made by another thread could look the same.
    6. No rank is in a collective: each silent rank is at a standstill by itself.
    7. All are in the same collective: the network, or ranks that disagree about it; no single rank is responsible.

    If no single rank is responsible while others have ended, those had fewer steps or batches than the ranks that wait.

    Args:
        ranks: All running workers of the role; at least one.
        silent: Ranks over their limit, for rule 6; by default, the one with the longest silence.
        proven: Ranks with a proven standstill, each with its proof.
        ended: Ranks that have ended with exit code 0.
    """
    verdict = _blame_proven(ranks, proven) or _blame(ranks, silent)
    if ended and verdict.kind is FailureKind.COLLECTIVE_HANG and not verdict.ranks:
        verdict = _blame_ended(ranks, ended)
    known = [rank for rank in ranks if rank.collective_sequence is not None]
    if verdict.collective or not known or {rank.rank for rank in ranks} <= {*verdict.ranks}:
        return verdict
    ((group, _),) = Counter(map(_newest_group, known)).most_common(1)  # numbers of others cannot be compared
    furthest = max((one for one in known if _newest_group(one) == group), key=lambda one: one.collective_sequence or 0)
    name, number = furthest.collective, furthest.collective_sequence
    reason = f"{verdict.reason}; the last collective that was entered is {name}, number {number}"
    return replace(verdict, reason=reason, collective=name, collective_sequence=number)


def disagreement(ranks: Sequence[RankStatus]) -> HangVerdict | None:
    """The verdict on ranks that all wait inside collectives, in one of them with different operations or shapes, by
    their flight recorders; None if they agree or one of them has no record."""
    found = find_disagreement(ranks) if all(rank.in_collective for rank in ranks) else None
    if found is None:
        return None
    described = [f"rank {rank} {operation}" for rank, operation in found.rarest_first]
    number = found.place.waits_in
    return HangVerdict(
        FailureKind.COLLECTIVE_MISMATCH,
        found.deviating,
        f"the ranks disagree about collective number {number} of {found.place.group}: "
        f"{listed(described, MAX_DESCRIBED, '; ')}",
        found.place.operation,
        number,
    )


def _blame_proven(ranks: Sequence[RankStatus], proven: Mapping[int, str]) -> HangVerdict | None:
    still = [rank for rank in ranks if rank.rank in proven]
    if not still:
        return None
    if all(rank.in_collective and not rank.is_stopped for rank in still):
        return disagreement(ranks)
    described = [_describe([rank], proven[rank.rank]) for rank in still]
    return HangVerdict(FailureKind.HANG, _numbers(still), listed(described, MAX_DESCRIBED, "; "))


def _blame(ranks: Sequence[RankStatus], silent: Collection[int]) -> HangVerdict:
    stopped = [rank for rank in ranks if rank.is_stopped]
    if stopped:
        described = [_describe([rank], stop_of(rank)) for rank in stopped]
        return HangVerdict(FailureKind.HANG, _numbers(stopped), listed(described, MAX_DESCRIBED, "; "))
    waits = find_waits(ranks)
    found = _blame_awaited(ranks, waits) or _blame_behind(ranks)
    if found is not None:
        return found
    furthest = max(rank.collectives for rank in ranks)
    outside = [rank for rank in ranks if not rank.in_collective]
    if outside and len(outside) < len(ranks):
        what = f"is not in collective {furthest} that others wait in"
        return HangVerdict(FailureKind.HANG, _numbers(outside), _describe(outside, what))
    found = disagreement(ranks) or _blame_circle(waits)
    if found is not None:
        return found
    if outside:
        oldest = max(ranks, key=lambda rank: rank.age_s)
        still = [rank for rank in ranks if rank.rank in silent] or [oldest]
        return HangVerdict(
            FailureKind.HANG, _numbers(still), _describe(still, "is at a standstill outside any collective")
        )
    return HangVerdict(
        FailureKind.COLLECTIVE_HANG,
        (),
        f"all {len(ranks)} ranks wait in collective {furthest}: the network, or ranks that disagree about it; "
        f"no single rank is responsible",
    )


def _blame_ended(ranks: Sequence[RankStatus], ended: Collection[int]) -> HangVerdict:
    """Verdict on ranks that ended while others wait. A broken network that holds the others in the last collective of
    all looks the same."""
    named = listed([f"rank {rank}" for rank in sorted(ended)], MAX_DESCRIBED, ", ")
    return HangVerdict(
        FailureKind.COLLECTIVE_MISMATCH,
        tuple(sorted(ended)),
        f"{named} ended with exit code 0 while {len(ranks)} others wait in collective "
        f"{max(rank.collectives for rank in ranks)}: their steps or batches are fewer than those of the others",
        is_undecided=True,
    )


def _blame_awaited(ranks: Sequence[RankStatus], waits: Sequence[GroupWait]) -> HangVerdict | None:
    """Verdict on the ranks that others wait for in process groups; None if there are none."""
    culprits = find_culprits(waits)
    awaited = [rank for rank in ranks if rank.rank in culprits]
    if not awaited:
        return None
    described = []
    for rank in awaited:
        wait = next(one for one in waits if rank.rank in one.missing)
        described.append(_describe([rank], f"has not entered {wait.what}, in which rank {wait.rank} waits for it"))
    verdict = _blame_late(
        ranks,
        awaited,
        "wait in collectives that all members of their groups have entered",
        listed(described, MAX_DESCRIBED, "; "),
    )
    first = next((one for one in waits if not one.is_for_peer and {*one.missing} & {*culprits}), None)
    if first is None:
        return verdict
    return replace(verdict, collective=first.place.operation, collective_sequence=first.place.waits_in)


def _blame_circle(waits: Sequence[GroupWait]) -> HangVerdict | None:
    """Verdict on ranks that wait for each other in collectives of different groups; None if none do."""
    circle = find_circle(waits)
    if not circle:
        return None
    pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
    described = [f"rank {one.rank} waits in {one.what}, for rank {other.rank}" for one, other in pairs]
    return HangVerdict(
        FailureKind.COLLECTIVE_MISMATCH,
        (),
        "ranks wait for each other in a circle, as if they entered collectives in different orders: "
        f"{listed(described, MAX_DESCRIBED, '; ')}",
        circle[0].place.operation,
        circle[0].place.waits_in,
        is_undecided=True,
    )


def _blame_behind(ranks: Sequence[RankStatus]) -> HangVerdict | None:
    """Verdict on the ranks that have entered the fewest collectives; None if all have entered as many.

    Ranks between them and the furthest wait for them too: only the last ones are responsible.
    """
    fewest, most = min(rank.collectives for rank in ranks), max(rank.collectives for rank in ranks)
    behind = [rank for rank in ranks if rank.collectives == fewest]
    if fewest == most:
        return None
    described = _describe(behind, f"has not entered collective {most} that others wait in")
    return _blame_late(ranks, behind, f"wait in collective {fewest}, which the others have left", described)


def _blame_late(ranks: Sequence[RankStatus], late: Sequence[RankStatus], inside: str, described: str) -> HangVerdict:
    """Verdict on ranks that others wait for.

    Args:
        inside: What these ranks do if they are inside collectives, for a sentence that begins with them.
        described: What each of them has not done.
    """
    are_inside = all(rank.in_collective for rank in late)
    if are_inside and len(late) > len(ranks) / 2:
        return HangVerdict(
            FailureKind.COLLECTIVE_HANG,
            (),
            f"{len(late)} of {len(ranks)} ranks {inside}: the network, or ranks that disagree about it; no single rank "
            "is responsible",
        )
    kind = FailureKind.COLLECTIVE_HANG if are_inside else FailureKind.HANG
    return HangVerdict(kind, _numbers(late), described)


def _newest_group(rank: RankStatus) -> str:
    """Group of the collective that a rank has entered last; empty if it is unknown."""
    return next((place.name for place in rank.process_groups if place.entered), "")


def _numbers(ranks: Sequence[RankStatus]) -> tuple[int, ...]:
    return tuple(sorted(rank.rank for rank in ranks))


def _describe(ranks: Sequence[RankStatus], what: str) -> str:
    described = [
        f"rank {rank.rank} {what}, silent for {rank.age_s:.1f} s in phase {rank.phase} at step {rank.step}"
        + (", blocked in the kernel (state D)" if rank.process_state == "D" else "")
        for rank in sorted(ranks, key=lambda rank: rank.rank)
    ]
    return listed(described, MAX_DESCRIBED, "; ")
