"""Comparison of runs as a single self-contained HTML file."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_core import __version__
from rlhf_core.files.whole import write_text
from rlhf_core.render import plots
from rlhf_core.render.config_text import setting_text
from rlhf_core.render.markup import (
    Markup,
    badges,
    code,
    duration,
    figure,
    join,
    moment,
    remark,
    section,
    signed,
    table,
    tag,
    words,
)
from rlhf_core.render.run_page import document
from rlhf_core.render.series import Marks, Point, PointSeries, Series, finite, is_finite, smoothing_window
from rlhf_core.schemas.base import utc_now
from rlhf_core.text.formatting import count

Facts = Mapping[str, Any]

_STANDING = {
    "higher": "higher than A",
    "lower": "lower than A",
    "overlap": "intervals overlap with A",
}


def write_comparison(compared: Facts, out: Path) -> Path:
    """Write the page of a comparison (:func:`rlhf_core.render.compare.compare`).

    Raises:
        OSError: ``out`` cannot be written.
    """
    write_text(out, page(compared, utc_now()))
    return out


def page(compared: Facts, made_at: datetime) -> str:
    """Build the whole document."""
    runs = compared["runs"]
    return document(
        "Comparison: " + ", ".join(run["run_id"] for run in runs),
        tag(
            "header",
            tag("h1", "Comparison of " + count(len(runs), "run")),
            tag("p", _lead(compared), class_="lead"),
        ),
        section("Runs", _runs(runs)),
        section("Evaluations", _evaluations(compared), _evaluation_plots(compared)),
        section("Curves", _curves(compared), note="Steps that count: where a step was made again, its last value."),
        section("Metrics at the last common step", _metrics(compared)),
        section("Settings that differ", _config(compared)),
        section("Time and incidents", _time(runs)),
        tag("footer", f"Made {moment(made_at)} by rlhf-flows {__version__}."),
    )


def _lead(compared: Facts) -> str:
    """Summarise the comparison in a few sentences that claim no more than the intervals allow."""
    sentences = []
    for evaluation in compared["evaluations"]:
        for run, of_run in zip(compared["runs"], evaluation["runs"], strict=True):
            if of_run["against_first"] is not None:
                name = f"{evaluation['name']} {words(evaluation['metric'])}"
                sentences.append(f"{run['label']}: {name} {_STANDING[of_run['against_first']]}.")
    differing = count(len(compared["config"]), "setting")
    return " ".join([*sentences, f"{differing} {'differs' if len(compared['config']) == 1 else 'differ'}."])


def _label(index: int, label: str) -> Markup:
    """Format a run's letter in the colour of its curves."""
    return tag("b", label, style=f"color: var(--series-{index % 7 + 1})")


def _labels(runs: Sequence[Facts]) -> list[Markup]:
    return [_label(index, run["label"]) for index, run in enumerate(runs)]


def _runs(runs: Sequence[Facts]) -> Markup:
    rows = [
        [
            label,
            code(run["run_id"]),
            badges(run["state"], run["regressed"]),
            run["algorithm"].upper(),
            f"{run['last_step']} of {run['total_steps']}",
            moment(run["created_at"]),
        ]
        for label, run in zip(_labels(runs), runs, strict=True)
    ]
    return table(["", "run", "state", "algorithm", "steps", "asked for"], rows, class_="runs")


def _config(compared: Facts) -> Markup:
    if not compared["config"]:
        return remark("None: the runs were asked for with the same settings.")
    rows = [
        [code(row["setting"]), *(code(setting_text(value)) for value in row["values"])] for row in compared["config"]
    ]
    return table(["setting", *(run["label"] for run in compared["runs"])], rows)


def _evaluations(compared: Facts) -> Markup:
    rows = [
        [
            f"{evaluation['name']}, {words(evaluation['metric'])}",
            label,
            _measured(of_run["before"]),
            _measured(of_run["after"]),
            None if of_run["gain"] is None else signed(of_run["gain"]),
            _STANDING.get(of_run["against_first"] or "", ""),
        ]
        for evaluation in compared["evaluations"]
        for label, of_run in zip(_labels(compared["runs"]), evaluation["runs"], strict=True)
    ]
    if not rows:
        return remark("None of the runs was evaluated.")
    return table(["evaluation", "", "before", "after", "gain", "after training"], rows)


