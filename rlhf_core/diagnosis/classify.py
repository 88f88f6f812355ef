"""Classification of a failure from exit codes, outcomes, logs, the scheduler's state and the verdict on a hang.

One failure has many traces: a rank that dies breaks its peers' connections, and the agent ends the other workers. So
every worker's end is classified separately, and the most significant one decides: roots before symptoms before
cascades, and among equals the first to end. Logs are read by :mod:`rlhf_core.diagnosis.logs.search`.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.diagnosis.failure import Failure, fingerprint
from rlhf_core.diagnosis.hangs.verdict import HangVerdict
from rlhf_core.diagnosis.logs import search as log_diagnosis
from rlhf_core.diagnosis.logs.events import EvidencePart, FailureEvent
from rlhf_core.diagnosis.logs.signatures.training import MISSING_FILE_OF_RANK, UNFIT_CHECKPOINT
from rlhf_core.schemas.agent_messages import WorkerReport
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import WorkerOutcome
from rlhf_core.text.redaction import masked

SIGNAL_NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}
"""Names of the signals of Linux, by number, independent of the machine that reads them."""
_SENT_FROM_OUTSIDE = {1, 2, 9, 15}
_SEEN_BY_OTHERS = {FailureKind.COLLECTIVE_HANG, FailureKind.RENDEZVOUS, FailureKind.NETWORK}
"""Kinds whose symptoms are reported by the ranks that waited or lost a connection, not by the one at fault."""

SCHEDULER_STATES = {
    "NODE_FAIL": FailureKind.NODE_LOST,
    "BOOT_FAIL": FailureKind.NODE_LOST,
    "LAUNCH_FAILED": FailureKind.NODE_LOST,
    "RECONFIG_FAIL": FailureKind.NODE_LOST,
    "POWERED_OFF": FailureKind.PREEMPTION,
    "PREEMPTED": FailureKind.PREEMPTION,
    "REQUEUED": FailureKind.PREEMPTION,
    "TIMEOUT": FailureKind.TIME_LIMIT,
    "DEADLINE": FailureKind.TIME_LIMIT,
    "OUT_OF_MEMORY": FailureKind.HOST_OOM,
    "OUT_OF_ME": FailureKind.HOST_OOM,
    "CANCELLED": FailureKind.USER_CANCEL,
}
"""Kind of failure by the first word of the state of an ended job. ``OUT_OF_ME+`` is sacct's default abbreviation."""

_EMPTY_LOG = "its log is empty; errors from before it opened that are in the log of its agent (rlhf logs --role agent)"


@dataclass(frozen=True)
class WorkerEnd:
    """End of one worker: the report of its agent, and its place among the others."""

    report: WorkerReport
    node: str
    order: int = 0
    """Position in the order of ending, from 0."""
    oom_kills: int = 0
    """Number of processes that the kernel's OOM killer ended on its node while it ran."""


@dataclass(frozen=True)
class Evidence:
    """Evidence of the end of an attempt's workers, from which :func:`classify` concludes the failure."""

    workers: tuple[WorkerEnd, ...] = ()
    verdict: HangVerdict | None = None
    """Verdict on a hang. It decides, because the agent killed the workers for it."""
    scheduler_state: str = ""
    """State of the job in the scheduler, for instance ``NODE_FAIL`` or ``CANCELLED by 1000``; empty if there is
    none."""
    failed_starts: tuple[tuple[str, str], ...] = ()
    """Nodes whose agents could not run their workers, each with the traceback."""
    agent_log: str = ""
    """Last lines of the output of the agents and the scheduler's own steps."""
    agent_vanished: bool = False
    """True if the job is gone and its agent left no outcome."""


@dataclass(frozen=True)
class _Finding:
    """Possible cause, from one piece of evidence. The most significant finding becomes the failure."""

    kind: FailureKind
    part: EvidencePart
    text: str
    """Message of the failure."""
    subject: str
    """Text to compute the fingerprint from."""
    worker: WorkerEnd | None = None
    node: str = ""
    """Suspected node, if it is not the worker's."""
    is_undecided: bool = False
    """True if it rests on the text of a log, or of an error class that is not our own."""
    is_local: bool = False
    """True if it is about a device of the worker's node."""


