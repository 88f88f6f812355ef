"""The report of one run: one self-contained HTML file for screen, phone and paper."""

import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf_core import __version__
from rlhf_core.files.whole import write_text
from rlhf_core.history.queries.metrics import STEP_SECONDS
from rlhf_core.history.store import HistoryStore
from rlhf_core.render import charts, samples
from rlhf_core.render.config_text import as_toml
from rlhf_core.render.gather import FiniteScore, ReportData, find_row, gather
from rlhf_core.render.markup import (
    Markup,
    badges,
    code,
    duration,
    facts,
    fold,
    join,
    moment,
    remark,
    section,
    signed,
    table,
    tag,
    words,
)
from rlhf_core.render.promotion import promotion
from rlhf_core.render.run_sections import timeline_section
from rlhf_core.render.series import Point, finite
from rlhf_core.render.weight_syncs import weight_sync_text
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.evaluation import EVALUATIONS, display_order, gain
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import attributed, count


def write_report(store: HistoryStore, run_dir: RunDir, out: Path) -> Path:
    """Write the report of a run in any state, including one that failed before its first step.

    Args:
        store: history that has the run.
        run_dir: its directory. If it is gone, training samples and model size are left out, and the report says so.
        out: file to write; replaced as a whole.

    Returns:
        ``out``.

    Raises:
        UnknownRun: the history does not have the run.
        OSError: ``out`` cannot be written.
    """
    write_text(out, page(gather(store, run_dir)))
    return out


def page(record: ReportData) -> str:
    """Build the whole document."""
    history, plotted = timeline_section(record), _plots(record)
    return document(
        f"{record.run['name']} · {record.run_id}",
        _header(record),
        _tiles(record),
        promotion(record),
        _facts(record),
        *([history, plotted] if record.state == "failed" else [plotted, history]),
        *_completions(record),
        _settings(record),
        tag("footer", f"Made {moment(utc_now())} by rlhf-flows {__version__} from the history of {record.run_id}."),
    )


def _completions(record: ReportData) -> list[Markup]:
    """Sections with completions of the model. Those that an external trainer samples in training are not available."""
    evaluated = section("What the model wrote", samples.evaluation_samples(record))
    if charts.is_elsewhere(record):
        return [evaluated] if record.tables else []
    return [evaluated, section("Sampled in training", samples.training_samples(record))]


def document(title: str, *content: object) -> str:
    """Build a page with a title, in the style of all reports."""
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        tag("style", Markup(resources.files("rlhf_core.render").joinpath("report.css").read_text(encoding="utf-8"))),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{tag("body", tag("main", *content))}</html>\n'


# ---------------------------------------------------------------------------------------------------------------------
# The first screen


def _header(record: ReportData) -> Markup:
    return tag(
        "header",
        tag("p", code(record.run_id), class_="id"),
        tag("h1", record.run["name"], " ", badges(record.state, record.regressed)),
        tag("p", _outcome(record), class_="lead"),
        *map(remark, record.notes),
    )


def _outcome(record: ReportData) -> Markup:
    """Describe the outcome of the run in one sentence."""
    took = duration(record.goodput["wall_s"])
    if record.state == "completed":
        return join([f"Completed in {took}.", *_changes(record)], " ")
    if record.state == "failed":
        return join([f"Failed after {took}:", _diagnosis(record)], " ")
    if record.state == "cancelled":
        return join([f"Cancelled after {took}:", record.run["message"]], " ")
    return join([f"Not over yet (state {record.state}); the report shows what was known at {moment(utc_now())}."])


def _changes(record: ReportData) -> list[str]:
    """Describe the changes of the held-out evaluations, claiming no more than the intervals allow."""
    sentences = []
    for name in EVALUATIONS:
        before, after = _pair(record, name)
        if before is None or after is None:
            continue
        metric = f"{name} {words(after.metric)}"
        values = f"from {before.point.value:.3f} to {after.point.value:.3f}"
        if after.point.low > before.point.high:
            sentences.append(f"Held-out {metric} rose {values}.")
        elif after.point.high < before.point.low:
            sentences.append(f"Held-out {metric} fell {values}.")
        else:
            sentences.append(f"Held-out {metric} went {values}; the confidence intervals overlap.")
    if record.regressed:
        sentences.append("The model is worse than before training.")
    return sentences


