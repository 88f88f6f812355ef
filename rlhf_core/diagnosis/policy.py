"""Recovery ladder: the next action as a pure function of the failure and of earlier attempts at recovery.

The ladder: restart the workers in place (seconds) -> a new attempt -> stop with the diagnosis. A failure that recurs
every time is not retried; one that may be chance is retried a limited number of times without checkpoint progress; one
caused by the scheduler is retried as long as checkpoints advance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import JsonValue

from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import NODE_FAILURES, Action, FailureKind
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.schemas.trainers import NativeTrainer

ALLOWED_BY_SPEC = 1_000_000
"""Limit of kinds that are limited only by the run's own budget."""

REMEDY = -1
"""Limit of kinds that are retried only as long as a remedy can be found."""

MOST_REMEDIES = 11
"""Attempts in a row without a new checkpoint after which another remedy is not tried either, even if
``supervise.max_attempts`` is smaller: as many as it takes to come from a micro-batch of 8 in ZeRO 1 to the smallest one
in ZeRO 3, with each sequence shared by 8 ranks and an offloaded optimizer."""

FEW_COMPLETIONS = 16
"""Completions sampled at once down to which they are halved first if sampling ran out of memory. Below that, half of
them takes almost twice as long, because each token still reads all weights, and frees less than ZeRO and offloading."""

UNCOUNTED = -2
"""Kinds whose attempts only ``supervise.max_total_attempts`` limits: the run waits for nodes, like a pending job."""


@dataclass(frozen=True)
class Rule:
    """Limits of the retries of one kind of failure without checkpoint progress, and their reason."""

    in_place: int
    """Restarts inside the same allocation."""
    attempts: int
    """New attempts after the first."""
    why: str
    """End of the sentence "... because"."""


class Choice(NamedTuple):
    """Chosen rung of the ladder: the response to a failure, which is stored as a ``Decision``."""

    action: Action
    reason: str
    """Reason, as a sentence."""
    delay_s: float = 0.0
    """Wait before acting, in seconds."""


_EVERY_TIME = "it would fail again in the same way"

RULES: dict[FailureKind, Rule] = {
    FailureKind.PREEMPTION: Rule(0, ALLOWED_BY_SPEC, "the scheduler took the nodes back"),
    FailureKind.NO_NODES: Rule(0, UNCOUNTED, "the run only waits for nodes"),
    FailureKind.TIME_LIMIT: Rule(0, ALLOWED_BY_SPEC, "the allocation has no time left"),
    FailureKind.NODE_UNFIT: Rule(0, 3, "the allocation contains an unusable node"),
    FailureKind.NODE_LOST: Rule(0, 3, "the allocation lacks a node"),
    FailureKind.AGENT_KILLED: Rule(0, 3, "the workers lost their supervisor"),
    FailureKind.GPU_HARDWARE: Rule(0, 3, "the GPU must not be used"),
    FailureKind.COLLECTIVE_HANG: Rule(ALLOWED_BY_SPEC, 3, "it recurs wherever it runs"),
    FailureKind.HANG: Rule(ALLOWED_BY_SPEC, 3, "it recurs wherever it runs"),
    FailureKind.WORKER_KILLED: Rule(ALLOWED_BY_SPEC, 3, "something outside the job keeps ending its workers"),
    FailureKind.NETWORK: Rule(ALLOWED_BY_SPEC, 3, "the network does not recover"),
    FailureKind.RENDEZVOUS: Rule(ALLOWED_BY_SPEC, 3, "the ranks do not find each other"),
    FailureKind.ENGINE: Rule(ALLOWED_BY_SPEC, 3, "the engine keeps failing"),
    FailureKind.FILE_SYSTEM: Rule(1, 3, "the file system remains unusable on these nodes"),
    FailureKind.ILLEGAL_ACCESS: Rule(1, 1, "half of these are bugs, which recur"),
    FailureKind.HOST_OOM: Rule(1, 1, "it needs more memory, or fewer workers"),
    FailureKind.UNKNOWN: Rule(1, 1, "one retry shows whether it was chance"),
    FailureKind.CUDA_OOM: Rule(0, REMEDY, "nothing more can be reduced without changing the global batch"),
    FailureKind.NON_FINITE: Rule(0, REMEDY, "an older checkpoint did not help: lower the learning rate"),
    FailureKind.DEGENERATE_RL: Rule(0, REMEDY, "an older checkpoint did not help: change the reward or the config"),
    FailureKind.COLLECTIVE_MISMATCH: Rule(0, 0, "ranks that disagree are a bug in the code"),
    FailureKind.CHECKPOINT_CORRUPT: Rule(REMEDY, REMEDY, "no earlier checkpoint can replace it"),
    FailureKind.DISK_FULL: Rule(0, 0, "the disk remains full until space is freed"),
    FailureKind.IMPORT_ERROR: Rule(0, 0, _EVERY_TIME),
    FailureKind.CONFIG: Rule(0, 0, _EVERY_TIME),
    FailureKind.SHAPE: Rule(0, 0, _EVERY_TIME),
    FailureKind.DATA: Rule(0, 0, _EVERY_TIME),
    FailureKind.REWARD_FUNCTION: Rule(0, 0, _EVERY_TIME),
    FailureKind.INCOMPLETE: Rule(0, 0, _EVERY_TIME),
    FailureKind.USER_CANCEL: Rule(0, 0, "the user ended it"),
}
"""Retry rule of each kind. docs/failures.md is generated from it."""

