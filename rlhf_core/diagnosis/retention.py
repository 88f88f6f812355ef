"""Choice of the checkpoints that may be removed. Pure; the trainer removes them during training, the site daemon
later."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rlhf_core.schemas.attempts import PromotionState
from rlhf_core.schemas.run import RunSpec

_NEEDED_STATES = frozenset(PromotionState) - {PromotionState.REFUSED, PromotionState.EXPIRED}
"""States of a promotion in which its checkpoint is still needed, or is the source of a model."""


@dataclass(frozen=True)
class Scored:
    """Score of a checkpoint in one evaluation."""

    name: str
    step: int
    value: float


def removable(
    made_at: dict[int, datetime],
    evaluations: Sequence[Scored],
    promotion: tuple[str, int] | None,
    used: Collection[int],
    *,
    ended_at: datetime | None,
    days: int,
    now: datetime,
) -> list[int]:
    """Steps of the complete checkpoints that may go, the oldest first.

    Args:
        made_at: when each complete checkpoint was made, by its step.
        evaluations: what was measured of them.
        promotion: state and step of the promotion of the run's model; None where there is none.
        used: steps that something else needs, for instance another run that begins from one.
        ended_at: end of the run; None while it is active: then all are kept.
        days: how long a checkpoint is kept after it was made and its run has ended; 0 keeps all.
        now: the present.
    """
    if not days or ended_at is None or not made_at:
        return []
    kept = {max(made_at), *used}
    for name in {one.name for one in evaluations}:
        # The later of two that are equally good has learnt more.
        kept.add(max((one for one in evaluations if one.name == name), key=lambda one: (one.value, one.step)).step)
    if promotion is not None and promotion[0] in _NEEDED_STATES:
        kept.add(promotion[1])
    latest = now - timedelta(days=days)
    return [step for step, made in sorted(made_at.items()) if step not in kept and max(made, ended_at) < latest]


def kept_steps(steps: Sequence[int], newest: int, spec: RunSpec) -> set[int]:
    """Choose the checkpoints that are kept when the one of step ``newest`` is complete.

    Args:
        steps: of all complete checkpoints, ascending.
    """
    judged_since = newest - spec.health.window_steps
    # Training that has learned nothing for a window goes back to before that window; and what is to be that checkpoint
    # once the present one is needed no more must live until then.
    before = [step for step in steps if step <= judged_since][-1:]
    within = [step for step in steps if step > judged_since][:1]
    return {*steps[-spec.checkpoint.keep_last :], spec.warm_start_steps, newest, *before, *within}