def _diagnosis(record: ReportData) -> str:
    message = record.run["message"]
    attempt: Mapping[str, Any] = record.attempts[-1] if record.attempts else {}
    # A run that is resumed may fail before its next attempt, and not for the reason of its last incident.
    if record.timeline.incidents and message in (attempt.get("message"), attempt.get("failure_kind")):
        last = record.timeline.incidents[-1].incident
        return f"{words(last.failure_kind.value)}. {last.message}"
    return message


def _pair(record: ReportData, name: str) -> tuple[FiniteScore | None, FiniteScore | None]:
    """The scores of one name before and after training."""
    scores = {one.when: one for one in record.finite_scores if one.name == name}
    return scores.get("before"), scores.get("after")


def _tiles(record: ReportData) -> Markup:
    names = sorted({row["name"] for row in record.evaluations}, key=display_order)
    tiles = [*(_evaluation_tile(record, name) for name in names), _reward_tile(record), _goodput_tile(record)]
    shown = [tile for tile in tiles if tile]
    return tag("div", *shown, class_="tiles") if shown else Markup("")


def _evaluation_tile(record: ReportData, name: str) -> Markup | None:
    before, after = _pair(record, name)
    found = after or before
    if found is None:
        return None
    title = f"{words(found.metric)}, {name}"
    if before is None or after is None:
        detail = join([f"{found.when} training, interval ", _interval(found.point)])
        return _tile(title, None, f"{found.point.value:.3f}", detail)
    gained = gain(name, before.point.value, after.point.value)
    change = tag("b", signed(gained), class_="good" if gained > 0 else "bad" if gained < 0 else None)
    detail = join([change, " · intervals ", _interval(before.point), " and ", _interval(after.point)])
    return _tile(title, f"{before.point.value:.3f}", f"{after.point.value:.3f}", detail)