UNDECIDED: dict[FailureKind, Rule] = {
    FailureKind.COLLECTIVE_MISMATCH: Rule(1, 1, "it recurred: ranks that disagree are a bug in the code"),
}
"""Rules that apply instead if the kind is not proven, as by the text of a log alone: one more start confirms it."""


def not_retried(kind: FailureKind, why: str) -> Choice:
    """The decision to stop, for a reason that no further start would change."""
    return Choice(Action.STOP, f"{kind} is not retried, because {why}")


def decide_in_place(
    kind: FailureKind,
    restarts_without_progress: int,
    spec: SuperviseSpec,
    *,
    same_fingerprint_before: bool = False,
    remedy: str = "",
    undecided: bool = False,
) -> Choice:
    """Decide agent 0's action after a failure inside its allocation.

    Args:
        kind: Kind of the failure.
        restarts_without_progress: Restarts in place since the last new checkpoint.
        spec: The run's budget.
        same_fingerprint_before: True if the same failure occurred before in this attempt, without progress in between.
        remedy: Change for the next start of the workers, for kinds that would recur otherwise; empty if there is none.
        undecided: The kind is not proven; see :data:`UNDECIDED`.

    Returns:
        ``RESTART_IN_PLACE``; ``NEW_ATTEMPT`` to release the allocation, after which the controller decides on a new
            one; or ``STOP`` if a new attempt would not help either, which the controller finds by the same rules.
    """
    rule = _rule(kind, undecided)
    if (rule.in_place == 0 and rule.attempts == 0) or (rule.in_place == REMEDY and not remedy):
        return not_retried(kind, rule.why)
    if kind is FailureKind.UNKNOWN and same_fingerprint_before:
        return Choice(Action.STOP, "the same unknown failure recurred after a restart in place: it is not chance")
    if rule.in_place == REMEDY:
        # Not counted against the budget: each removes one checkpoint, so their number is limited.
        action = Action.RESTART_IN_PLACE if spec.max_restarts else Action.NEW_ATTEMPT
        return Choice(action, f"{kind}: {remedy}")
    if rule.attempts == REMEDY:
        return Choice(Action.NEW_ATTEMPT, f"{kind} would recur in place: a new attempt may change something")
    allowed = min(rule.in_place, spec.max_restarts)
    if restarts_without_progress < allowed:
        number = restarts_without_progress + 1
        reason = f"restart in place {number} of {allowed} allowed for {kind} without a new checkpoint"
        return Choice(Action.RESTART_IN_PLACE, reason)
    if allowed == 0:
        why = rule.why if rule.in_place == 0 else "supervise.max_restarts is 0"
        return Choice(Action.NEW_ATTEMPT, f"{kind} is not retried in place, because {why}")
    spent = f"{restarts_without_progress} restarts in place without a new checkpoint, {allowed} allowed for {kind}"
    return Choice(Action.NEW_ATTEMPT, f"{spent}: the allocation is released")