def classify(evidence: Evidence) -> Failure:
    """Classify a failure: its kind, message and fingerprint, and the ranks and nodes to blame."""
    if evidence.verdict is not None:
        return _hang(evidence.verdict, evidence.workers)
    by_scheduler = _from_scheduler(evidence.scheduler_state)
    if by_scheduler is not None and by_scheduler.part is EvidencePart.ROOT:
        return _failure(by_scheduler)
    known = log_diagnosis.KnownLines()
    findings = [finding for worker in evidence.workers for finding in _from_worker(worker, known)]
    findings += [_from_start(node, trace) for node, trace in evidence.failed_starts]
    findings += _from_agents(evidence)
    findings += [by_scheduler] if by_scheduler is not None else []
    if not findings:
        return _failure(_without_findings(evidence))
    best = min(findings, key=_rank_of_finding)
    if best.kind in _SEEN_BY_OTHERS:  # the peers of a broken adapter often end before its own node
        local = [one for one in findings if one.is_local and one.part is best.part]
        best = min(local, key=_rank_of_finding, default=best)
    return _failure(best)


def read_log(text: str) -> Failure | None:
    """Diagnose a log; return None if it shows no failure.

    A failure without a known reason is ``UNKNOWN``. Warnings, successful retries, and errors after which training
    continued are not failures.
    """
    event = log_diagnosis.find(text)
    return _failure(_from_event(event)) if event is not None else None


def is_unfit_checkpoint(failure: Failure, *, is_of_other_ranks: bool) -> bool:
    """True if a checkpoint could not be loaded that is whole but was saved with other settings, as older ones were.

    Args:
        failure: Failure of a program that was to load it.
        is_of_other_ranks: Another number of ranks has saved it, so that a missing file of a rank is none of theirs.
    """
    phrases = [UNFIT_CHECKPOINT, *([MISSING_FILE_OF_RANK] if is_of_other_ranks else [])]
    is_of_checkpoint = failure.kind is FailureKind.CHECKPOINT_CORRUPT
    return is_of_checkpoint and any(one.search(failure.message) is not None for one in phrases)


def _rank_of_finding(finding: _Finding) -> tuple[int, int, int]:
    order = finding.worker.order if finding.worker is not None else 0
    return (finding.part, finding.kind is FailureKind.UNKNOWN, order)


