"""The curves of a run as one small PNG, for a place that shows pictures and nothing else; made while the run trains.

``python -m rlhf_core.reports.curves_image RUN_DIRECTORY`` writes it to standard output, and nothing where there is no
step yet. It is a program of its own because whoever wants the picture has better things to keep going than a drawing:
what it takes in memory and time ends with it. It reads the run directory alone, so a database that is away costs
nothing.
"""

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from rlhf_core.control_journal import read_journal
from rlhf_core.reports.charts import LEARNING, LinePlot
from rlhf_core.reports.plots import Curve, Marks, finite, rolling_mean, smoothing_window, thin
from rlhf_core.run_dir import RunDir, parse_lines, read_blocks, read_model
from rlhf_core.schemas.failures import Incident
from rlhf_core.schemas.journal import IncidentFound
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.run import RunSpec

STEP_TIME = LinePlot(
    name="step-time",
    title="Time per step",
    unit="seconds",
    keys=(("time/step_s", "whole step"), ("time/rollout_s", "rollout"), ("time/train_s", "training")),
    explanation="",
    if_missing="",
    from_zero=True,
)

NAMES = {
    True: ("reward", "kl", "entropy", "length", "loss-sft", "loss-main", "grad-norm"),
    False: ("loss-sft", "grad-norm"),
}
"""Plots of the report, by whether the main algorithm samples; the time of a step is there for all."""

WIDTH_IN, ROW_IN, DPI = 6.9, 1.65, 200
"""The page shows it about 690 points wide: twice as many pixels stay sharp, and 8.5 points of text stay readable."""

NUM_COLOURS = 96
"""Lines on paper have few colours; with a palette the file has a third of the size."""

PAPER, INK, MUTED, GRID = "#ffffff", "#1f2430", "#5b6472", "#e3e6ea"
BAD, MARK, WARM_START = "#d03a3a", "#7a8494", "#f4f1e6"
SERIES = ("#2a6fdb", "#c2571a", "#2b8a57")
"""Dark enough for white paper. It brings its own paper along: the page around it may be light or dark."""

_STYLE = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}


def plots_of(spec: RunSpec) -> tuple[LinePlot, ...]:
    """What is drawn for a run."""
    known = {plot.name: plot for plot in LEARNING}
    return (*(known[name] for name in NAMES[spec.loops.main.algorithm.samples]), STEP_TIME)


def effective_curves(run_dir: RunDir, keys: frozenset[str]) -> dict[str, list[tuple[int, float]]]:
    """Metrics by step as the history has them: a restart takes back everything from its first step on, also where it
    has not come that far again."""
    curves: dict[str, dict[int, float]] = {key: {} for key in keys}
    for lines in _by_restart(run_dir):
        first = True
        for line in lines:
            if first:
                curves = {key: {s: v for s, v in curve.items() if s < line.step} for key, curve in curves.items()}
                first = False
            for key in keys & line.metrics.keys():
                curves[key][line.step] = line.metrics[key]
    return {key: finite(sorted(curve.items())) for key, curve in curves.items()}


def _by_restart(run_dir: RunDir) -> Iterator[Iterator[MetricsLine]]:
    for attempt in run_dir.attempts():
        for restart in attempt.restarts():
            blocks = read_blocks(restart.metrics)
            yield (line for lines, _ in blocks for line in parse_lines(lines, MetricsLine))


def marks_of(run_dir: RunDir, spec: RunSpec, last_step: int) -> Marks:
    """Where checkpoints, incidents and returns to a checkpoint stand on the axis of steps."""
    restarts = [restart for attempt in run_dir.attempts() for restart in attempt.restarts()]
    told = [incident for one in restarts if (incident := read_model(one.incident, Incident)) is not None]
    events = [line.event for line in read_journal(run_dir.control)]
    told += [event.incident for event in events if isinstance(event, IncidentFound)]
    firsts = [line.step for lines in _by_restart(run_dir) if (line := next(lines, None)) is not None]
    return Marks(
        last_step=max(last_step, 1),
        warm_start_steps=spec.warm_start_steps,
        checkpoints=tuple(checkpoint.step for checkpoint in run_dir.checkpoints()),
        incidents=tuple(incident.step for incident in told if incident.step is not None),
        resumes=tuple(step - 1 for step in firsts[1:]),
    )


