"""Proof that a worker is at a standstill: a pure rule over several inspections of all workers.

Silence proves nothing before the floors have passed: a worker may compute, compile, or wait for a reward service. Three
states can be proven much earlier.

- *Stopped*: the process is stopped by a signal (state T) in every inspection.
- *Blocked for good*: nothing of it moved between the inspections, and everything that could wake its main thread is
  itself blocked for good. The main thread waits for a lock of its own process without a timeout, so only another thread
  of that process could wake it, and all of those wait in the same way; or it waits for a connection to a peer, and
  nothing in any peer could send. Meanwhile peers wait in a collective that it has not entered.
- *Disagreement*: all wait inside a collective, and their flight recorders show different operations or shapes for it.

The long floor remains for everything that moves, waits for time or for something outside the job, or cannot be read. A
lock with a timeout, a sleep, a pipe, a child process, state D: all of these may end by themselves.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.diagnosis.hangs.liveness import Suspect, stop_of
from rlhf_core.diagnosis.hangs.verdict import disagreement
from rlhf_core.schemas.inspections import Inspection, Wait
from rlhf_core.schemas.reports import RankStatus

MIN_INSPECTIONS = 3
SPAN_S = 4.0
"""Minimum time from the first inspection of a proof to the last, in seconds."""

Place = tuple[str, int]
"""Node and local rank."""


class Standstill:
    """Inspections of each worker since it last moved."""

    def __init__(self) -> None:
        self._inspections: dict[Place, list[Inspection]] = {}

    def add(self, inspections: Collection[Inspection]) -> None:
        """Add one inspection of all workers."""
        new: dict[Place, list[Inspection]] = {}
        for inspection in inspections:
            before = self._inspections.get(_place(inspection), [])
            same = bool(before) and not movement(before[-1], inspection)
            # If nothing has moved, the first and the last inspections suffice.
            new[_place(inspection)] = (
                [*before[:1], *before[1:][-MIN_INSPECTIONS:], inspection] if same else [inspection]
            )
        self._inspections = new

    def clear(self) -> None:
        """Forget all inspections, because the watcher itself was paused or the workers were replaced."""
        self._inspections.clear()

    @property
    def still(self) -> dict[Place, Sequence[Inspection]]:
        """Inspections of each worker since it last moved, newest last."""
        return dict(self._inspections)


def movement(before: Inspection, after: Inspection) -> str:
    """Describe the movement between two inspections of a worker; empty if there is none."""
    if before.status.pid != after.status.pid:
        return "another process"
    if before.status.sequence != after.status.sequence:
        return "a beat"
    if after.status.in_collective and after.status.collective_sequence is not None:
        return ""  # it has answered a query about its collectives meanwhile, which took processor time
    if before.main is Wait.STOPPED and after.main is Wait.STOPPED:
        return ""
    moved = {
        "processor time": (before.cpu_ticks, after.cpu_ticks),
        "context switches": (before.switches, after.switches),
        "processor time of child processes": (before.child_cpu_ticks, after.child_cpu_ticks),
        "child processes": (before.num_children, after.num_children),
        "reading or writing": (before.io, after.io),
        "what its threads wait for": ((before.main, before.others), (after.main, after.others)),
    }
    return next((name for name, (one, other) in moved.items() if one != other), "")


def prove(still: Mapping[Place, Sequence[Inspection]], suspects: Collection[Suspect], num_ranks: int) -> list[Suspect]:
    """The suspects with a proven standstill, with the evidence; empty while the floors decide.

    Args:
        still: Inspections of each worker since it last moved.
        suspects: Workers that have been silent for longer than usual.
        num_ranks: Number of all workers; if some could not be inspected, only a stopped process is proof.
    """
    found = []
    job = _Job.of(still)
    for one in suspects:
        inspections = still.get((one.status.node, one.status.local_rank), ())
        evidence = _evidence(inspections, job, num_ranks) if _is_long(inspections) else ""
        if evidence:
            found.append(Suspect(one.status, one.limit_s, evidence))
    if found or len(suspects) < num_ranks or len(still) < num_ranks or not all(map(_is_long, still.values())):
        return found
    verdict = disagreement([inspections[-1].status for inspections in still.values()])
    return [Suspect(one.status, one.limit_s, verdict.reason) for one in suspects] if verdict is not None else []


def is_promising(still: Mapping[Place, Sequence[Inspection]], suspects: Collection[Suspect]) -> bool:
    """True if another inspection soon may complete a proof."""
    found = [still.get((one.status.node, one.status.local_rank), ()) for one in suspects]
    newest = [inspections[-1] for inspections in found if inspections and not _is_long(inspections)]
    return any(one.main is Wait.STOPPED or one.status.in_collective or _is_asleep(one) for one in newest)


def confirm(proven: Collection[Suspect], ranks: Sequence[RankStatus]) -> list[Suspect]:
    """Keep the proven suspects that a new reading shows unmoved; drop those without evidence."""
    now = {_mark(rank): rank for rank in ranks}
    return [
        Suspect(now[_mark(one.status)], one.limit_s, one.evidence)
        for one in proven
        if one.evidence and _mark(one.status) in now
    ]


def _mark(rank: RankStatus) -> tuple[str, int, int, bool]:
    return rank.node, rank.pid, rank.sequence, rank.is_stopped


def _is_long(inspections: Sequence[Inspection]) -> bool:
    return len(inspections) >= MIN_INSPECTIONS and inspections[-1].at_s - inspections[0].at_s >= SPAN_S


@dataclass(frozen=True)
class _Job:
    """Findings about all workers, made once: each of hundreds of suspects is judged by them."""

    newest: Sequence[Inspection]
    """Newest inspection of each worker."""
    is_quiet: bool
    """True if everything could be read in every inspection, and no data was in transit."""
    is_closed: bool
    """True if nothing in the job can send any more."""

    @classmethod
    def of(cls, still: Mapping[Place, Sequence[Inspection]]) -> "_Job":
        is_quiet = not any(one.problem or one.unsent_bytes for kept in still.values() for one in kept)
        return cls([kept[-1] for kept in still.values()], is_quiet, _is_closed(still))


def _evidence(inspections: Sequence[Inspection], job: _Job, num_ranks: int) -> str:
    """Proof that a worker is blocked for good; empty if there is none."""
    newest, seconds = inspections[-1], inspections[-1].at_s - inspections[0].at_s
    duration = f"in {len(inspections)} inspections over {seconds:.1f} s"
    if all(one.main is Wait.STOPPED for one in inspections):
        return f"{stop_of(newest.status)} {duration}"
    if newest.status.in_collective or not _is_waited_for(newest, job.newest) or not all(map(_is_asleep, inspections)):
        return ""
    # Something that could not be read, or data in transit, may still wake it.
    if len(job.newest) < num_ranks or not job.is_quiet:
        return ""
    if newest.awaited and not job.is_closed:
        return ""
    return (
        f"has not entered a collective that others wait in: it waits for {newest.detail}, which nothing in the job can "
        "end; processor, disk and network were idle "
        f"{duration}"
    )


def _is_waited_for(inspection: Inspection, newest: Sequence[Inspection]) -> bool:
    """Return True if peers wait in a collective that this worker has not entered, or if it has no peers."""
    others = [one.status for one in newest if one is not inspection]
    entered = inspection.status.collectives
    return not others or any(one.in_collective and one.collectives > entered for one in others)


def _is_asleep(inspection: Inspection) -> bool:
    """Return True if only a peer can wake any of its threads."""
    if inspection.uses_gpu and inspection.gpu_percent != 0.0:
        return False
    return {inspection.main, *inspection.others} <= {Wait.LOCK, Wait.CONNECTION}


def _is_closed(still: Mapping[Place, Sequence[Inspection]]) -> bool:
    """Return True if nothing in the job can send any more: every worker is idle, inside a collective or asleep, and
    waits only for connections within the job."""
    newest = [inspections[-1] for inspections in still.values()]
    job = {connection for one in newest for connection in one.connections}
    return all(map(_is_long, still.values())) and all(_can_only_wait(one) and set(one.awaited) <= job for one in newest)


def _can_only_wait(inspection: Inspection) -> bool:
    if not inspection.status.in_collective:
        return _is_asleep(inspection)
    # The main thread waits for its peers inside the collective, whatever the kind of wait.
    return set(inspection.others) <= {Wait.LOCK, Wait.CONNECTION, Wait.COLLECTIVE}


def _place(inspection: Inspection) -> Place:
    return inspection.status.node, inspection.status.local_rank
