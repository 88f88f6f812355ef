"""Differences between runs: settings, evaluations, metrics, time, incidents."""

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.errors import BadInput
from rlhf_core.history import queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.queries.rows import EvaluationRow, RunRow
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.config_text import flat
from rlhf_core.render.series import Curve, finite
from rlhf_core.schemas.evaluation import gain
from rlhf_core.schemas.migration import current_document

Facts = dict[str, Any]

MOST_RUNS = 7
"""Maximum number of runs: as many as there are colours that a reader can distinguish."""

KEY_METRICS = (
    "reward/mean",
    "eval/greedy",
    "eval/loss",
    "train/loss",
    "train/grad_norm",
    "policy/kl",
    "rollout/entropy",
    "rollout/length_mean",
    "time/step_s",
    "speed/tokens_per_s",
)
"""Metrics compared by default, as far as a run has them."""

_LABELS = "ABCDEFG"
_NO_SETTING = "(none)"
_WARM_START = "loops.warm_start."


def compare(store: HistoryStore, run_ids: Sequence[str], metrics: Sequence[str] = ()) -> Facts:
    """Compare runs.

    Args:
        run_ids: two to :data:`MOST_RUNS`; the first is the baseline.
        metrics: names of metrics; empty for :data:`KEY_METRICS`.

    Returns:
        ``runs`` (facts of each, with a ``label``: A, B ...), ``config`` (``setting, values``: the differences),
        ``evaluations``, ``metrics`` (``key, step, values, note``: at the last common step) and ``curves`` (metric to
        the curve of each run). Lists inside follow the order of the runs.

    Raises:
        BadInput: fewer than two different runs, or too many; a metric that none of them has.
        UnknownRun: the history does not have one of them.
    """
    if len(set(run_ids)) < 2 or len(set(run_ids)) != len(run_ids):
        raise BadInput(f"found {', '.join(run_ids) or 'no run'}; give two or more different runs to compare")
    if len(run_ids) > MOST_RUNS:
        raise BadInput(f"found {len(run_ids)} runs; at most {MOST_RUNS} can be compared at a time")
    runs = [queries.show_run(store, run_id) for run_id in run_ids]
    keys = _selected_metrics(runs, metrics)
    curves = [queries.curve(store, run_id, keys) for run_id in run_ids]
    curves_of = {key: [of_run[key] for of_run in curves] for key in keys}
    return {
        "runs": [_run(label, details) for label, details in zip(_LABELS, runs, strict=False)],
        "config": config_differences([details.run["spec"] for details in runs]),
        "evaluations": evaluations([details.evaluations for details in runs]),
        "metrics": [_metric(key, curves_of[key], runs) for key in keys],
        "curves": curves_of,
    }


def _selected_metrics(runs: Sequence[RunDetails], metrics: Sequence[str]) -> list[str]:
    known = {key for details in runs for key in details.metric_keys}
    for key in metrics:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            suggestion = f"; did you mean {near[0]}?" if near else f". They have: {', '.join(sorted(known)) or 'none'}."
            raise BadInput(f"none of the runs has the metric {key!r}{suggestion}")
    return list(metrics) or [key for key in KEY_METRICS if key in known]


def _run(label: str, details: RunDetails) -> Facts:
    run: Mapping[str, Any] = details.run
    incidents = details.counted_incidents
    kept = ("run_id", "name", "state", "algorithm", "created_at", "total_steps", "num_attempts", "seed")
    times = ("wall_s", "queue_s", "productive_s", "repeated_s", "lost_s", "ettr")
    return {
        "label": label,
        **{name: run[name] for name in kept},
        "regressed": details.regressed,
        "last_step": details.last_step,
        "warm_start_steps": warm_start_steps(details.run),
        **{name: details.goodput.get(name) for name in times},
        "num_incidents": len(incidents),
        "incidents": dict(Counter(incident["failure_kind"] for incident in incidents)),
    }


def warm_start_steps(run: RunRow) -> int:
    """Steps before the main loop."""
    return int(_warm_start(run["spec"])["num_steps"])


