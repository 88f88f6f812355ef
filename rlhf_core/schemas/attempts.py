"""States of runs, stages and attempts with the legal transitions between them, and the roles of an attempt's workers.

The tables at the end are the only definition. The store enforces them with ``UPDATE ... WHERE state IN (...)``. This
module does not use pydantic, whose import takes longer than all other work of a short worker process.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class RunState(StrEnum):
    """State of a run."""

    PENDING = "pending"
    """Requested, not started yet."""
    PREFLIGHT = "preflight"
    """Its checks are running."""
    QUEUED = "queued"
    """An attempt is being planned or submitted, or waits in the scheduler's queue or for its back-off."""
    TRAINING = "training"
    """Workers of the trainer role are running."""
    EVALUATING = "evaluating"
    """Training is done; the evaluator role is running."""
    COMPLETED = "completed"
    """The model and its evaluation are complete."""
    FAILED = "failed"
    """Stopped with a diagnosis."""
    CANCELLED = "cancelled"
    """Ended by the user."""


class StageName(StrEnum):
    """Steps of a run, in order."""

    PREFLIGHT = "preflight"
    ALLOCATE = "allocate"
    TRAIN = "train"
    EVALUATE = "evaluate"
    PROMOTE = "promote"
    """Follows the completed run, if ``promote.when`` requires it."""


class StageState(StrEnum):
    """Result of a stage."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class PromotionState(StrEnum):
    """State of the promotion of a run's model."""

    WAITING = "waiting"
    """Waiting for approval."""
    APPROVED = "approved"
    """To be written: approved by a user, or without a required approval."""
    REFUSED = "refused"
    """Refused by a user."""
    EXPIRED = "expired"
    """No answer in time."""
    PROMOTED = "promoted"
    """The model directory is complete."""
    FAILED = "failed"
    """It could not be written; it can be requested again."""


class AttemptState(StrEnum):
    """State of one submission to the scheduler."""

    PLANNED = "planned"
    """Its placement is written, but it is not submitted yet."""
    SUBMITTED = "submitted"
    """The scheduler accepted it; it may still wait for nodes."""
    RUNNING = "running"
    """Its agents are running."""
    COMPLETED = "completed"
    """Every role of the attempt has completed."""
    FAILED = "failed"
    """Ended by a failure; see its incidents."""
    CANCELLED = "cancelled"
    """Ended on the user's request."""
    PREEMPTED = "preempted"
    """Saved and ended early: preemption, time limit, or a request to save and stop."""
    LOST = "lost"
    """The job is gone without an outcome (killed from outside, node lost)."""


class Role(StrEnum):
    """Purpose of a worker."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    REWARD = "reward"
    EVALUATOR = "evaluator"
    PROBE = "probe"


RUN_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.PREFLIGHT, RunState.FAILED, RunState.CANCELLED}),
    RunState.PREFLIGHT: frozenset({RunState.QUEUED, RunState.FAILED, RunState.CANCELLED}),
    RunState.QUEUED: frozenset({RunState.TRAINING, RunState.EVALUATING, RunState.FAILED, RunState.CANCELLED}),
    RunState.TRAINING: frozenset({RunState.EVALUATING, RunState.QUEUED, RunState.FAILED, RunState.CANCELLED}),
    RunState.EVALUATING: frozenset({RunState.COMPLETED, RunState.QUEUED, RunState.FAILED, RunState.CANCELLED}),
    RunState.COMPLETED: frozenset(),
    # `rlhf resume` continues from the last complete checkpoint, after the checks have run again.
    RunState.FAILED: frozenset({RunState.PREFLIGHT}),
    RunState.CANCELLED: frozenset({RunState.PREFLIGHT}),
}
"""Legal transitions from each state of a run."""

ATTEMPT_ENDS: frozenset[AttemptState] = frozenset(
    {AttemptState.COMPLETED, AttemptState.FAILED, AttemptState.CANCELLED, AttemptState.PREEMPTED, AttemptState.LOST}
)
"""States in which nothing of the attempt is active."""

ATTEMPT_MOVES: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.PLANNED: frozenset(
        {AttemptState.SUBMITTED, AttemptState.FAILED, AttemptState.CANCELLED, AttemptState.LOST}
    ),
    AttemptState.SUBMITTED: frozenset({AttemptState.RUNNING}) | ATTEMPT_ENDS,
    AttemptState.RUNNING: ATTEMPT_ENDS,
    **{end: frozenset() for end in ATTEMPT_ENDS},
}
"""Legal transitions from each state of an attempt."""

PROMOTION_MOVES: dict[PromotionState, frozenset[PromotionState]] = {
    PromotionState.WAITING: frozenset({PromotionState.APPROVED, PromotionState.REFUSED, PromotionState.EXPIRED}),
    PromotionState.APPROVED: frozenset({PromotionState.PROMOTED, PromotionState.FAILED}),
    # The user may decide again, and the disk may have space again.
    PromotionState.REFUSED: frozenset({PromotionState.WAITING, PromotionState.APPROVED}),
    PromotionState.EXPIRED: frozenset({PromotionState.WAITING, PromotionState.APPROVED, PromotionState.REFUSED}),
    PromotionState.FAILED: frozenset({PromotionState.WAITING, PromotionState.APPROVED, PromotionState.REFUSED}),
    PromotionState.PROMOTED: frozenset(),
}
"""Legal transitions from each state of a promotion."""

PROMOTION_BEGINNINGS: frozenset[PromotionState] = frozenset({PromotionState.WAITING, PromotionState.APPROVED})
"""Initial states of a promotion."""

RUN_ENDS: frozenset[RunState] = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED})
"""States in which nothing of the run is active."""

State = TypeVar("State", RunState, AttemptState, PromotionState)


def sources_of(target: State, moves: Mapping[State, frozenset[State]]) -> list[str]:
    """Values of the states from which a table of transitions leads to ``target``, sorted."""
    return sorted(source.value for source, targets in moves.items() if target in targets)
