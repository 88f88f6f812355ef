"""Regression of a run: held-out scores that are significantly lower after training than before. One rule for all views.

A run may succeed and end ``completed`` with a model that is worse than the initial one.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.schemas.base import Schema

REGRESSED = "regressed"
"""Word shown beside the state of such a run."""


class Regression(Schema):
    """One held-out score that decreased, with disjoint confidence intervals."""

    name: str
    """Name of the evaluation: ``greedy`` or ``sampled``."""
    metric: str
    """Measure, for instance ``exact_match``."""
    before: float
    """Mean score before the main algorithm."""
    after: float
    """Mean score after training."""


def regressions(evaluations: Iterable[Mapping[str, Any]]) -> tuple[Regression, ...]:
    """Find the scores that decreased, in the order of the evaluations.

    Args:
        evaluations: with ``name, when, metric, value, ci_low, ci_high``, as in ``rlhf show --json``. One without a
            finite interval is ignored.
    """
    by_name: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in evaluations:
        if all(row[key] is not None and math.isfinite(row[key]) for key in ("value", "ci_low", "ci_high")):
            by_name.setdefault((row["name"], row["metric"]), {})[row["when"]] = row
    return tuple(
        Regression(name=name, metric=metric, before=found["before"]["value"], after=found["after"]["value"])
        for (name, metric), found in by_name.items()
        if {"before", "after"} <= found.keys() and found["after"]["ci_high"] < found["before"]["ci_low"]
    )


def regression_text(found: Iterable[Regression]) -> str:
    """Describe the decreased scores, without a full stop; empty if there are none."""
    changes = [f"{one.name} {one.metric.replace('_', ' ')} {one.before:.3f} → {one.after:.3f}" for one in found]
    return f"the model is worse than before training: held-out {', '.join(changes)}" if changes else ""


def state_text(state: str, found: Iterable[Regression]) -> str:
    """The state of a run, with a regression beside it."""
    return f"{state}, {REGRESSED}" if state == "completed" and tuple(found) else state