def draw(plots: Sequence[LinePlot], curves: Mapping[str, Curve], marks: Marks) -> bytes:
    """The picture as PNG; empty where none of the plots has a point."""
    shown = [plot for plot in plots if any(_points(plot, key, curves, marks) for key, _ in plot.keys)]
    if not shown:
        return b""
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]  # names are checked when it runs
        figure = Figure(figsize=(WIDTH_IN, ROW_IN * rows + 0.2), dpi=DPI, layout="constrained", facecolor=PAPER)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for place, plot in zip(axes, shown, strict=False):
            _draw_plot(place, plot, curves, marks)
        for place in axes[len(shown) :]:
            place.set_visible(False)
        figure.supxlabel(_legend(marks), fontsize=7.5, color=MUTED)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    small = io.BytesIO()
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(NUM_COLOURS).save(small, format="png", optimize=True)
    return small.getvalue()


def _points(plot: LinePlot, key: str, curves: Mapping[str, Curve], marks: Marks) -> list[tuple[int, float]]:
    border = marks.warm_start_steps
    points = list(curves.get(key, ()))
    if not border or not plot.stage:
        return points
    return [point for point in points if (point[0] <= border) == (plot.stage == "sft")]


def _draw_plot(axes: Axes, plot: LinePlot, curves: Mapping[str, Curve], marks: Marks) -> None:
    axes.grid(axis="y")
    drawn = 0
    for (key, label), colour in zip(plot.keys, SERIES, strict=False):
        points = _points(plot, key, curves, marks)
        border = marks.warm_start_steps
        # What a step means differs before and after the warm start: no line and no mean joins them.
        for part in ([p for p in points if p[0] <= border], [p for p in points if p[0] > border]):
            _draw_line(axes, part, colour, label, smoothing_window(len(points)) if plot.smooth else 1)
            label = "" if part else label
        drawn += bool(points)
    axes.set_title(plot.title)
    axes.set_ylabel(plot.unit, color=MUTED, fontsize=7.5)
    if plot.from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if _has_negative(plot, curves) else 0.0)
    _draw_marks(axes, marks)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    if drawn > 1:
        axes.legend(loc="best", handlelength=1.0, borderaxespad=0.2, labelcolor=INK)


def _has_negative(plot: LinePlot, curves: Mapping[str, Curve]) -> bool:
    return any(value < 0 for key, _ in plot.keys for _, value in curves.get(key, ()))


def _draw_line(axes: Axes, part: Curve, colour: str, label: str, window: int) -> None:
    if not part:
        return
    if window > 1:
        axes.plot(*_columns(thin(part)), color=colour, linewidth=0.7, alpha=0.3)
    bold = thin(rolling_mean(part, window))
    marker = "o" if len(bold) == 1 else ""
    axes.plot(*_columns(bold), color=colour, linewidth=1.4, marker=marker, markersize=3, label=label)


def _draw_marks(axes: Axes, marks: Marks) -> None:
    margin = max(0.5, 0.02 * marks.last_step)
    axes.set_xlim(-margin, marks.last_step + margin)
    if marks.warm_start_steps:
        axes.axvspan(-margin, marks.warm_start_steps + 0.5, color=WARM_START, linewidth=0, zorder=0)
    for step in sorted(set(marks.resumes)):
        axes.axvline(step + 0.5, color=MARK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for step in sorted(set(marks.incidents)):
        axes.axvline(step, color=BAD, linewidth=1.0, zorder=1)
    saved = sorted({step for step in marks.checkpoints if step <= marks.last_step})
    place = axes.get_xaxis_transform()
    axes.plot(saved, [0.0] * len(saved), "^", color=MARK, markersize=3, transform=place, clip_on=False, zorder=5)


def _legend(marks: Marks) -> str:
    parts = ["optimizer step", "bold: running mean"]
    parts += ["shaded: warm start"] if marks.warm_start_steps else []
    parts += ["triangle: checkpoint"] if marks.checkpoints else []
    parts += ["red: incident"] if marks.incidents else []
    parts += ["dashed: went on from here"] if marks.resumes else []
    return "  ·  ".join(parts)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def picture_of(run_dir: RunDir) -> bytes:
    """The curves of a run as PNG; empty before its first step.

    Raises:
        RunDirError: it is no run directory.
    """
    spec = run_dir.read_spec().spec
    plots = plots_of(spec)
    curves = effective_curves(run_dir, frozenset(key for plot in plots for key, _ in plot.keys))
    last_step = max((curve[-1][0] for curve in curves.values() if curve), default=0)
    return draw(plots, curves, marks_of(run_dir, spec, last_step))


if __name__ == "__main__":
    os.nice(10)  # the machine has controllers to run
    sys.stdout.buffer.write(picture_of(RunDir(Path(sys.argv[1]))))