def decide_next(
    kind: FailureKind,
    attempts_without_progress: int,
    same_fingerprint_before: bool,
    spec: SuperviseSpec,
    random: float,
    remedy: str = "",
    *,
    undecided: bool = False,
) -> Choice:
    """Decide the controller's action after a failed attempt.

    Args:
        kind: Kind of the failure.
        attempts_without_progress: Consecutive attempts without a new checkpoint, including the last one; 0 if that
            saved one. For ``NO_NODES``, only the consecutive attempts of that kind, which others do not count.
        same_fingerprint_before: True if the same failure occurred before, in an earlier attempt or in this one, without
            a new checkpoint in between.
        spec: The run's budget.
        random: A number in [0, 1) that spreads the back-off, so that many runs do not retry at once.
        remedy: Change for the next attempt, for kinds that would recur otherwise; empty if there is none.
        undecided: The kind is not proven; see :data:`UNDECIDED`.

    Returns:
        ``NEW_ATTEMPT`` with its back-off, or ``STOP``.
    """
    rule = _rule(kind, undecided)
    if rule.attempts == 0 or (rule.attempts == REMEDY and not remedy):
        return not_retried(kind, rule.why)
    if kind is FailureKind.UNKNOWN and same_fingerprint_before:
        return Choice(Action.STOP, "the same unknown failure recurred: it is not chance")
    if rule.attempts == UNCOUNTED:
        reason = f"{kind}: {rule.why}, which only supervise.max_total_attempts limits"
        return Choice(Action.NEW_ATTEMPT, reason, backoff_s(attempts_without_progress, spec, random))
    # Kinds that restarts in place also remedy end with the budget: a disk may damage every new checkpoint. Changes of
    # settings may have to add up before they help.
    if rule.attempts != REMEDY:
        allowed = min(rule.attempts + 1, spec.max_attempts)
    else:
        allowed = spec.max_attempts if rule.in_place == REMEDY else max(MOST_REMEDIES, spec.max_attempts)
    if attempts_without_progress >= allowed:
        why = f": {rule.why}" if rule.attempts not in (ALLOWED_BY_SPEC, REMEDY) else ""
        spent = f"{attempts_without_progress} attempts without a new checkpoint, {allowed} allowed for {kind}"
        return Choice(Action.STOP, f"{spent}{why}")
    if rule.attempts == REMEDY:
        return Choice(Action.NEW_ATTEMPT, f"{kind}: {remedy}")
    if attempts_without_progress == 0:
        return Choice(Action.NEW_ATTEMPT, f"{kind} after a new checkpoint: resuming from it")
    # The next attempt gets another node, so waiting improves nothing.
    delay_s = 0.0 if kind is FailureKind.NODE_UNFIT else backoff_s(attempts_without_progress, spec, random)
    reason = f"attempt without a new checkpoint {attempts_without_progress} of {allowed} allowed for {kind}"
    return Choice(Action.NEW_ATTEMPT, reason, delay_s)


def _rule(kind: FailureKind, undecided: bool) -> Rule:
    return UNDECIDED.get(kind, RULES[kind]) if undecided else RULES[kind]