def _reward_tile(record: ReportData) -> Markup | None:
    reward = [value for _, value in finite(record.curves.get("reward/mean", ()))]
    if not reward:
        return None
    edge = max(1, min(5, len(reward) // 2))
    start, end = sum(reward[:edge]) / edge, sum(reward[-edge:]) / edge
    detail = f"mean of the first and of the last {edge} of {count(len(reward), 'step')}"
    return _tile("reward", f"{start:.3f}", f"{end:.3f}", detail)


def _goodput_tile(record: ReportData) -> Markup | None:
    share = record.goodput["ettr"]
    # Not every trainer logs step times; without them the share would be 0.
    if share is None or STEP_SECONDS not in record.curves:
        return None
    known = record.goodput
    detail = f"{duration(known['productive_s'])} of steps that count in {duration(known['wall_s'] - known['queue_s'])}"
    if known["repeated_s"]:
        detail += f"; {duration(known['repeated_s'])} made again"
    return _tile("goodput", None, f"{share:.0%}", detail)


def _tile(title: str, before: str | None, value: str, detail: object) -> Markup:
    arrow = tag("span", before, " → ", class_="before") if before is not None else ""
    parts = tag("p", title), tag("p", arrow, value, class_="value"), tag("p", detail, class_="detail")
    return tag("div", *parts, class_="tile")


def _interval(point: Point) -> Markup:
    return tag("span", f"[{point.low:.3f}, {point.high:.3f}]", class_="interval")


# ---------------------------------------------------------------------------------------------------------------------
# Facts


def _facts(record: ReportData) -> Markup:
    run = record.run
    return section(
        "Facts",
        facts(
            [
                ("asked for by", attributed(run["owner"], run["owner_account"])),
                ("created", moment(run["created_at"])),
                ("wall time", duration(record.goodput["wall_s"])),
                ("by stage", _by_stage(record)),
                (
                    "not counted",
                    f"{duration(run['undriven_s'])} in which nothing drove the run" if run["undriven_s"] >= 1 else "",
                ),
                *_requested(record),
                (
                    "attempts",
                    f"{len(record.attempts)}, with {count(record.restarts_in_place(), 'restart')} in place"
                    if record.attempts
                    else "none",
                ),
                ("weight syncs", weight_sync_text(record.weight_syncs)),
                ("version", f"rlhf-flows {run['package_version']}"),
                ("code revision", run["code_revision"] or "not in a repository"),
                ("interpreter", _checked(record, "environment.python")),
                ("packages", _checked(record, "environment.packages")),
                ("the trainer's environment", _checked(record, "command.environment")),
            ]
        ),
    )


def _checked(record: ReportData, check: str) -> str:
    """Finding of a preflight check, if it passed."""
    found = find_row(record.checks, id=check, status="passed")
    return found["found"] if found else ""


def _by_stage(record: ReportData) -> str:
    seconds: dict[str, float] = {}
    for stage in record.stages:
        seconds[stage["name"]] = seconds.get(stage["name"], 0.0) + stage["seconds"]
    return ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())


def _requested(record: ReportData) -> list[tuple[str, object]]:
    spec = record.spec
    if spec is None:
        return []
    steps = f"{count(spec.total_steps - spec.warm_start_steps, 'step')} of {spec.algorithm.upper()}"
    if spec.warm_start_steps:
        steps = f"{count(spec.warm_start_steps, 'warm-start step')}, then {steps}"
    hardware = "CPU" if not spec.resources.gpus_per_node else count(spec.resources.gpus_per_node, "GPU") + " per node"
    built = f"{spec.model.config['model_type']} from random weights" if spec.model.config else "named by the trainer"
    model = spec.model.path or built
    if spec.model.tokenizer:
        model += f", {spec.model.tokenizer} tokenizer"
    if record.num_parameters:
        model += f", {record.num_parameters / 1e6:,.2f} M parameters"
    return [
        ("training", steps),
        ("model", model),
        ("data", _data(spec)),
        ("ranks", f"{spec.num_ranks} on {count(spec.num_trainer_nodes, 'node')}, {hardware}"),
        *_requested_engines(spec),
        ("seed", spec.seed),
    ]


def _data(spec: RunSpec) -> str:
    """Sources of the training rows, with their weights if they have some."""
    if spec.data.sources:
        weights = spec.data.weights
        shown = {name: f" (weight {weight:g})" if weight else "" for name, weight in weights.items()}
        return ", ".join(f"{name}{shown[name]}: {one.train}" for name, one in spec.data.of_split("train").items())
    return spec.data.train or (code(spec.data.generator) if spec.data.generator else "named by the trainer")


def _requested_engines(spec: RunSpec) -> list[tuple[str, object]]:
    rollout = spec.rollout
    if not rollout.engines:
        return []
    location = f"on {count(rollout.nodes, 'node')} of their own" if rollout.nodes else "beside the trainers"
    return [("rollout engines", f"{rollout.engines} of {rollout.engine}, {location}")]


def _plots(record: ReportData) -> Markup:
    if not record.curves and not record.evaluations:
        return section("Learning", remark("No step was made, so there is nothing to draw."))
    learning, speed = charts.learning_plots(record), charts.speed_plots(record)
    return join([section("Learning", learning), section("Speed", speed)])


# ---------------------------------------------------------------------------------------------------------------------
# Settings and all numbers


def _settings(record: ReportData) -> Markup:
    given = ["rlhf", "run", record.run["config_source"]]
    for override in record.run["overrides"]:
        given += ["--set", override]
    parts: list[object] = [tag("p", "Asked for with ", code(shlex.join(given)))]
    if record.spec:
        parts.append(tag("h3", "Settings that differ from the defaults"))
        parts.append(tag("pre", as_toml(record.spec, only_set=True)))
        parts.append(fold("All settings", tag("pre", as_toml(record.spec))))
    parts.append(_all_metrics(record))
    return section("Settings and numbers", *parts)


def _all_metrics(record: ReportData) -> Markup:
    if not record.curves:
        return remark("The run has no metrics.")
    rows = []
    for name, curve in sorted(record.curves.items()):
        values = [value for _, value in finite(curve)]
        extremes = [min(values), max(values)] if values else [None, None]
        rows.append([code(name), len(curve), curve[0][1], curve[-1][1], *extremes, len(curve) - len(values)])
    headers = ["metric", "steps", "first", "last", "lowest", "highest", "not finite"]
    return fold(f"All {count(len(rows), 'metric')}", table(headers, rows))