def _warm_start(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    loops = current_document(spec).get("loops", {})
    return loops.get("warm_start") or {"num_steps": 0}


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def config_differences(specs: Sequence[Mapping[str, Any]]) -> list[Facts]:
    """The settings that differ between specs, by dotted name; a setting that a spec lacks is ``(none)``."""
    settings = [flat(_comparable(spec)) for spec in specs]
    no_warm_start = any(not of_run.get(f"{_WARM_START}num_steps") for of_run in settings)
    found = []
    for name in sorted(set().union(*settings)):
        if no_warm_start and name.startswith(_WARM_START) and name != f"{_WARM_START}num_steps":
            continue  # a run without a warm start has no warm-start settings
        values = [of_run.get(name, _NO_SETTING) for of_run in settings]
        if any(value != values[0] for value in values):
            found.append({"setting": name, "values": values})
    return found


def _comparable(spec: Mapping[str, Any]) -> dict[str, Any]:
    document = current_document(spec)
    return {**document, "loops": {**document.get("loops", {}), "warm_start": _warm_start(document)}}


# ---------------------------------------------------------------------------------------------------------------------
# Evaluations


def evaluations(rows: Sequence[Sequence[EvaluationRow]]) -> list[Facts]:
    """Evaluations side by side: ``name, metric, runs``, and for each run ``before``, ``after``, ``gain`` (null if
    missing) and ``against_first``, which compares its last value with the first run's: ``higher`` or ``lower`` if the
    confidence intervals are disjoint, ``overlap`` otherwise."""
    kinds = dict.fromkeys((row["name"], row["metric"]) for of_run in rows for row in of_run)
    found = []
    for name, metric in kinds:
        kept = [[row for row in of_run if (row["name"], row["metric"]) == (name, metric)] for of_run in rows]
        sides = [_sides(name, of_run) for of_run in kept]
        first = sides[0]["after"]
        compared = [{**side, "against_first": _standing(first, side["after"])} for side in sides[1:]]
        found.append({"name": name, "metric": metric, "runs": [{**sides[0], "against_first": None}, *compared]})
    return found


def _sides(name: str, rows: Sequence[EvaluationRow]) -> Facts:
    kept = ("value", "ci_low", "ci_high", "checkpoint_step", "num_samples")
    found: Facts = {"before": None, "after": None}
    found |= {row["when"]: {key: row.get(key) for key in kept} for row in rows if row["value"] is not None}
    before, after = found["before"], found["after"]
    return {**found, "gain": gain(name, before["value"], after["value"]) if before and after else None}


def _standing(first: Facts | None, other: Facts | None) -> str | None:
    if first is None or other is None or None in (first["ci_low"], first["ci_high"], other["ci_low"], other["ci_high"]):
        return None
    if other["ci_low"] > first["ci_high"]:
        return "higher"
    return "lower" if other["ci_high"] < first["ci_low"] else "overlap"


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def _metric(key: str, curves: Sequence[Curve], runs: Sequence[RunDetails]) -> Facts:
    found = at_last_common_step(key, curves, [details.run for details in runs])
    removed = [
        label
        for label, details, curve in zip(_LABELS, runs, curves, strict=False)
        if details.run["metrics_pruned"] and key in details.metrics and not curve
    ]
    note = f"removed of {', '.join(removed)} with `rlhf db prune`" if removed else ""
    return {"key": key, **found, "note": "; ".join(filter(None, (found["note"], note)))}


def at_last_common_step(key: str, curves: Sequence[Curve], runs: Sequence[RunRow]) -> Facts:
    """The values of a metric at the last step common to all runs that have the metric.

    A loss means different things in supervised and in reinforcement learning, so a step at which all runs are in the
    same loop is preferred; if there is none, a note says so. Runs without a common step are shown at their last step.

    Returns:
        ``step`` (null without a common one), ``values`` (null for a run without the metric) and ``note``.
    """
    known = [dict(finite(curve)) for curve in curves]
    having = [index for index, values in enumerate(known) if values]
    common = set[int].intersection(*(set(known[index]) for index in having)) if len(having) > 1 else set()
    if not common:
        values = [points[max(points)] if points else None for points in known]
        note = "no step in common: the last value of each" if len(having) > 1 else ""
        return {"step": None, "values": values, "note": note}

    def loops(step: int) -> list[str]:
        return [_loop(runs[index], step) for index in having]

    same_loop = [step for step in common if len(set(loops(step))) == 1]
    step = max(same_loop or common)
    note = ""
    if not same_loop and key.startswith("train/"):
        note = f"not the same quantity: {' and '.join(dict.fromkeys(loops(step)))}"
    return {"step": step, "values": [points.get(step) for points in known], "note": note}


def _loop(run: RunRow, step: int) -> str:
    warm_start = _warm_start(run["spec"])
    return str(warm_start["algorithm"]["name"] if step <= warm_start["num_steps"] else run["algorithm"])
