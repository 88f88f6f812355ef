"""Plots of a report, and the sentences that replace those that cannot be drawn."""

from collections.abc import Sequence

from rlhf_core.render import plots
from rlhf_core.render.gather import ReportData
from rlhf_core.render.line_plots import (
    LEARNING,
    LEARNING_ELSEWHERE,
    SPEED,
    LinePlot,
    kinds_of_loops,
    of_stage,
    source_plots,
    stages_of,
)
from rlhf_core.render.markup import Markup, figure, join, number, remark, tag, words
from rlhf_core.render.series import Curve, Marks, PointSeries, Series, finite, smoothing_window
from rlhf_core.schemas.evaluation import EVALUATIONS, PASS

EVALUATION_CURVES = {"greedy": "eval/greedy", "preference": "eval/preference", "loss": "eval/loss"}
"""Metrics of the evaluations during training (``evaluate.every_num_steps``)."""


PHASES = ("rollout", "reward", "train", "evaluate", "checkpoint")
"""Parts of a step's time, metric ``time/<phase>_s``, from the bottom of the stack. The remainder of ``time/step_s`` is
"other"; a checkpoint is written after its step and counted with the next one."""

PHASE_COLOURS = {"rollout": 0, "reward": 1, "train": 2, "evaluate": 3, "checkpoint": 4, "other": 6}
"""Fixed colours, so that a phase looks the same in every report."""


def learning_plots(record: ReportData) -> Markup:
    """Accuracy, reward and training-health metrics."""
    if not is_elsewhere(record):
        drawn = [*_plots_of_loops(record), *source_plots(record.spec, record.curves)]
        return _plots(record, [*_evaluations(record), *(_line_plot(record, plot) for plot in drawn)])
    logged = [plot for plot in LEARNING_ELSEWHERE if any(record.curves.get(key) for key, _ in plot.keys)]
    absent = ", ".join(plot.title for plot in LEARNING_ELSEWHERE if plot not in logged)
    made = [*_evaluations(record), *(_line_plot(record, plot) for plot in logged)]
    return _plots(record, [*made, *([(None, f"Not logged by the trainer: {absent}.")] if absent else [])])


def _plots_of_loops(record: ReportData) -> list[LinePlot]:
    """Plots of the native trainer, without those that no loop of the run could fill."""
    kinds = {"", *kinds_of_loops(record.spec)}
    return [plot for plot in LEARNING if (plot.stage or plot.only_with) in kinds]


def speed_plots(record: ReportData) -> Markup:
    """Time per phase and throughput."""
    made = [_phase_times(record), *(_line_plot(record, plot) for plot in SPEED)]
    if is_elsewhere(record) and not any(figure for figure, _ in made):
        return remark("The trainer logged neither times of its steps nor throughput.")
    return _plots(record, [(figure, sentence) for figure, sentence in made if figure or not is_elsewhere(record)])


def is_elsewhere(record: ReportData) -> bool:
    """True if an external trainer ran the training."""
    return record.spec is not None and record.spec.trainer.kind == "command"


def marks_of(record: ReportData) -> Marks:
    """Marks of checkpoints, incidents and rewinds on the step axis."""
    starts = [step for row in record.restarts if (step := row["first_step"])]
    return Marks(
        last_step=max(record.last_step, 1),
        warm_start_steps=record.warm_start_steps,
        checkpoints=tuple(row["step"] for row in record.checkpoints),
        incidents=tuple(one.incident.step for one in record.timeline.incidents if one.incident.step is not None),
        resumes=tuple(step - 1 for step in starts[1:] if step > 1),
    )


# ---------------------------------------------------------------------------------------------------------------------


def _line_plot(record: ReportData, plot: LinePlot) -> tuple[Markup | None, str]:
    """The figure, or None with the sentence that explains why there is none."""
    border, stages = record.warm_start_steps, stages_of(record.spec)
    found = [(label, of_stage(record.curves.get(key, ()), plot.stage, border, stages)) for key, label in plot.keys]
    series = [Series(label, curve) for label, whole in found if (curve := finite(whole))]
    if not series:
        why = _not_finite(max(len(whole) for _, whole in found)) or plot.if_missing
        return None, f"{plot.title}: {why}."
    window = max(smoothing_window(len(item.curve)) for item in series)
    caption = plot.explanation
    if window > 1:
        caption += f" Bold: mean over {window} steps; faint: single steps."
    svg = plots.line_chart(
        series,
        unit=plot.unit,
        marks=marks_of(record),
        name=plot.name,
        description=f"{plot.title}: " + "; ".join(_series_text(item) for item in series),
        from_zero=plot.from_zero,
        span=(series[0].curve[0][0], series[0].curve[-1][0]) if plot.stage else None,
    )
    return figure(plot.title, svg, caption), ""


