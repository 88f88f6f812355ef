"""Explanation of a failed attempt: its incident, and the decision about the next action."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pydantic import JsonValue

from rlhf_core.diagnosis.classify import Evidence, classify
from rlhf_core.diagnosis.failure import Failure, fingerprint
from rlhf_core.diagnosis.policy import (
    RULES,
    Choice,
    decide_next,
    excluded_after,
    not_retried,
    oom_remedy,
    rollback_step,
)
from rlhf_core.files.appended import read_tail
from rlhf_core.files.lookups import is_there
from rlhf_core.files.whole import read_model
from rlhf_core.run_dir.initial_model import larger_shares, might_share_more, model_config
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.failures import Action, DecidedBy, Decision, FailureKind, Incident
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.resources import Placement
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import sentence
from rlhf_core.text.redaction import masked
from rlhf_core.watchdog import evidence
from rlhf_core.watchdog.watcher import AttemptSnapshot

LOG_TAIL_BYTES = 16 << 10
"""Bytes read from the end of a lost job's log."""


@dataclass(frozen=True)
class AttemptFailure:
    """A failed attempt, its last incident, and the decision about it."""

    kind: FailureKind
    """Kind of the controller's own incident, or else of the end that the agents or the scheduler report."""
    message: str
    """Message or cause, likewise."""
    incident: Incident | None
    """Last incident of the attempt, from its agents or, if they left none, from the controller."""
    found_here: bool
    """True if the incident is the controller's own finding, still to be written to the journal."""
    decision: Decision


def explain(
    run_dir: RunDir,
    snapshot: AttemptSnapshot,
    spec: RunSpec,
    *,
    first_attempt: int,
    rolled_back: bool = False,
    chance: Callable[[], float] = random.random,
) -> AttemptFailure:
    """Explain a failed attempt and decide on the next action.

    Args:
        spec: spec of the run.
        first_attempt: first attempt since the user last started or resumed the run; the budget counts from here.
        rolled_back: True if an attempt since then went back to an older checkpoint, and none got further than before.
        chance: number in [0, 1) for the jitter of the back-off.
    """
    attempt = run_dir.attempt(snapshot.attempt)
    own = _own_incident(run_dir, snapshot)
    incident = own or evidence.final_incident(attempt)
    undecided = incident is not None and incident.is_undecided
    kind = own.failure_kind if own else snapshot.verdict.failure_kind or FailureKind.UNKNOWN
    past = evidence.read_earlier_attempts(
        run_dir, snapshot.attempt, first_attempt, incident.fingerprint if incident else "", own
    )
    failures = past.attempts_without_nodes if kind is FailureKind.NO_NODES else past.attempts_without_progress
    placement = read_model(attempt.placement, Placement)
    stopped = _stopped_by_health(spec, incident)
    remedy = _Remedy() if stopped else _remedy(run_dir, kind, spec, placement, rolled_back, incident)
    if not remedy.what and kind is FailureKind.CUDA_OOM:
        stopped = stopped or _stopped_without_memory(_with_earlier_changes(spec, placement), incident)
    choice = stopped or decide_next(
        kind,
        failures,
        past.same_fingerprint_before,
        spec.supervise,
        chance(),
        remedy.what,
        undecided=undecided,
    )
    excluded = excluded_after(
        kind,
        incident.suspect_nodes if incident is not None else (),
        evidence.strikes(run_dir, own),
        placement.excluded_nodes if placement is not None else (),
        spec.supervise.max_excluded_nodes,
        undecided=undecided,
    )
    return AttemptFailure(
        kind=kind,
        message=own.message if own else snapshot.verdict.cause,
        incident=incident,
        found_here=own is not None,
        decision=Decision(
            attempt=snapshot.attempt,
            restart=max(snapshot.progress.restart, 0),
            action=choice.action,
            reason=choice.reason,
            decided_by=DecidedBy.CONTROLLER,
            decided_at=utc_now(),
            delay_s=choice.delay_s,
            excluded_nodes=excluded if choice.action is Action.NEW_ATTEMPT else (),
            config_diff=remedy.config_diff,
            resume_checkpoint=remedy.resume_checkpoint,
        ),
    )


@dataclass(frozen=True)
class _Remedy:
    """Changes for the next attempt; all fields are empty if there are none."""

    what: str = ""
    config_diff: Mapping[str, JsonValue] = field(default_factory=dict)
    resume_checkpoint: str = ""


def _with_earlier_changes(spec: RunSpec, placement: Placement | None) -> RunSpec:
    return spec if placement is None else with_changes(spec, placement.config_diff)