def _failure(finding: _Finding) -> Failure:
    worker = finding.worker
    by_other = finding.part is EvidencePart.SYMPTOM and finding.kind in _SEEN_BY_OTHERS and not finding.is_local
    blamed = worker is not None and finding.part is not EvidencePart.CASCADE and not by_other
    node = finding.node or (worker.node if worker is not None and blamed else "")
    return Failure(
        kind=finding.kind,
        message=masked(finding.text),  # it is shown on pages, sent in messages and stored in the history
        fingerprint=fingerprint(finding.kind, finding.subject),
        ranks=(worker.report.rank,) if worker is not None and blamed and worker.report.rank >= 0 else (),
        nodes=(node,) if node else (),
        is_undecided=finding.is_undecided,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Hangs, and the state of the job


def _hang(verdict: HangVerdict, workers: Sequence[WorkerEnd]) -> Failure:
    nodes = {worker.node for worker in workers if worker.report.rank in verdict.ranks}
    others = {worker.node for worker in workers} - nodes
    if len(nodes) > 1 and not others:
        nodes = set()  # whatever stopped the ranks of every node, such as a file system, is not the fault of a node
    return Failure(
        kind=verdict.kind,
        message=f"The workers hung: {verdict.reason}.",
        fingerprint=fingerprint(verdict.kind, verdict.reason),
        ranks=verdict.ranks,
        nodes=tuple(sorted(nodes)),
        is_undecided=verdict.is_undecided,
        collective=verdict.collective,
        collective_sequence=verdict.collective_sequence,
    )


def _from_scheduler(state: str) -> _Finding | None:
    """Finding from the state of the job. FAILED and COMPLETED are not in the table, because other evidence explains
    them."""
    kind = SCHEDULER_STATES.get(re.split(r"[^A-Z_]", state.strip().upper(), maxsplit=1)[0])
    if kind is None:
        return None
    if kind is FailureKind.USER_CANCEL and re.search(r"\bby (0|root|slurm|another user)\b", state):
        kind = FailureKind.PREEMPTION  # not the user: an administrator, or the scheduler itself
    # A failure may have made the user cancel the job.
    part = EvidencePart.SYMPTOM if kind is FailureKind.USER_CANCEL else EvidencePart.ROOT
    return _Finding(kind, part, f"The scheduler ended the job: {state}.", kind)


def _from_start(node: str, trace: str) -> _Finding:
    """Finding from a start that failed on one node: the agents end all others for it, so it is a root."""
    event = log_diagnosis.find(trace)
    kind, line = (event.kind, event.line) if event is not None else (FailureKind.UNKNOWN, trace.strip())
    text = f"Workers could not be run on {node}: {line[:300]}"
    return _Finding(kind, EvidencePart.ROOT, text, line, node=node, is_undecided=True)


def _from_agents(evidence: Evidence) -> list[_Finding]:
    event = log_diagnosis.find(evidence.agent_log)
    if event is None:
        return []
    if event.kind is FailureKind.USER_CANCEL and evidence.scheduler_state.startswith("FAILED"):
        # Slurm also cancels a step of which a task has ended. A job that the user cancels is never FAILED.
        return []
    if evidence.agent_vanished and event.is_end:
        # The tasks of a job are its agents: if one ended without an outcome, srun reports the exit and the node.
        event = dataclasses.replace(event, kind=FailureKind.AGENT_KILLED)
    return [_from_event(event)]


def _from_event(event: FailureEvent) -> _Finding:
    text = f"The log says: {event.line[:300]}"
    return _Finding(event.kind, event.part, text, event.line, node=event.node, is_undecided=True)


def _without_findings(evidence: Evidence) -> _Finding:
    if evidence.agent_vanished:
        text = "The agent and its workers ended without an outcome or an explanation."
        return _Finding(FailureKind.AGENT_KILLED, EvidencePart.ROOT, text, "agent vanished")
    text = "It ended without an explanation: no outcome, no error in the logs."
    return _Finding(FailureKind.UNKNOWN, EvidencePart.ROOT, text, "nothing")


# ---------------------------------------------------------------------------------------------------------------------
# One worker


def _from_worker(worker: WorkerEnd, known: log_diagnosis.KnownLines) -> list[_Finding]:
    outcome, code = worker.report.outcome, worker.report.code
    if outcome is not None and not outcome.ok:
        return [_from_outcome(worker, outcome)]
    # The agent kills all workers after a failure, which is not evidence by itself.
    if worker.report.by_agent or code is None or (outcome is not None and code == 0):
        return []
    if code < 0:
        return [_from_signal(worker, -code, known)]
    return [_from_log(worker, f"ended with exit code {code} and wrote no outcome", known)]


def _from_outcome(worker: WorkerEnd, outcome: WorkerOutcome) -> _Finding:
    error = outcome.error_type.rpartition(".")[2]
    kind, part = _kind_of_error(outcome)
    first_line = outcome.message.strip().partition("\n")[0]
    subject = f"{error}|{first_line}|{_frames(outcome.traceback)}"
    if kind is FailureKind.DEGENERATE_RL:
        # All ranks detect it together, so no rank or node is suspected; the message names the cause.
        return _Finding(kind, part, first_line, subject)
    text = f"{_name(worker)} failed in phase {outcome.phase} at step {outcome.step}: {error}: {first_line}"
    return _Finding(kind, part, text, subject, worker, is_undecided=outcome.error_type not in ERRORS)


def _kind_of_error(outcome: WorkerOutcome) -> tuple[FailureKind, EvidencePart]:
    if outcome.error_type in ERRORS:
        return ERRORS[outcome.error_type], EvidencePart.ROOT
    event = log_diagnosis.find_error(outcome.error_type, outcome.message, outcome.traceback)
    if event.kind is not FailureKind.UNKNOWN:
        return event.kind, event.part
    if outcome.error_type == "builtins.TimeoutError":  # has no informative message in our workers
        return FailureKind.COLLECTIVE_HANG, EvidencePart.SYMPTOM
    return FailureKind.UNKNOWN, EvidencePart.SYMPTOM


def _from_signal(worker: WorkerEnd, number: int, known: log_diagnosis.KnownLines) -> _Finding:
    signal = SIGNAL_NAMES.get(number, f"signal {number}")
    if number == 9 and worker.oom_kills > 0:
        text = f"{_name(worker)} was killed by the kernel: the node, or the job's memory limit, ran out of main memory."
        return _Finding(FailureKind.HOST_OOM, EvidencePart.ROOT, text, "oom kill", worker)
    if number in _SENT_FROM_OUTSIDE:
        text = f"{_name(worker)} was ended by {signal}; no cause was found in the job."
        return _Finding(FailureKind.WORKER_KILLED, EvidencePart.ROOT, text, signal, worker)
    return _from_log(worker, f"was ended by {signal}", known)


def _from_log(worker: WorkerEnd, end: str, known: log_diagnosis.KnownLines) -> _Finding:
    log_tail = worker.report.log_tail
    event = log_diagnosis.find(log_tail, known=known)
    if event is None:
        last = next((line.strip() for line in reversed(log_tail.splitlines()) if line.strip()), "")
        last_line = f"the last line of its log: {last[:300]}" if last else _EMPTY_LOG
        text = f"{_name(worker)} {end}; {last_line}"
        return _Finding(FailureKind.UNKNOWN, EvidencePart.SYMPTOM, text, f"{end}|{last}", worker)
    # The last lines of this worker concern the worker itself, even if their kind is unknown.
    own = event.kind in (FailureKind.UNKNOWN, FailureKind.ENGINE)
    part = min(event.part, EvidencePart.SYMPTOM) if own else event.part
    text = f"{_name(worker)} {end}: {event.line[:300]}"
    return _Finding(event.kind, part, text, event.line, worker, is_undecided=True, is_local=event.is_local)


def _name(worker: WorkerEnd) -> str:
    report = worker.report
    rank = f"Rank {report.rank}" if report.rank >= 0 else "A worker without a rank yet"
    return f"{rank} (local rank {report.local_rank} on {worker.node})"


def _frames(traceback: str) -> str:
    """Names of the innermost functions, to distinguish faults with the same message."""
    return ">".join(re.findall(r", in (\S+)", traceback)[-3:])


# ---------------------------------------------------------------------------------------------------------------------
# Error classes


ERRORS = {
    "rlhf_core.errors.BadInput": FailureKind.CONFIG,
    "rlhf_core.errors.BadConfig": FailureKind.CONFIG,
    "rlhf_core.errors.RunDirError": FailureKind.CONFIG,
    "rlhf_core.errors.BadData": FailureKind.DATA,
    "rlhf_core.errors.CheckpointCorrupt": FailureKind.CHECKPOINT_CORRUPT,
    "rlhf_core.errors.ResumeMismatch": FailureKind.CHECKPOINT_CORRUPT,
    "rlhf_core.errors.MetricsMismatch": FailureKind.COLLECTIVE_MISMATCH,
    "rlhf_core.errors.RewardFailed": FailureKind.REWARD_FUNCTION,
    "rlhf_core.errors.ToolFailed": FailureKind.REWARD_FUNCTION,
    "rlhf_core.errors.DiskFull": FailureKind.DISK_FULL,
    "rlhf_core.errors.FileSystemStalled": FailureKind.FILE_SYSTEM,
    "rlhf_core.errors.NonFiniteLoss": FailureKind.NON_FINITE,
    "rlhf_core.errors.DegenerateRl": FailureKind.DEGENERATE_RL,
    "rlhf_core.errors.EnginesLost": FailureKind.ENGINE,
    "rlhf_core.errors.SamplingFailed": FailureKind.ENGINE,
    "rlhf_core.errors.StaleWeights": FailureKind.ENGINE,
    "rlhf_core.errors.WeightSyncFailed": FailureKind.ENGINE,
    "rlhf_core.errors.TrainerIncomplete": FailureKind.INCOMPLETE,
}
"""Kinds of our own error classes, all roots, by full name. Others: :mod:`rlhf_core.diagnosis.logs.exceptions`."""
