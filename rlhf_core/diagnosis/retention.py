"""Choice of the checkpoints that may be removed. Pure; the trainer removes them during training, the site daemon
later."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rlhf_core.schemas.attempts import PromotionState
from rlhf_core.schemas.checkpoint_files import BestCheckpoint
from rlhf_core.schemas.evaluation import PASS, gain
from rlhf_core.schemas.run import RunSpec

_NEEDED_STATES = frozenset(PromotionState) - {PromotionState.REFUSED, PromotionState.EXPIRED}
"""States of a promotion that need its checkpoint, or in which it is the source of a model."""


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
    """Steps of the complete checkpoints that may be removed, oldest first.

    Args:
        made_at: creation time of each complete checkpoint, by step.
        evaluations: scores of the checkpoints. pass@k retains none.
        promotion: state and step of the promotion of the run's model; None if there is none.
        used: steps needed otherwise, for instance by a run that starts from one.
        ended_at: end of the run; None while it is active, when all are retained.
        days: retention time after the creation of the checkpoint and the end of its run; 0 retains all.
        now: current time.
    """
    if not days or ended_at is None or not made_at:
        return []
    kept = {max(made_at), *used}
    # pass@k may be the best before training, which makes completions of a prompt alike.
    for name in {one.name for one in evaluations if not one.name.startswith(PASS)}:
        of_name = [one for one in evaluations if one.name == name]
        # Of two equal scores, the later checkpoint has been trained for longer.
        kept.add(max(of_name, key=lambda one: (gain(one.name, 0, one.value), one.step)).step)
    if promotion is not None and promotion[0] in _NEEDED_STATES:
        kept.add(promotion[1])
    latest = now - timedelta(days=days)
    return [step for step, made in sorted(made_at.items()) if step not in kept and max(made, ended_at) < latest]


def best_until(before: BestCheckpoint | None, step: int, metric: str, value: float) -> BestCheckpoint | None:
    """The best checkpoint once that of another step is complete. Of two equal ones, the later has been trained for
    longer.

    Args:
        before: the best before, with another metric if the settings have changed since; None if there was none.
        metric: name of the metric, ``eval/`` and the evaluation.
        value: value of the metric. One that is not finite does not count.
    """
    name = metric.removeprefix("eval/")
    is_worse = before is not None and before.metric == metric and gain(name, before.value, value) < 0
    return before if is_worse or not math.isfinite(value) else BestCheckpoint(step=step, metric=metric, value=value)


def kept_steps(steps: Sequence[int], newest: int, spec: RunSpec) -> set[int]:
    """Choose the checkpoints to retain once the one of step ``newest`` is complete.

    Args:
        steps: steps of all complete checkpoints, ascending.
    """
    judged_since = newest - spec.health.window_steps
    # Training that has learned nothing for a window rolls back to before that window, so the checkpoint before it and
    # the first one within it, its successor, are retained.
    before = [step for step in steps if step <= judged_since][-1:]
    within = [step for step in steps if step > judged_since][:1]
    return {*steps[-spec.checkpoint.keep_last :], spec.warm_start_steps, newest, *before, *within}
