"""How one start of the workers ended: what they wrote, what the agent saw, and what that comes to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from rlhf_core.diagnosis.classify import Diagnosis, Evidence, WorkerEnd, classify
from rlhf_core.run_dir import read_model
from rlhf_core.schemas.reports import WorkerOutcome
from rlhf_core.worker import evidence, processes
from rlhf_core.worker.watch import Started, Watch
from rlhf_core.worker.worker_process import spare_outcome

Outcomes = Mapping[int, WorkerOutcome]
"""What the workers wrote about themselves, by local rank."""


@dataclass(frozen=True)
class Failure:
    """A start of the workers that did not end well."""

    diagnosis: Diagnosis
    phase: str
    """Phase of the first rank to blame, or of the first to end; empty when there was none."""
    step: int | None
    detected_after_s: float | None
    """From its last beat until it was found, in seconds."""


def has_spoken(watch: Watch, node: str, local_rank: int) -> bool:
    """Whether a worker has written its outcome."""
    path = watch.restart_dir.worker_outcome(watch.role, node, local_rank)
    return path.exists() or spare_outcome(watch.slots.path, local_rank).exists()


def read_outcomes(watch: Watch, node: str, write: Callable[[Path, BaseModel], bool]) -> Outcomes:
    """What the workers wrote about themselves; what they left on the node, as the disk was full, is written by
    ``write``."""
    found = {}
    for index in range(watch.num_workers):
        path = watch.restart_dir.worker_outcome(watch.role, node, index)
        spare = spare_outcome(watch.slots.path, index)
        outcome = read_model(path, WorkerOutcome)
        if outcome is None:
            outcome = read_model(spare, WorkerOutcome)
            if outcome is not None:
                write(path, outcome)
        spare.unlink(missing_ok=True)
        if outcome is not None:
            found[index] = outcome
    return found


def all_well(watch: Watch, outcomes: Outcomes) -> bool:
    """Every worker has ended by itself with exit code 0, and has said that it did what it was there for."""
    return (
        watch.all_ended
        and all(end.code == 0 for end in watch.exits.values())
        and len(outcomes) == watch.num_workers
        and all(outcome.ok for outcome in outcomes.values())
    )


def explain(watch: Watch, node: str, outcomes: Outcomes, problem: str) -> Failure:
    """Save the ends of the logs, and say what went wrong.

    Args:
        watch: The workers, all ended.
        node: This node.
        outcomes: What they wrote.
        problem: Traceback of what kept them from being started; empty when they were.
    """
    if watch.hang is None:
        logs = {index: watch.restart_dir.log(watch.role, node, index) for index in range(watch.num_workers)}
        evidence.save_log_tails(logs, watch.restart_dir.incident_dir, node)
    diagnosis = classify(
        Evidence(
            workers=tuple(_worker_end(watch, node, worker, outcomes) for worker in watch.workers.values()),
            verdict=watch.hang.verdict if watch.hang is not None else None,
            agent_log=problem,
            oom_kills=max(0, processes.oom_kills() - watch.oom_kills_before),
        )
    )
    return _located(watch, diagnosis, outcomes)


def _worker_end(watch: Watch, node: str, worker: Started, outcomes: Outcomes) -> WorkerEnd:
    end = watch.exits.get(worker.local_rank)
    return WorkerEnd(
        rank=worker.rank,
        node=node,
        local_rank=worker.local_rank,
        exit_code=end.code if end is not None else None,
        ended_by_agent=end is None or end.by_agent,
        order=end.order if end is not None else watch.num_workers,
        outcome=outcomes.get(worker.local_rank),
        log_tail=evidence.log_tail(watch.restart_dir.log(watch.role, node, worker.local_rank)),
    )


def _located(watch: Watch, diagnosis: Diagnosis, outcomes: Outcomes) -> Failure:
    if watch.hang is not None:
        seen = watch.hang.ranks
        first = next((rank for rank in seen if rank.rank in diagnosis.ranks), seen[0])
        return Failure(diagnosis, first.phase, first.step, watch.hang.silent_s)
    ends = sorted(watch.exits.items(), key=lambda item: item[1].order)
    blamed = [(index, end) for index, end in ends if end.last.rank in diagnosis.ranks] or ends
    if not blamed:
        return Failure(diagnosis, "", None, None)
    index, end = blamed[0]
    # What it wrote itself is newer than what its slot says.
    last = outcomes.get(index) or end.last
    return Failure(diagnosis, last.phase, last.step, end.last.age_s)