def _measured(value: Facts | None) -> Markup | None:
    if value is None:
        return None
    if value["ci_low"] is None or value["ci_high"] is None:
        return Markup(f"{value['value']:.3f}")
    interval = tag("span", f" [{value['ci_low']:.3f}, {value['ci_high']:.3f}]", class_="interval note")
    return join([f"{value['value']:.3f}", interval])


def _evaluation_plots(compared: Facts) -> Markup:
    figures = []
    for position, evaluation in enumerate(compared["evaluations"]):
        series = []
        for run, of_run in zip(compared["runs"], evaluation["runs"], strict=True):
            points = tuple(
                Point(found["checkpoint_step"], found["value"], found["ci_low"], found["ci_high"])
                for found in (of_run["before"], of_run["after"])
                if found is not None and all(map(is_finite, (found["value"], found["ci_low"], found["ci_high"])))
            )
            series.append(PointSeries(run["label"], points))
        if any(item.points for item in series):
            title = f"{evaluation['name']} {words(evaluation['metric'])}"
            svg = plots.point_chart(
                series,
                unit=words(evaluation["metric"]),
                marks=_marks(compared["runs"]),
                name=f"evaluation-{position}",
                description=title,
            )
            figures.append(figure(title, svg, "Before and after training, with confidence intervals."))
    return tag("div", *figures, class_="plots") if figures else Markup("")


def _curves(compared: Facts) -> Markup:
    figures = []
    for position, (key, curves) in enumerate(compared["curves"].items()):
        series = [
            Series(run["label"], curve, index)
            for index, (run, curve) in enumerate(zip(compared["runs"], curves, strict=True))
            if finite(curve)
        ]
        if not series:
            continue
        window = max(smoothing_window(len(item.curve)) for item in series)
        svg = plots.line_chart(
            series,
            unit=key.rpartition("/")[2].replace("_", " "),
            marks=_marks(compared["runs"]),
            name=f"curve-{position}",
            description=f"{key} of {', '.join(item.label for item in series)}",
        )
        caption = f"Bold: mean over up to {window} steps; faint: single steps." if window > 1 else ""
        figures.append(figure(key, svg, caption))
    if not figures:
        return remark("None of the runs made a step.")
    return tag("div", *figures, class_="plots")


def _marks(runs: Sequence[Facts]) -> Marks:
    """The same axis for all runs; the warm start is shaded if all runs had the same one."""
    borders = {run["warm_start_steps"] for run in runs}
    return Marks(
        last_step=max(1, *(run["last_step"] for run in runs)),
        warm_start_steps=borders.pop() if len(borders) == 1 else 0,
    )


def _metrics(compared: Facts) -> Markup:
    noted = any(row["note"] for row in compared["metrics"])
    rows = [
        [code(row["key"]), row["step"], *row["values"], *([row["note"]] if noted else [])]
        for row in compared["metrics"]
    ]
    if not rows:
        return remark("None of the runs has these metrics.")
    headers = ["metric", "step", *(run["label"] for run in compared["runs"]), *([""] if noted else [])]
    return table(headers, rows)


def _time(runs: Sequence[Facts]) -> Markup:
    rows = [
        [
            label,
            duration(run["wall_s"]),
            duration(run["queue_s"]),
            "–" if run["ettr"] is None else f"{run['ettr']:.0%}",
            duration(run["repeated_s"]),
            duration(run["lost_s"]),
            run["num_attempts"],
            ", ".join(f"{words(kind)} × {number}" for kind, number in run["incidents"].items()) or "none",
        ]
        for label, run in zip(_labels(runs), runs, strict=True)
    ]
    headers = ["", "wall time", "in queues", "goodput", "made again", "lost to failures", "attempts", "incidents"]
    return table(headers, rows)