def _not_finite(num_values: int) -> str:
    """The reason why measured values cannot be drawn; empty if there are none."""
    if not num_values:
        return ""
    values = "its only value is" if num_values == 1 else f"all its {num_values:,} values are"
    return f"{values} not finite (NaN or infinite)"


def _series_text(series: Series) -> str:
    (first, start), (last, end) = series.curve[0], series.curve[-1]
    if first == last:
        return f"{series.label} {number(start)} at step {first}"
    return f"{series.label} from {number(start)} at step {first} to {number(end)} at step {last}"


def _evaluations(record: ReportData) -> list[tuple[Markup | None, str]]:
    """Scores; pass@k and the loss if they were measured: the loss has another unit."""
    made = [_points(record, "Held-out scores", "accuracy", [name for name in EVALUATIONS if name != "loss"])]
    measured = dict.fromkeys(row["name"] for row in record.evaluations)
    if passes := [name for name in measured if name.startswith(PASS)]:
        made.append(_points(record, "Held-out pass@k", "pass-at-k", passes))
    if "loss" in measured:
        made.append(_points(record, "Held-out loss", "held-out-loss", ["loss"]))
    return made


def _points(record: ReportData, title: str, name: str, evaluations: Sequence[str]) -> tuple[Markup | None, str]:
    """Evaluations of one unit before, during and after training; or None, with the sentence that explains why."""
    made = [row for row in record.evaluations if row["name"] in evaluations]
    series = []
    for evaluation in evaluations:
        scores = [one for one in record.finite_scores if one.name == evaluation]
        points = tuple(one.point for one in sorted(scores, key=lambda one: (one.point.step, one.when != "before")))
        between = finite(record.curves.get(EVALUATION_CURVES.get(evaluation, ""), ()))
        if points:
            series.append(PointSeries(evaluation, points, between))
    if not series:
        why = "no evaluation has a finite score and interval" if made else "no evaluation was made"
        return None, f"{title}: {why}."
    level = record.spec.evaluate.confidence if record.spec else None
    caption = "Bars: confidence interval" + (f" of {level:.0%}." if level else ".")
    if any(item.between for item in series):
        caption += " Small dots: evaluations during training."
    svg = plots.point_chart(
        series,
        unit=words(made[0]["metric"]),
        marks=marks_of(record),
        name=name,
        description=f"{title}: "
        + "; ".join(f"{item.label} {point.value:.3f} at step {point.step}" for item in series for point in item.points),
    )
    return figure(title, svg, caption), ""


def _phase_times(record: ReportData) -> tuple[Markup | None, str]:
    title = "Where the time goes"
    series = [
        Series(name, curve, PHASE_COLOURS[name])
        for name, curve in _times(record).items()
        if any(value > 0 for _, value in curve)
    ]
    if not series:
        return None, f"{title}: {'no time was logged' if record.curves else 'no step was made'}."
    totals = {item.label: sum(value for _, value in item.curve) for item in series}
    whole = sum(totals.values())
    caption = "Of all: " + ", ".join(f"{label} {_percent(part / whole)}" for label, part in totals.items()) + "."
    svg = plots.stacked_chart(
        series,
        unit="seconds per step",
        marks=marks_of(record),
        name="phases",
        description=f"{title}. {caption}",
    )
    return figure(title, svg, caption), ""


def _percent(share: float) -> str:
    return f"{share:.0%}" if share == 0 or share >= 0.01 else "<1%"


def _times(record: ReportData) -> dict[str, Curve]:
    """Seconds of each step by phase, and the remainder that belongs to no phase."""
    times: dict[str, Curve] = {phase: finite(record.curves.get(f"time/{phase}_s", ())) for phase in PHASES}
    left = dict(finite(record.curves.get("time/step_s", ())))
    for phase, curve in times.items():
        if phase != "checkpoint":
            for step, value in curve:
                left[step] = left.get(step, value) - value
    times["other"] = [(step, max(0.0, value)) for step, value in sorted(left.items())]
    return times


def _plots(record: ReportData, made: Sequence[tuple[Markup | None, str]]) -> Markup:
    """The figures, the legend of their marks, and a sentence for each that could not be drawn."""
    drawn = [figure for figure, _ in made if figure]
    missing = [sentence for figure, sentence in made if not figure]
    marks = marks_of(record)
    keys = [
        ("swatch warm", "supervised warm start", marks.warm_start_steps > 0),
        ("triangle", "checkpoint", bool(marks.checkpoints)),
        ("stroke bad", "incident", bool(marks.incidents)),
        ("stroke dashed", "a later attempt or restart continued from here", bool(marks.resumes)),
    ]
    legend = [tag("span", tag("i", class_=style), label) for style, label, shown in keys if shown]
    return join(
        [
            tag("p", *legend, class_="legend") if drawn and legend else "",
            tag("div", *drawn, class_="plots") if drawn else "",
            tag("ul", *(tag("li", sentence) for sentence in missing), class_="missing") if missing else "",
        ]
    )