def oom_remedy(
    spec: RunSpec, role: Role | None = None, phase: str = "", larger_shares: Sequence[int] = ()
) -> dict[str, JsonValue]:
    """One change that lowers the memory of a GPU without changing any step's batch and gradient.

    Halve the micro-batch down to one sequence, then turn on activation checkpointing, then take the next stage of ZeRO
    if there is another rank to split with, then let more ranks of a node share each sequence, then move the optimizer
    to main memory (on GPUs), then halve the completions sampled at once down to 1, then move the weights to main
    memory.

    In a rollout engine only the completions sampled at once count, in an evaluator also the micro-batch. A trainer that
    ran out of memory while it sampled itself first halves the completions down to ``FEW_COMPLETIONS``, in an evaluation
    that also scores rows together with the micro-batch, then takes the next stage of ZeRO and so on. Where nothing is
    sampled, the completions are not halved.
    During setup, before any of these, only the stage of ZeRO and what is in main memory can help: also stage 2, because
    stage 1 of DeepSpeed holds the float32 gradients of a bfloat16 model whole from the start.

    Args:
        spec: Spec with all earlier changes.
        role: Role that ran out of memory; None for a trainer.
        phase: Phase in which it did; empty if unknown.
        larger_shares: Larger numbers of ranks that can share each sequence of the model, ascending.

    Returns:
        Dotted name to new value; empty if nothing more can be changed.
    """
    trainer, batch_size = spec.trainer, spec.rollout.batch_size
    sets_up = phase == Phase.SETUP
    completes = spec.completes_held_out(pairs_have_answers=True)
    smaller_pass = _smaller_pass(spec)
    if role in (Role.ROLLOUT, Role.EVALUATOR):
        if sets_up:
            return {}
        samples = batch_size > 1 and (completes or role is Role.ROLLOUT)
        fewer: dict[str, JsonValue] = {"rollout.batch_size": batch_size // 2} if samples else {}
        return {**fewer, **smaller_pass} if role is Role.EVALUATOR else fewer
    if not isinstance(trainer, NativeTrainer):
        return {}  # another program divides its batch by its own arguments
    has_gpus = spec.resources.gpus_per_node > 0
    trains = phase not in (Phase.SETUP, Phase.ROLLOUT, Phase.EVALUATE)
    scores_rows = phase == Phase.EVALUATE and bool(spec.row_evaluations)
    passes = trains or scores_rows  # over micro-batches
    samples = phase == Phase.ROLLOUT or (phase == Phase.EVALUATE and completes)
    samples_itself = samples and spec.rollout.engine == "transformers" and not spec.rollout.engines
    if samples_itself and batch_size > FEW_COMPLETIONS:
        return {"rollout.batch_size": batch_size // 2, **(smaller_pass if scores_rows else {})}
    if passes and smaller_pass:
        return smaller_pass
    any_samples = spec.any_loop_samples or completes
    share = next(iter(larger_shares), None)
    ladder: tuple[tuple[bool, str, JsonValue], ...] = (
        (not trainer.gradient_checkpointing and trains, "trainer.gradient_checkpointing", True),
        (trainer.zero_stage < 3 and spec.num_ranks > 1, "trainer.zero_stage", trainer.zero_stage + 1),
        (passes and share is not None, "trainer.sequence_parallel", share),
        (trainer.zero_stage > 0 and trainer.offload == "none" and has_gpus, "trainer.offload", "optimizer"),
        (batch_size > 1 and any_samples and not sets_up, "rollout.batch_size", batch_size // 2),
        (trainer.zero_stage == 3 and trainer.offload == "optimizer" and has_gpus, "trainer.offload", "parameters"),
    )
    return next(({name: value} for applies, name, value in ladder if applies), {})


def _smaller_pass(spec: RunSpec) -> dict[str, JsonValue]:
    """Half the bound of a micro-batch; empty if the longest sequence already has a pass of its own."""
    trainer = spec.trainer
    if not isinstance(trainer, NativeTrainer):
        return {}
    tokens, size = trainer.micro_batch_tokens, trainer.micro_batch_size
    longest = spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
    if tokens > longest:
        return {"trainer.micro_batch_tokens": max(longest, tokens // 2)}
    return {"trainer.micro_batch_size": size // 2} if tokens == 0 and size > 1 else {}


def rollback_step(
    kind: FailureKind, checkpoint_steps: Sequence[int], failed_at: int | None, spec: RunSpec
) -> int | None:
    """Step of the checkpoint to roll back to: never the newest, which may already contain the fault.

    Training that learns nothing is detected only after a window of steps, so the checkpoints within that window are
    excluded: it is the newest one before, or the oldest if there is none.

    Args:
        kind: Kind of the failure.
        checkpoint_steps: Steps of the complete checkpoints, ascending.
        failed_at: Step at which it was detected; None if unknown.
        spec: Spec of the run.

    Returns:
        None if there is no checkpoint older than the newest.
    """
    older = checkpoint_steps[:-1]
    if not older:
        return None
    if kind is not FailureKind.DEGENERATE_RL or failed_at is None:
        return older[-1]
    return max((step for step in older if step <= failed_at - spec.health.window_steps), default=older[0])


EXCLUDED_AT_ONCE = frozenset({FailureKind.NODE_UNFIT, FailureKind.NODE_LOST, FailureKind.GPU_HARDWARE})
"""Kinds after which a node is excluded at once; one strike of another may be chance."""
SUSPICIOUS = NODE_FAILURES - EXCLUDED_AT_ONCE - {FailureKind.FILE_SYSTEM}
"""Kinds that need a second strike; a file system is usually that of all nodes."""


def excluded_after(
    kind: FailureKind,
    suspects: Sequence[str],
    strikes: Mapping[str, int],
    already: Sequence[str],
    most: int,
    *,
    undecided: bool = False,
) -> tuple[str, ...]:
    """Nodes to exclude from the next attempt.

    Args:
        kind: Kind of the failure.
        suspects: Suspected nodes.
        strikes: Number of times each node was suspected in this run so far.
        already: Nodes excluded before, oldest first.
        most: Maximum number of excluded nodes; the newest suspects remain.
        undecided: The kind is not proven, as by the text of a log alone.
    """
    # The agents know which node did not arrive. A log only names the node on which, for instance, a port was in use.
    at_once = kind in EXCLUDED_AT_ONCE or (kind is FailureKind.RENDEZVOUS and not undecided)
    new = [node for node in suspects if at_once or (kind in SUSPICIOUS and strikes.get(node, 0) >= 2)]
    found = list(dict.fromkeys([*(node for node in already if node not in new), *new]))
    return tuple(found[-most:]) if most else ()


def backoff_s(failures: int, spec: SuperviseSpec, random: float) -> float:
    """Wait after consecutive failures, in seconds: it doubles up to the maximum, and is spread over its upper half."""
    # The exponent is bounded to prevent an overflow after many failures.
    longest = min(spec.max_backoff_s, spec.backoff_s * 2.0 ** min(max(failures, 1) - 1, 30))
    return longest * (0.5 + 0.5 * random)
