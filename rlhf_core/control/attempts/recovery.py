"""The end of an attempt: its final state, its diagnosis, and the decision whether the job is retried.

The decision itself is made by :mod:`rlhf_core.diagnosis.policy`; this module checks it against the caps of the run and
the available nodes, records it and acts on it.
"""

from dataclasses import replace

from rlhf_core.allocation.planner import shortages
from rlhf_core.control.attempts.jobs import end_job
from rlhf_core.control.attempts.planning import SIZE, next_size
from rlhf_core.control.controller import Controller
from rlhf_core.diagnosis import attempt_caps
from rlhf_core.errors import PreflightBlocked, RunCancelled, RunFailed, SchedulerError
from rlhf_core.files.whole import read_model
from rlhf_core.launch.journal import AttemptRecord
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState
from rlhf_core.schemas.attempts import AttemptState, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.failures import Action, Decision, FailureKind
from rlhf_core.schemas.journal import DecisionMade, IncidentFound
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.watchdog.attempt_failure import AttemptFailure, explain
from rlhf_core.watchdog.evidence import allocated_s
from rlhf_core.watchdog.watcher import AttemptSnapshot, AttemptVerdict


def conclude(controller: Controller, number: int) -> None:
    """Record how an attempt ended, decide what follows, and update the state of the run. Harmless if repeated.

    Raises:
        RunFailed: the decision is to stop.
        PreflightBlocked: likewise, because of the findings of the probe of the nodes.
        RunCancelled: the job was ended from outside.
        CancelRequested: a user asked to end the run.
    """
    journal = controller.journal
    attempt = journal.record.attempts[number]
    controller.await_directory()
    snapshot = _final_snapshot(controller, number, attempt)
    match snapshot.verdict.state:
        case AttemptState.COMPLETED:
            journal.move_attempt(number, AttemptState.COMPLETED, snapshot.verdict.cause or "every role succeeded")
            if journal.record.state in (RunState.QUEUED, RunState.TRAINING):
                journal.move_run(RunState.EVALUATING, f"training of attempt {number} is done")
            journal.move_run(RunState.COMPLETED, f"attempt {number} completed")
        case AttemptState.CANCELLED:
            journal.move_attempt(number, AttemptState.CANCELLED, snapshot.verdict.cause, FailureKind.USER_CANCEL)
            journal.move_run(RunState.CANCELLED, snapshot.verdict.cause or "its job was cancelled")
            controller.record()
            raise RunCancelled(f"run {controller.run_dir.run_id} was cancelled: {snapshot.verdict.cause}")
        case _:
            # A job that was ended on request has not failed, whatever its agents and its scheduler report.
            controller.raise_if_cancelled()
            _after_failure(controller, number, attempt, snapshot)
    controller.record()


def _final_snapshot(controller: Controller, number: int, attempt: AttemptRecord) -> AttemptSnapshot:
    snapshot = controller.poll(number)
    if attempt.ended:
        # As it was concluded. The job may have been cancelled since, but that is not what ended the attempt.
        return replace(snapshot, verdict=AttemptVerdict(attempt.state, attempt.cause, attempt.failure_kind))
    # A controller that takes over has seen the end only now: the outcome or the scheduler's reason may still appear.
    while not snapshot.ended:
        controller.wait(controller.poll_s)
        snapshot = controller.poll(number)
    return snapshot


def _after_failure(controller: Controller, number: int, attempt: AttemptRecord, snapshot: AttemptSnapshot) -> None:
    journal = controller.journal
    failure = explain(
        controller.run_dir,
        snapshot,
        controller.spec,
        first_attempt=journal.record.first_attempt,
        rolled_back=_went_back_in_vain(controller, number),
    )
    # This process may be killed after any of these lines: what is already recorded is not recorded again.
    if failure.found_here and failure.incident is not None and attempt.incident is None:
        journal.append(IncidentFound(incident=failure.incident))
    if attempt.decision is None:
        placeable = _placeable(controller, failure, attempt)
        # A step of a smaller allocation takes longer, but so does everything that its share of the caps allows.
        share = attempt.placement.num_nodes / controller.spec.resources.num_nodes
        failure = replace(
            failure, decision=_within_caps(controller, placeable, snapshot.progress.longest_step_s * share)
        )
        journal.append(DecisionMade(decision=failure.decision))
    decision = attempt.decision or failure.decision
    journal.move_attempt(number, snapshot.verdict.state, failure.message, failure.kind)
    controller.record()
    if decision.action is not Action.NEW_ATTEMPT:
        if snapshot.verdict.state is AttemptState.LOST and snapshot.job.state is not JobState.ENDED:
            end_job(controller, attempt.submission)  # silent agents may only be suspended
        journal.move_run(RunState.FAILED, failure.message or failure.kind.value)
        controller.record()
        ended = PreflightBlocked if _is_blocked_by_probe(controller.run_dir, number) else RunFailed
        raise ended(diagnosis(controller.run_dir, number, failure, decision))
    # Two attempts of one run must never run at the same time: they would write the same checkpoints.
    end_job(controller, attempt.submission)
    controller.observer.log(f"attempt {number} ended: {failure.kind.value}. {decision.reason}")
    journal.move_run(RunState.QUEUED, decision.reason)
    controller.record()


