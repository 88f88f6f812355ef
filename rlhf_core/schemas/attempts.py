"""States of runs, stages and attempts, and which moves between them are legal.

The tables at the end are the only place that knows. The store enforces them with ``UPDATE ... WHERE state IN (...)``.
"""

from enum import StrEnum


class RunState(StrEnum):
    """State of a run."""

    PENDING = "pending"
    """Asked for; nothing was done yet."""
    PREFLIGHT = "preflight"
    """Its checks are running."""
    QUEUED = "queued"
    """An attempt is being planned, submitted, or waits in the scheduler's queue or for its back-off."""
    TRAINING = "training"
    """Workers of the trainer role are running."""
    EVALUATING = "evaluating"
    """Training is done; the evaluator role is running."""
    COMPLETED = "completed"
    """There is a model and its evaluation."""
    FAILED = "failed"
    """Stopped with a diagnosis."""
    CANCELLED = "cancelled"
    """Ended by the user."""


class StageName(StrEnum):
    """The steps of a run, in their order."""

    PREFLIGHT = "preflight"
    ALLOCATE = "allocate"
    TRAIN = "train"
    EVALUATE = "evaluate"
    PROMOTE = "promote"
    """Comes after the run has completed, and only where ``promote.when`` asks for it."""


class StageState(StrEnum):
    """Result of a stage."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class PromotionState(StrEnum):
    """State of the promotion of a run's model."""

    WAITING = "waiting"
    """A person is asked."""
    APPROVED = "approved"
    """To be written: a person said so, or nobody had to be asked."""
    REFUSED = "refused"
    """A person said no."""
    EXPIRED = "expired"
    """Nobody answered in time."""
    PROMOTED = "promoted"
    """The model directory is there, whole."""
    FAILED = "failed"
    """It could not be written; asking again is possible."""


class AttemptState(StrEnum):
    """State of one submission to the scheduler."""

    PLANNED = "planned"
    """Its placement is written; nothing was submitted yet."""
    SUBMITTED = "submitted"
    """The scheduler took it; it may still wait for nodes."""
    RUNNING = "running"
    """Its agents are at work."""
    COMPLETED = "completed"
    """Every role of the attempt ended well."""
    FAILED = "failed"
    """Ended by a failure; see its incidents."""
    CANCELLED = "cancelled"
    """Ended because the user asked."""
    PREEMPTED = "preempted"
    """Saved early and ended: preemption, time limit, or a request to save and stop."""
    LOST = "lost"
    """The job is gone and left no outcome (killed from outside, node lost)."""


RUN_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.PREFLIGHT, RunState.FAILED, RunState.CANCELLED}),
    RunState.PREFLIGHT: frozenset({RunState.QUEUED, RunState.FAILED, RunState.CANCELLED}),
    RunState.QUEUED: frozenset({RunState.TRAINING, RunState.EVALUATING, RunState.FAILED, RunState.CANCELLED}),
    RunState.TRAINING: frozenset({RunState.EVALUATING, RunState.QUEUED, RunState.FAILED, RunState.CANCELLED}),
    RunState.EVALUATING: frozenset({RunState.COMPLETED, RunState.QUEUED, RunState.FAILED, RunState.CANCELLED}),
    RunState.COMPLETED: frozenset(),
    # `rlhf resume` goes on from the last complete checkpoint, after the checks were made again.
    RunState.FAILED: frozenset({RunState.PREFLIGHT}),
    RunState.CANCELLED: frozenset({RunState.PREFLIGHT}),
}
"""From each state of a run, the states it may move to."""

_ENDS = frozenset(
    {AttemptState.COMPLETED, AttemptState.FAILED, AttemptState.CANCELLED, AttemptState.PREEMPTED, AttemptState.LOST}
)

ATTEMPT_MOVES: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.PLANNED: frozenset(
        {AttemptState.SUBMITTED, AttemptState.FAILED, AttemptState.CANCELLED, AttemptState.LOST}
    ),
    AttemptState.SUBMITTED: frozenset({AttemptState.RUNNING}) | _ENDS,
    AttemptState.RUNNING: _ENDS,
    **{end: frozenset() for end in _ENDS},
}
"""From each state of an attempt, the states it may move to."""

PROMOTION_MOVES: dict[PromotionState, frozenset[PromotionState]] = {
    PromotionState.WAITING: frozenset({PromotionState.APPROVED, PromotionState.REFUSED, PromotionState.EXPIRED}),
    PromotionState.APPROVED: frozenset({PromotionState.PROMOTED, PromotionState.FAILED}),
    # A person may think again, and a disk may have room again.
    PromotionState.REFUSED: frozenset({PromotionState.WAITING, PromotionState.APPROVED}),
    PromotionState.EXPIRED: frozenset({PromotionState.WAITING, PromotionState.APPROVED, PromotionState.REFUSED}),
    PromotionState.FAILED: frozenset({PromotionState.WAITING, PromotionState.APPROVED, PromotionState.REFUSED}),
    PromotionState.PROMOTED: frozenset(),
}
"""From each state of a promotion, the states it may move to."""

PROMOTION_BEGINNINGS: frozenset[PromotionState] = frozenset({PromotionState.WAITING, PromotionState.APPROVED})
"""States in which a promotion may begin."""

RUN_ENDS: frozenset[RunState] = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED})
"""States in which nothing of the run is at work."""

ATTEMPT_ENDS: frozenset[AttemptState] = _ENDS
"""States in which nothing of the attempt is at work."""


def run_sources(target: RunState) -> frozenset[RunState]:
    """The states from which a run may move to ``target``."""
    return frozenset(source for source, targets in RUN_MOVES.items() if target in targets)


def promotion_sources(target: PromotionState) -> frozenset[PromotionState]:
    """The states from which a promotion may move to ``target``."""
    return frozenset(source for source, targets in PROMOTION_MOVES.items() if target in targets)


def attempt_sources(target: AttemptState) -> frozenset[AttemptState]:
    """The states from which an attempt may move to ``target``."""
    return frozenset(source for source, targets in ATTEMPT_MOVES.items() if target in targets)