def _stopped_by_health(spec: RunSpec, incident: Incident | None) -> Choice | None:
    """The decision to stop, if the settings ask for it for the rule that ended the attempt."""
    rule = incident.health_rule if incident is not None else ""
    if not any(name == rule and action == "stop" for name, action in spec.health.actions.items()):
        return None
    return Choice(Action.STOP, f'health.actions.{rule} is "stop": no older checkpoint is tried')


def _stopped_without_memory(spec: RunSpec, incident: Incident | None) -> Choice:
    """The decision to stop after a GPU ran out of memory and no change is left that would help, with advice.

    Args:
        spec: spec with all earlier changes.
    """
    role, phase = _place_of(incident)
    in_trainer = role in (None, Role.TRAINER)
    larger = "or more or larger GPUs"
    if in_trainer and spec.trainer.kind == "command":
        why = f"only the arguments of its command change its memory: use smaller batches, {larger}"
    elif not spec.supervise.oom_remediation:
        why = "supervise.oom_remediation is false: lower the memory yourself; `rlhf plan` shows what takes it"
    elif phase == Phase.SETUP:
        why = (
            "smaller batches do not help during setup, and nothing more can be split or moved to main memory: use more "
            "or larger GPUs, or end other processes on them"
        )
    else:
        passes = in_trainer and phase not in (Phase.ROLLOUT, Phase.EVALUATE)
        shares = passes and might_share_more(spec, model_config(spec.model))
        share = "let ranks share each sequence (trainer.sequence_parallel), " if shares else ""
        why = f"{RULES[FailureKind.CUDA_OOM].why}: {share}use shorter sequences, {larger}"
    return not_retried(FailureKind.CUDA_OOM, why)


def _place_of(incident: Incident | None) -> tuple[Role | None, str]:
    """Role and phase of an incident, as far as they are known."""
    return (incident.role, incident.phase) if incident is not None else (None, "")


def _remedy(
    run_dir: RunDir,
    kind: FailureKind,
    spec: RunSpec,
    placement: Placement | None,
    rolled_back: bool,
    incident: Incident | None,
) -> _Remedy:
    if kind is FailureKind.CUDA_OOM and spec.supervise.oom_remediation:
        role, phase = _place_of(incident)
        changed = _with_earlier_changes(spec, placement)
        changes = oom_remedy(changed, role, phase, larger_shares(changed, model_config(spec.model)))
        what = ", ".join(f"{name} = {value}" for name, value in changes.items())
        return _Remedy(f"continuing with {what}; the global batch is unchanged" if what else "", changes)
    roll_back = kind in (FailureKind.NON_FINITE, FailureKind.DEGENERATE_RL)
    if roll_back and spec.supervise.rollback_on_non_finite and not rolled_back:
        steps = [checkpoint.step for checkpoint in run_dir.checkpoints()]
        step = rollback_step(kind, steps, incident.step if incident else None, spec)
        if step is not None:
            older = run_dir.checkpoint(step).root.name
            return _Remedy(f"resuming once from {older}; newer checkpoints are set aside", {}, older)
    damaged = incident.damaged_checkpoint if incident is not None else ""
    if kind is FailureKind.CHECKPOINT_CORRUPT and (whole := run_dir.checkpoint_before(damaged)):
        return _Remedy(f"{damaged} is set aside; resuming from {whole.root.name}")
    return _Remedy()


def _own_incident(run_dir: RunDir, snapshot: AttemptSnapshot) -> Incident | None:
    """Return the incident that only the controller can know of, if any."""
    verdict, attempt = snapshot.verdict, run_dir.attempt(snapshot.attempt)
    scheduler_dir = str(attempt.scheduler_dir.relative_to(run_dir.root))
    is_lost = verdict.state is AttemptState.LOST
    if is_lost and verdict.failure_kind is FailureKind.RENDEZVOUS:
        return _incident(snapshot, _failure_of_absent_nodes(snapshot), scheduler_dir)
    if is_lost and verdict.nodes:  # Slurm detects it much later
        return _incident(snapshot, _failure_of_lost_nodes(snapshot, snapshot.job.lost_nodes or verdict.nodes))
    if is_lost and snapshot.job.scheduler_state == "POWERED_OFF" and not is_there(attempt.claim):
        return _incident(snapshot, _failure_without_nodes(run_dir, snapshot), scheduler_dir)
    if is_lost or _lacks_an_agent(snapshot):
        return _incident(snapshot, _failure_of_a_lost_job(run_dir, snapshot), scheduler_dir)
    if verdict.failure_kind is FailureKind.NODE_LOST and (lost := _lost_nodes(run_dir, snapshot)):
        return _incident(snapshot, _failure_of_lost_nodes(snapshot, lost))
    return None