def _placeable(controller: Controller, failure: AttemptFailure, attempt: AttemptRecord) -> Decision:
    """The decision, adjusted to the nodes that are available: fewer nodes if the cluster cannot provide all of them, or
    a stop if an unfit node has to be replaced and there is no other.

    Other suspects are used again if no node can replace them: they may have been unlucky. An unfit node would only be
    found unfit again.
    """
    decision = failure.decision
    if decision.action is not Action.NEW_ATTEMPT:
        return decision
    try:
        inventory = controller.scheduler.inventory()
    except SchedulerError:
        return decision  # unknown for now; the next attempt will find out
    size = next_size(controller, inventory, decision, attempt.placement)
    if size.reason:
        changes = {**decision.config_diff, SIZE: size.num_nodes}
        return decision.model_copy(update={"reason": f"{decision.reason}; {size.reason}", "config_diff": changes})
    lacks = shortages(controller.spec.resources, controller.slurm, inventory, decision.excluded_nodes)
    if failure.kind is not FailureKind.NODE_UNFIT or not lacks:
        return decision
    reason = f"no other node can take the place of {', '.join(decision.excluded_nodes)}: {'; '.join(lacks)}"
    return decision.model_copy(update={"action": Action.STOP, "reason": reason, "delay_s": 0.0, "excluded_nodes": ()})


def _within_caps(controller: Controller, decision: Decision, step_s: float) -> Decision:
    """The decision, or a stop if all attempts together have used as much as the run may use, or if the rest is too
    short for a step of this duration."""
    refused = attempt_caps.refusal(controller.spec, used_so_far(controller), step_s)
    if decision.action is not Action.NEW_ATTEMPT or not refused:
        return decision
    return decision.model_copy(update={"action": Action.STOP, "reason": refused, "delay_s": 0.0, "excluded_nodes": ()})


def used_so_far(controller: Controller) -> attempt_caps.Used:
    """Resources used by all attempts since the user last started or resumed the run."""
    first = controller.journal.record.first_attempt
    attempts = {number: one for number, one in controller.journal.record.attempts.items() if number >= first}
    # Seconds of a full-size allocation: an attempt on half of the nodes counts half.
    most = controller.spec.resources.num_nodes
    seconds = (
        allocated_s(controller.run_dir.attempt(n), one.ended_at or utc_now()) * one.placement.num_nodes / most
        for n, one in attempts.items()
    )
    return attempt_caps.Used(len(attempts), sum(seconds))


def _is_blocked_by_probe(run_dir: RunDir, number: int) -> bool:
    report = read_model(run_dir.attempt(number).probe_report, ProbeReport)
    return report is not None and any(result.status is CheckStatus.BLOCKED for result in report.results)


def _went_back_in_vain(controller: Controller, number: int) -> bool:
    """True if an attempt went back to an older checkpoint, and no attempt since has got further than training had."""
    newest = controller.run_dir.newest_checkpoint()
    reached = newest.step if newest is not None else 0
    return any(
        before.decision is not None
        and bool(before.decision.resume_checkpoint)
        and reached <= controller.run_dir.newest_put_aside(past)
        for past, before in controller.journal.record.attempts.items()
        if controller.journal.record.first_attempt <= past < number
    )


def diagnosis(run_dir: RunDir, number: int, failure: AttemptFailure, decision: Decision) -> str:
    """The diagnosis for the user: the failure, the suspects, the evidence, and the reason why it was not retried."""
    incident = failure.incident
    lines = [f"run {run_dir.run_id} failed in attempt {number}: {failure.kind.value}", f"  {failure.message}"]
    if incident is not None:
        if incident.message not in failure.message:
            lines.append(f"  {incident.message}")
        if incident.step is not None:
            lines.append(f"  at step {incident.step}" + (f", phase {incident.phase}" if incident.phase else ""))
        if incident.suspect_ranks:
            on = f" on {', '.join(incident.suspect_nodes)}" if incident.suspect_nodes else ""
            lines.append(f"  suspect ranks: {', '.join(map(str, incident.suspect_ranks))}{on}")
        if incident.evidence_dir:
            lines.append(f"  evidence: {run_dir.root / incident.evidence_dir}")
    lines.append(f"  not tried again: {decision.reason}")
    # The run uses its own copy of the user's code, which a fix to the original does not reach.
    code = " --code" if any((run_dir.code / "snapshot").glob("*")) else ""
    lines.append(f"  logs: rlhf logs {run_dir.run_id}    once it is fixed: rlhf resume {run_dir.run_id}{code}")
    if failure.kind is FailureKind.CONFIG:
        lines.append(
            "  a resumed run keeps its settings; if one is wrong, start a new run: rlhf run with the corrected config"
        )
    return "\n".join(lines)
