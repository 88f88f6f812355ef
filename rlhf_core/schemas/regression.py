"""Regression of a run: held-out scores that are significantly lower after training than before, or a cross-entropy that
is higher. One rule for all views.

A run may succeed and end ``completed`` with a model that is worse than the initial one.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.evaluation import CROSS_ENTROPY, PASS, gain

REGRESSED = "regressed"
"""Word shown beside the state of such a run."""


class Regression(Schema):
    """One held-out score that decreased, or a cross-entropy that increased, with disjoint confidence intervals."""

    name: str
    """Name of the evaluation, for instance ``greedy``."""
    metric: str
    """Measure, for instance ``exact_match``."""
    before: float
    """Mean score or loss before the main algorithm."""
    after: float
    """Mean score or loss after training."""


def regressions(evaluations: Iterable[Mapping[str, Any]]) -> tuple[Regression, ...]:
    """Find the scores that decreased and the cross-entropies that increased, in the order of the evaluations.

    Other losses are ignored: that of preferences may rise while the ranking improves, because it starts as if every
    pair were a tie, and counts a few pairs that are ranked wrongly with confidence more than many ranked rightly. So is
    pass@k, which falls when training makes completions of a prompt alike, even if more of them are right.

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
        if {"before", "after"} <= found.keys()
        and not name.startswith(PASS)
        and (name != "loss" or metric == CROSS_ENTROPY)
        and _is_worse(name, found["before"], found["after"])
    )


def _is_worse(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    if gain(name, before["value"], after["value"]) >= 0:
        return False
    return bool(after["ci_high"] < before["ci_low"] or after["ci_low"] > before["ci_high"])


def regression_text(found: Iterable[Regression]) -> str:
    """Describe the worse scores, without a full stop; empty if there are none."""
    changes = [f"{one.name} {one.metric.replace('_', ' ')} {one.before:.3f} → {one.after:.3f}" for one in found]
    return f"the model is worse than before training: held-out {', '.join(changes)}" if changes else ""


def state_text(state: str, found: Iterable[Regression]) -> str:
    """The state of a run, with a regression beside it."""
    return f"{state}, {REGRESSED}" if state == "completed" and tuple(found) else state
