"""Exit reports for one start of the workers: the workers' own outcomes, the agents' observations and the failure.

Every agent reports for its own node; agent 0 combines the reports.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from rlhf_core.diagnosis.classify import Evidence, WorkerEnd, classify, is_unfit_checkpoint
from rlhf_core.diagnosis.failure import Failure
from rlhf_core.files.whole import read_model
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.agent_messages import NodeEnd, WorkerReport
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import RankStatus, WorkerOutcome
from rlhf_core.worker import processes
from rlhf_core.worker.evidence.collection import log_tail, save_log_tails
from rlhf_core.worker.groups.base import Hang, Started, WorkerGroup
from rlhf_core.worker.worker_process import spare_outcome

Write = Callable[[Path, BaseModel], bool]
"""Writes an essential file; returns False if that fails."""


@dataclass(frozen=True)
class NodeReport:
    """The report of one node, with the offset of its clock from ours."""

    node: str
    end: NodeEnd
    ahead_s: float = 0.0
    """Seconds to add to its times to convert them to this node's clock."""


# ---------------------------------------------------------------------------------------------------------------------
# On every node


def report(group: WorkerGroup, problem: str, write: Write, workers: Iterable[int] | None = None) -> NodeEnd:
    """Report how workers of this node exited. Their log tails are saved unless all succeeded.

    Args:
        group: Their group.
        problem: Traceback of the error that prevented their start; empty if they were started.
        write: Writes out what workers left on the node because the disk was full.
        workers: Local ranks of the exited workers to report; None for the whole group.
    """
    wanted = list(range(group.num_workers) if workers is None else workers)
    outcomes = {index: _read_outcome(group, write, index) for index in wanted}
    started = [worker for local_rank, worker in group.workers.items() if local_rank in wanted]
    ends = tuple(_report_worker(group, worker, outcomes[worker.local_rank]) for worker in started)
    now = processes.oom_kills()
    before = min((worker.oom_kills_before for worker in started), default=now)
    end = NodeEnd(num_workers=len(wanted), workers=ends, problem=problem, oom_kills=max(0, now - before))
    if is_well(end):
        return end
    logs = {index: group.folder(index).log(group.role, group.seat.node, index) for index in wanted}
    for index, log in logs.items():
        save_log_tails({index: log}, group.folder(index).evidence_dir, group.seat.node)
    with_tails = tuple(one.model_copy(update={"log_tail": log_tail(logs[one.local_rank])}) for one in ends)
    return end.model_copy(update={"workers": with_tails})


def _read_outcome(group: WorkerGroup, write: Write, local_rank: int) -> WorkerOutcome | None:
    """A worker's own outcome; one that it left on the node, because the disk was full, is written out."""
    path, spare = group.outcome_path(local_rank), spare_outcome(group.seat.slots.path, local_rank)
    outcome = read_model(path, WorkerOutcome)
    if outcome is None:
        outcome = read_model(spare, WorkerOutcome)
        if outcome is not None:
            write(path, outcome)
    spare.unlink(missing_ok=True)
    return outcome


def _report_worker(group: WorkerGroup, worker: Started, outcome: WorkerOutcome | None) -> WorkerReport:
    end = group.exits.get(worker.local_rank)
    return WorkerReport(
        rank=worker.rank,
        local_rank=worker.local_rank,
        code=end.code if end is not None else None,
        by_agent=end is None or end.by_agent,
        ended_s=end.wall_s if end is not None else 0.0,
        last=end.last if end is not None else None,
        outcome=outcome,
    )


# ---------------------------------------------------------------------------------------------------------------------
# On agent 0


def is_well(end: NodeEnd) -> bool:
    """True if every worker exited by itself with code 0 and reported success."""
    return (
        not end.problem
        and len(end.workers) == end.num_workers
        and all(worker.code == 0 and worker.outcome is not None and worker.outcome.ok for worker in end.workers)
    )