def _incident(snapshot: AttemptSnapshot, failure: Failure, evidence_dir: str = "") -> Incident:
    return failure.incident(snapshot.attempt, max(snapshot.progress.restart, 0), utc_now(), evidence_dir=evidence_dir)


def _lacks_an_agent(snapshot: AttemptSnapshot) -> bool:
    """Return True if agent 0 mistook a lost agent for a preemption."""
    was_saved = snapshot.outcome is not None and snapshot.outcome.state is AttemptState.PREEMPTED
    return was_saved and snapshot.verdict.failure_kind is FailureKind.AGENT_KILLED


def _failure_of_a_lost_job(run_dir: RunDir, snapshot: AttemptSnapshot) -> Failure:
    attempt = run_dir.attempt(snapshot.attempt)
    log = evidence.scheduler_log(attempt)
    # The log of an agent that ran may contain failures it recovered from, and says nothing about its own end.
    # An agent that never started (no claim) printed the reason.
    text = "" if log is None else read_tail(log, LOG_TAIL_BYTES)
    if is_there(attempt.claim):
        # Slurm's own lines never report a failure that was recovered from.
        text = "\n".join(line for line in text.splitlines() if line.startswith(("srun: error", "slurmstepd")))
    state = snapshot.job.scheduler_state
    failure = classify(Evidence(agent_vanished=True, agent_log=text, scheduler_state=state))
    what = f"The job of attempt {snapshot.attempt} is gone without an outcome. {failure.message}"
    if snapshot.outcome is not None:
        what = f"{snapshot.verdict.cause}. {failure.message}"
    elif snapshot.job.state is JobState.RUNNING:
        what = f"The job of attempt {snapshot.attempt} was given up: {snapshot.verdict.cause}."
    lines = text.strip().splitlines()
    last_line = f". The last line of {log}: {lines[-1].strip()[:300]}" if lines else ""
    return replace(
        failure,
        message=masked(f"{what.removesuffix('.')}{last_line}" if last_line else what),
        nodes=_lost_nodes(run_dir, snapshot) or failure.nodes,
        phase=snapshot.progress.phase,
        step=snapshot.progress.step or None,
    )


def _failure_without_nodes(run_dir: RunDir, snapshot: AttemptSnapshot) -> Failure:
    """Describe nodes that did not start. None is suspected: in a cloud, names of nodes are only places."""
    kind = FailureKind.NO_NODES
    since = evidence.without_nodes_since(run_dir, snapshot.attempt)
    nor = f", nor of any other since {since:%Y-%m-%d %H:%M} UTC" if since is not None else ""
    message = f"No agent of attempt {snapshot.attempt} has started{nor}. {snapshot.job.reason}"
    return Failure(kind, message, fingerprint(kind, ""))


def _failure_of_absent_nodes(snapshot: AttemptSnapshot) -> Failure:
    """Describe agents that did not meet, from the report of one that waited.

    The log would blame that one, because it is the first whose task fails.
    """
    kind, nodes = FailureKind.RENDEZVOUS, snapshot.verdict.nodes
    return Failure(kind, masked(snapshot.verdict.cause), fingerprint(kind, " ".join(nodes)), nodes=nodes)


def _lost_nodes(run_dir: RunDir, snapshot: AttemptSnapshot) -> tuple[str, ...]:
    """Nodes that the scheduler or srun reports as lost: a node may have come back before the query."""
    if snapshot.job.lost_nodes:
        return snapshot.job.lost_nodes
    log = evidence.scheduler_log(run_dir.attempt(snapshot.attempt))
    text = read_tail(log, LOG_TAIL_BYTES) if log is not None else ""
    named = re.findall(r"^srun: error: Node failure on (\S+)", text, re.MULTILINE)
    return tuple(dict.fromkeys(named))


def _failure_of_lost_nodes(snapshot: AttemptSnapshot, lost: tuple[str, ...]) -> Failure:
    """Describe lost nodes. Agents that had time to save do not know which node was lost; the scheduler does."""
    names, cause = ", ".join(lost), snapshot.verdict.cause
    kind = snapshot.verdict.failure_kind or FailureKind.NODE_LOST
    is_from_agents = bool(snapshot.verdict.nodes) and not snapshot.job.lost_nodes
    message = sentence(cause) if is_from_agents else f"{names} went out of service. {cause}"
    phase, step = snapshot.progress.phase, snapshot.progress.step or None
    return Failure(kind, message, fingerprint(kind, names), nodes=lost, phase=phase, step=step)
