"""Ranks responsible for a hang: a pure rule over the states of all ranks.

Recovery does not need it, because all workers are restarted anyway. It is for the reader of the incident, and for the
exclusion of a node.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlhf_core.diagnosis.hangs.liveness import stop_of
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
    2. The ranks that have entered the fewest collectives keep the others waiting. If most ranks still wait in a
       collective that a few have left, as the root of a broadcast does early, no single rank is responsible.
    3. A rank outside while others wait inside a collective keeps them waiting.
    4. No rank is in a collective: each silent rank is at a standstill by itself.
    5. All are in the same collective: the network, or ranks that disagree about it; no single rank is responsible.

    If no single rank is responsible while others have ended, those had fewer steps or batches than the ranks that wait.

    Before rules 4 and 5, the flight recorders are compared if all ranks have one: rule 2 applies to their collective
    numbers, and ranks with different operations or shapes for the same number disagree, which is a bug in the code.

    Args:
        ranks: All running workers of the role; at least one.
        silent: Ranks over their limit, for rule 4; by default, the one with the longest silence.
        proven: Ranks with a proven standstill, each with its proof.
        ended: Ranks that have ended with exit code 0.
    """
    verdict = _blame_proven(ranks, proven) or _blame(ranks, silent)
    if ended and verdict.kind is FailureKind.COLLECTIVE_HANG and not verdict.ranks:
        verdict = _blame_ended(ranks, ended)
    known = [rank for rank in ranks if rank.collective_sequence is not None]
    if not known or {rank.rank for rank in ranks} <= {*verdict.ranks}:
        return verdict
    furthest = max(known, key=lambda rank: rank.collective_sequence or 0)
    name, number = furthest.collective, furthest.collective_sequence
    reason = f"{verdict.reason}; the last collective that was entered is {name}, number {number}"
    return replace(verdict, reason=reason, collective=name, collective_sequence=number)


def disagreement(ranks: Sequence[RankStatus]) -> HangVerdict | None:
    """The verdict on ranks that all wait inside a collective with different operations or shapes, by their flight
    recorders; None if they agree or one of them has no record."""
    found = _blame_by_recorders(ranks) if all(rank.in_collective for rank in ranks) else None
    return found if found is not None and found.kind is FailureKind.COLLECTIVE_MISMATCH else None


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
    furthest = max(rank.collectives for rank in ranks)
    behind = _blame_behind(
        ranks,
        [rank.collectives for rank in ranks],
        f"has not entered collective {furthest} that others wait in",
    )
    if behind is not None:
        return behind
    outside = [rank for rank in ranks if not rank.in_collective]
    if outside and len(outside) < len(ranks):
        what = f"is not in collective {furthest} that others wait in"
        return HangVerdict(FailureKind.HANG, _numbers(outside), _describe(outside, what))
    recorded = _blame_by_recorders(ranks)
    if recorded is not None:
        return recorded
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


def _blame_behind(ranks: Sequence[RankStatus], numbers: Sequence[int], what: str) -> HangVerdict | None:
    """Verdict on the ranks that have entered the fewest collectives; None if all have entered as many.

    Ranks between them and the furthest wait for them too: only the last ones are responsible.
    """
    fewest = min(numbers)
    behind = [rank for rank, number in zip(ranks, numbers, strict=True) if number == fewest]
    if len(behind) == len(ranks):
        return None
    inside = all(rank.in_collective for rank in behind)
    if inside and len(behind) > len(ranks) / 2:
        return HangVerdict(
            FailureKind.COLLECTIVE_HANG,
            (),
            f"{len(behind)} of {len(ranks)} ranks wait in collective {fewest}, which the others have left: the "
            "network, or ranks that disagree about it; no single rank is responsible",
        )
    kind = FailureKind.COLLECTIVE_HANG if inside else FailureKind.HANG
    return HangVerdict(kind, _numbers(behind), _describe(behind, what))


def _blame_by_recorders(ranks: Sequence[RankStatus]) -> HangVerdict | None:
    """Verdict from the flight recorders of all ranks; None if one is missing or they agree."""
    numbers = [rank.collective_sequence for rank in ranks if rank.collective_sequence is not None]
    if len(numbers) < len(ranks):
        return None
    furthest = max(numbers)
    what = f"has not entered collective number {furthest} of its process group that others are at"
    behind = _blame_behind(ranks, numbers, what)
    if behind is not None:
        return behind
    if not all(rank.in_collective for rank in ranks):
        return None
    operations = [_operation(rank) for rank in ranks]
    counts = Counter(operations)
    if len(counts) == 1:
        return None
    # If most agree, the others are responsible; otherwise it is unknown which are right.
    ((common, number),) = counts.most_common(1)
    most = common if number > len(ranks) / 2 else None
    deviating = [rank for rank, what in zip(ranks, operations, strict=True) if most is not None and what != most]
    rarest_first = sorted(zip(ranks, operations, strict=True), key=lambda pair: counts[pair[1]])
    described = listed([f"rank {rank.rank} {what}" for rank, what in rarest_first], MAX_DESCRIBED, "; ")
    reason = f"the ranks disagree about collective number {furthest}: {described}"
    return HangVerdict(FailureKind.COLLECTIVE_MISMATCH, _numbers(deviating), reason)


_OF_ONE_SHAPE = ("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base", "gloo:all_gather")
"""Suffixes of collectives that require the same shape on all ranks. NCCL's ``all_gather`` does not: torch replaces one
with uneven shapes by broadcasts."""


def _operation(rank: RankStatus) -> str:
    """The operation of a rank, with its shape if all ranks must have the same."""
    return f"{rank.collective} {rank.collective_shape}" if rank.collective.endswith(_OF_ONE_SHAPE) else rank.collective


def _numbers(ranks: Sequence[RankStatus]) -> tuple[int, ...]:
    return tuple(sorted(rank.rank for rank in ranks))


def _describe(ranks: Sequence[RankStatus], what: str) -> str:
    described = [
        f"rank {rank.rank} {what}, silent for {rank.age_s:.1f} s in phase {rank.phase} at step {rank.step}"
        + (", blocked in the kernel (state D)" if rank.process_state == "D" else "")
        for rank in sorted(ranks, key=lambda rank: rank.rank)
    ]
    return listed(described, MAX_DESCRIBED, "; ")