def explain(reports: Iterable[NodeReport], hang: Hang | None, resumed_from: CheckpointDir | None = None) -> Failure:
    """Diagnose the failure from the reports of all nodes.

    Args:
        reports: Reports of all nodes, at least one.
        hang: The hang for which the workers were killed, if any.
        resumed_from: Checkpoint that an external trainer was told to resume from: its workers exit as its ranks did,
            and do not name one that it could not load.
    """
    reports = list(reports)
    ends = [(one, worker) for one in reports for worker in one.end.workers]
    # Workers that have not exited come last.
    ends.sort(key=lambda pair: pair[1].ended_s + pair[0].ahead_s if pair[1].code is not None else float("inf"))
    failure = classify(
        Evidence(
            workers=tuple(
                WorkerEnd(worker, one.node, order, one.end.oom_kills) for order, (one, worker) in enumerate(ends)
            ),
            verdict=hang.verdict if hang is not None else None,
            failed_starts=tuple((one.node, one.end.problem) for one in reports if one.end.problem),
        )
    )
    if hang is not None:
        return _located_hang(failure, hang)
    workers = [worker for _, worker in ends]
    failure = _located(failure, workers)
    # All ranks name the same checkpoint, and reach the same finding.
    outcomes = [worker.outcome for worker in workers if worker.outcome is not None]
    if failure.kind is FailureKind.CHECKPOINT_CORRUPT:
        # Neither the rank that read the checkpoint first nor its node is to blame.
        blameless = replace(failure, ranks=(), nodes=())
        damaged = next((one.damaged_checkpoint for one in outcomes if one.damaged_checkpoint), "")
        if not damaged and resumed_from is not None and not _has_trained(workers, resumed_from):
            return _not_loaded(blameless, resumed_from, sum(one.end.num_workers for one in reports))
        return replace(blameless, damaged_checkpoint=damaged)
    if failure.kind is FailureKind.DEGENERATE_RL:
        return replace(failure, health_rule=next((one.health_rule for one in outcomes if one.health_rule), ""))
    return failure


def _has_trained(workers: Iterable[WorkerReport], checkpoint: CheckpointDir) -> bool:
    """True if some worker saw a step after that of the checkpoint."""
    return any(worker.last.step > checkpoint.step for worker in workers if worker.last is not None)


def _not_loaded(failure: Failure, checkpoint: CheckpointDir, num_ranks: int) -> Failure:
    """The failure of an external trainer that could not load a checkpoint; an older one replaces it if that helps."""
    name, manifest = checkpoint.root.name, checkpoint.manifest()
    is_of_other_ranks = manifest is not None and manifest.num_ranks != num_ranks
    is_unfit = is_unfit_checkpoint(failure, is_of_other_ranks=is_of_other_ranks)
    what = f"The trainer could not load {name}"
    if is_unfit:
        what += (
            ", which was saved with other settings, and an older checkpoint would fit as little. Resume with the "
            "model, optimizer and number of ranks that it was saved with"
        )
    message = f"{failure.message.rstrip('.')}. {what}"
    return replace(failure, message=message, damaged_checkpoint="" if is_unfit else name)


def _located_hang(failure: Failure, hang: Hang) -> Failure:
    first = next((rank for rank in hang.ranks if rank.rank in failure.ranks), hang.ranks[0])
    return replace(failure, phase=first.phase, step=first.step, detected_after_s=hang.silent_s)


def _located(failure: Failure, workers: list[WorkerReport]) -> Failure:
    seen = [worker for worker in workers if worker.last is not None]
    blamed = [worker for worker in seen if worker.rank in failure.ranks] or seen
    if not blamed:
        return failure
    first = blamed[0]
    last: RankStatus | WorkerOutcome | None = first.outcome or first.last  # its own outcome is newer
    assert last is not None
    assert first.last is not None
    return replace(failure, phase=last.phase, step=last.step, detected_after_s=first.last.age_s)
