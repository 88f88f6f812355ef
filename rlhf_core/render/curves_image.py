"""The curves of a run as one small PNG, for places that can only show images.

Read by :mod:`rlhf_core.control.views.curves`, which also runs this module to draw.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from rlhf_core.render.line_plots import LEARNING, LEARNING_ELSEWHERE, LinePlot, of_stage
from rlhf_core.render.plots import STYLE, Palette, draw_lines, draw_steps, drawing, style_axes
from rlhf_core.render.series import Curve, Marks, Series
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

NAMES = (
    *("reward", "kl", "preference", "margin", "entropy", "length"),
    *("loss-sft", "loss-preference", "loss-main", "loss", "grad-norm"),
)
"""Plots to draw from the report, in this order, if the trainer has them; the step-time plot is always drawn."""

WIDTH_IN, ROW_IN, DPI = 6.9, 1.65, 200
"""The page shows the image about 690 points wide: at twice as many pixels it is sharp, and 8.5-point text is
readable."""

NUM_COLOURS = 96
"""Line plots need few colours; a palette cuts the file to a third of the size."""

PAPER = "#ffffff"
"""Own background colour, because the surrounding page may be light or dark."""

PALETTE = Palette(
    text="#1f2430",
    muted="#5b6472",
    grid="#e3e6ea",
    warm_start="#f4f1e6",
    bad="#d03a3a",
    mark="#7a8494",
    series=("#2a6fdb", "#c2571a", "#2b8a57"),
)
"""Colours that are dark enough for a white background."""

_STYLE = {
    **STYLE,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": PALETTE.text,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
}


def plots_of(spec: RunSpec) -> tuple[LinePlot, ...]:
    """Plots to draw for a run."""
    plots = LEARNING_ELSEWHERE if spec.samples is None else LEARNING
    known = {plot.name: plot for plot in plots}
    return (*(known[name] for name in NAMES if name in known), STEP_TIME)


def draw(
    plots: Sequence[LinePlot], curves: Mapping[str, Curve], marks: Marks, stages: tuple[str, str] = ("sft", "main")
) -> bytes:
    """Draw the image as PNG; empty if none of the plots has a point.

    Args:
        stages: kinds of the loops, from ``line_plots.stages_of``.
    """
    shown = [(plot, series) for plot in plots if (series := drawn_series(plot, curves, marks, stages))]
    if not shown:
        return b""
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    with drawing(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, ROW_IN * rows + 0.2), dpi=DPI, layout="constrained", facecolor=PAPER)
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, (plot, series) in zip(places, shown, strict=False):
            style_axes(axes, plot.unit, PALETTE)
            axes.set_title(plot.title)
            draw_lines(axes, series, marks, PALETTE, from_zero=plot.from_zero)
            draw_steps(axes, (0, marks.last_step), marks, PALETTE)
            if len(series) > 1:
                axes.legend(loc="best", handlelength=1.0, borderaxespad=0.2, labelcolor=PALETTE.text)
        for axes in places[len(shown) :]:
            axes.set_visible(False)
        figure.supxlabel(_legend(marks), fontsize=7.5, color=PALETTE.muted)
        canvas: Any = FigureCanvasAgg(figure)  # has no types
        canvas.draw()  # once: savefig draws for the layout and then again, and encodes what is read back here
        pixels = bytes(canvas.buffer_rgba())
    small = io.BytesIO()
    image = Image.frombytes("RGBA", canvas.get_width_height(), pixels)
    image.convert("RGB").quantize(NUM_COLOURS).save(small, format="png", optimize=True)
    return small.getvalue()


def drawn_series(plot: LinePlot, curves: Mapping[str, Curve], marks: Marks, stages: tuple[str, str]) -> list[Series]:
    """Curves of a plot that have points in its loop."""
    found = []
    for key, label in plot.keys:
        if points := of_stage(curves.get(key, ()), plot.stage, marks.warm_start_steps, stages):
            found.append(Series(label, points))
    return found


def _legend(marks: Marks) -> str:
    parts = ["optimizer step", "bold: running mean"]
    parts += ["shaded: warm start"] if marks.warm_start_steps else []
    parts += ["triangle: checkpoint"] if marks.checkpoints else []
    parts += ["red: incident"] if marks.incidents else []
    parts += ["dashed: continued from here"] if marks.resumes else []
    return "  ·  ".join(parts)
