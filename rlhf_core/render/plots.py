"""Plots as SVG text for an HTML page: pure functions without files or global state.

Colours are names of CSS variables (``--series-1`` ...), so that one drawing fits a light page, a dark page and paper.
Text remains text: it uses the page's font and is searchable.
"""

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from rlhf_core.render.series import Curve, Marks, PointSeries, Series, finite, smoothing_window, thin
from rlhf_core.text.escaping import page

MAX_BARS = 240
"""Number of bars above which neighbours are averaged: stacked parts are wider than points."""

STYLE: Any = {  # settings of different types, validated by matplotlib at run time
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.useoffset": False,  # it would overlap the legend
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.8,
    "legend.frameon": False,
    "legend.handletextpad": 0.5,
    "legend.borderaxespad": 0.0,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Palette:
    """Colours of a drawing."""

    text: str
    muted: str
    grid: str
    warm_start: str
    bad: str
    mark: str
    series: tuple[str, ...]


_INK = {
    "text": "#0a0b01",
    "muted": "#0a0b02",
    "grid": "#0a0b03",
    "warm-start": "#0a0b05",
    "bad": "#0a0b06",
    "mark": "#0a0b07",
    **{f"series-{number}": f"#0a0c0{number}" for number in range(1, 8)},
}
"""Placeholder colours that matplotlib writes into the SVG, later replaced by CSS variables. The values are arbitrary,
but must not occur otherwise."""

_SERIES = tuple(colour for name, colour in _INK.items() if name.startswith("series-"))
_CSS = Palette(_INK["text"], _INK["muted"], _INK["grid"], _INK["warm-start"], _INK["bad"], _INK["mark"], _SERIES)


# ---------------------------------------------------------------------------------------------------------------------
# Drawings


@contextmanager
def drawing(style: Mapping[Any, Any]) -> Iterator[None]:
    """Block in which drawings have a style, and otherwise matplotlib's own settings: those of a user's or a folder's
    ``matplotlibrc`` would make the same run look different elsewhere."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        yield


def line_chart(
    series: Sequence[Series],
    *,
    unit: str,
    marks: Marks,
    name: str,
    description: str,
    from_zero: bool = False,
    span: tuple[int, int] | None = None,
) -> str:
    """Curves over steps; long ones as a bold running mean over the faint single steps.

    Args:
        series: at least one, each with at least one finite point.
        unit: label of the vertical axis, with its unit.
        marks: checkpoints, incidents and returns by step.
        name: distinguishes the drawing within the page: lower-case letters, digits and ``-``.
        description: alternative text, one sentence.
        from_zero: start the vertical axis at zero.
        span: first and last step of the axis; the whole run by default.

    Returns:
        An ``<svg>`` element.
    """
    with drawing(STYLE):
        figure, axes = _canvas(unit)
        draw_lines(axes, series, marks, _CSS, from_zero=from_zero)
        draw_steps(axes, span or (0, marks.last_step), marks, _CSS)
        if len(series) > 1:
            _legend(axes)
        return _svg(figure, name, description)


def draw_lines(axes: Axes, series: Sequence[Series], marks: Marks, palette: Palette, *, from_zero: bool) -> None:
    """Draw curves into axes; see :func:`line_chart`."""
    drawn = [(item.label, finite(item.curve), item.colour) for item in series]
    for (label, curve, own_colour), next_colour in zip(drawn, itertools.cycle(palette.series)):
        colour = next_colour if own_colour is None else palette.series[own_colour % len(palette.series)]
        for part in _loops(curve, marks):
            window = smoothing_window(len(curve))
            if window > 1:
                axes.plot(*_columns(thin(part)), color=colour, linewidth=0.8, alpha=0.35)
            bold = thin(rolling_mean(part, window))
            marker = "o" if len(bold) == 1 else ""
            axes.plot(*_columns(bold), color=colour, linewidth=1.6, marker=marker, markersize=4, label=label)
            label = ""  # the other loop belongs to the same series
    if from_zero:
        axes.set_ylim(bottom=min(0.0, *(value for _, curve, _ in drawn for _, value in curve)))


def point_chart(series: Sequence[PointSeries], *, unit: str, marks: Marks, name: str, description: str) -> str:
    """Measurements with confidence intervals at single steps, and the curves measured between them.

    Returns:
        An ``<svg>`` element.
    """
    with drawing(STYLE):
        figure, axes = _canvas(unit)
        spread = 0.006 * marks.last_step
        for index, (item, colour) in enumerate(zip(series, itertools.cycle(_SERIES))):
            # Kinds measured at the same step are offset a little, so that their intervals are readable.
            shift = spread * (2 * index - len(series) + 1)
            xs = [point.step + shift for point in item.points]
            measured = [(x, point.value) for x, point in zip(xs, item.points, strict=True)]
            between = thin(finite(item.between))
            axes.plot(*_columns(sorted([*measured, *between])), color=colour, linewidth=1.1, alpha=0.55)
            axes.plot(*_columns(between), "o", color=colour, markersize=2.5)
            axes.errorbar(
                xs,
                [point.value for point in item.points],
                # Not below zero: rounding may leave the value of equal scores just outside its interval.
                yerr=[
                    [max(0.0, point.value - point.low) for point in item.points],
                    [max(0.0, point.high - point.value) for point in item.points],
                ],
                color=colour,
                fmt="o",
                markersize=5,
                elinewidth=1.4,
                capsize=3.5,
                capthick=1.4,
                label=item.label,
            )
        axes.set_ylim(*_score_axis(series))
        reach = spread * (len(series) - 1)
        draw_steps(axes, (-reach, marks.last_step + reach), marks, _CSS)
        _legend(axes)
        return _svg(figure, name, description)


def stacked_chart(series: Sequence[Series], *, unit: str, marks: Marks, name: str, description: str) -> str:
    """Stacked parts of a whole over steps; a part missing at a step counts as zero.

    Returns:
        An ``<svg>`` element.
    """
    with drawing(STYLE):
        figure, axes = _canvas(unit)
        steps = sorted({step for item in series for step, _ in item.curve})
        rows = []
        for item in series:
            values = dict(finite(item.curve))
            rows.append(thin([(step, values.get(step, 0.0)) for step in steps], MAX_BARS))
        places = [x for x, _ in rows[0]]
        width = (places[-1] - places[0]) / max(len(places) - 1, 1) or 1.0
        floor = [0.0] * len(places)
        for item, row, next_colour in zip(series, rows, itertools.cycle(_SERIES)):
            colour = next_colour if item.colour is None else _SERIES[item.colour]
            top = [low + value for low, (_, value) in zip(floor, row, strict=True)]
            edges = [place - width / 2 for place in places] + [places[-1] + width / 2]
            axes.stairs(top, edges, baseline=floor, fill=True, color=colour, linewidth=0, label=item.label)
            floor = top
        axes.set_ylim(bottom=0.0)
        draw_steps(axes, (0, marks.last_step), marks, _CSS)
        _legend(axes)
        return _svg(figure, name, description)


def _loops(curve: Curve, marks: Marks) -> list[Curve]:
    """Split a curve into warm start and main loop: its meaning differs, so no line or mean may join them."""
    border = marks.warm_start_steps
    parts = [point for point in curve if point[0] <= border], [point for point in curve if point[0] > border]
    return [part for part in parts if part]


def rolling_mean(curve: Curve, window: int) -> list[tuple[int, float]]:
    """Mean over ``window`` neighbouring points around each one; near the ends, over the available ones.

    Args:
        window: an odd number.
    """
    around = slice(window // 2, window // 2 + len(curve))
    totals = np.convolve([value for _, value in curve], np.ones(window))[around]
    counts = np.convolve(np.ones(len(curve)), np.ones(window))[around]
    means: list[float] = (totals / counts).tolist()
    return [(step, mean) for (step, _), mean in zip(curve, means, strict=True)]


def _score_axis(series: Sequence[PointSeries]) -> tuple[float, float]:
    """Ends of an axis of scores: from 0 to above 1 for shares, and around all scores if some are below 0."""
    values = [value for item in series for point in item.points for value in (point.low, point.high)]
    values += [value for item in series for _, value in finite(item.between)]
    low, high = min(values), max(values)
    if low >= 0:
        return 0.0, max(1.1, 1.1 * high)
    margin = 0.1 * (high - low) or -0.1 * low
    return low - margin, high + margin


# ---------------------------------------------------------------------------------------------------------------------
# Shared parts of a drawing


def _canvas(unit: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, 2.75), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.03))
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    axes.set_xlabel("optimizer step", color=_INK["muted"])
    style_axes(axes, unit, _CSS)
    return figure, axes


def draw_steps(axes: Axes, span: tuple[float, float], marks: Marks, palette: Palette) -> None:
    """Draw the step axis, from the first step of ``span`` to its last, with its marks."""
    low, high = span
    margin = max(0.5, 0.02 * (high - low))
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.get_offset_text().set_color(palette.muted)
    if marks.warm_start_steps >= max(low, 1):
        right = min(marks.warm_start_steps + 0.5, high + margin)
        axes.axvspan(low - margin, right, color=palette.warm_start, linewidth=0, zorder=0)
    for step in _within(marks.resumes, low, high):
        axes.axvline(step + 0.5, color=palette.mark, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    for step in _within(marks.incidents, low, high):
        axes.axvline(step, color=palette.bad, linewidth=1.2, zorder=1)
    saved = _within(marks.checkpoints, low, high)
    if saved:
        place = axes.get_xaxis_transform()
        axes.plot(
            saved, [0.0] * len(saved), "^", color=palette.mark, markersize=4, transform=place, clip_on=False, zorder=5
        )


def style_axes(axes: Axes, unit: str, palette: Palette) -> None:
    """Set grid, ticks and label of the vertical axis."""
    axes.grid(axis="y", color=palette.grid, linewidth=0.7)
    axes.tick_params(colors=palette.muted, labelcolor=palette.muted)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(palette.muted)
    axes.set_ylabel(unit, color=palette.muted)


def _within(steps: Iterable[int], low: float, high: float) -> list[int]:
    return sorted({step for step in steps if low <= step <= high})


def _legend(axes: Axes) -> None:
    """Draw the legend in one row above the drawing, where it covers nothing: a power of ten, which matplotlib writes
    there, goes into the label of the axis."""
    formatter = axes.yaxis.get_major_formatter()
    formatter.format_ticks(axes.yaxis.get_majorticklocs().tolist())
    if power := formatter.get_offset():
        axes.yaxis.get_offset_text().set_visible(False)
        axes.set_ylabel(f"{axes.get_ylabel()}, in {power}")
    labels = axes.get_legend_handles_labels()[1]
    narrow = len(labels) > 4
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.02),
        ncols=len(labels),
        labelcolor=_INK["text"],
        fontsize=8.0 if narrow else 8.5,
        handlelength=0.8 if narrow else 1.4,
        columnspacing=0.8 if narrow else 1.2,
        borderpad=0.0,
    )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


# ---------------------------------------------------------------------------------------------------------------------
# SVG for a page


def _svg(figure: Figure, name: str, description: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return embed(buffer.getvalue(), name, description)


def embed(document: str, name: str, description: str) -> str:
    """Convert an SVG document to an element of an HTML page.

    Namespaces, metadata and unused ids are removed (a page holds many drawings, and their ids must not clash), the size
    adapts to the page, and placeholder colours become CSS variables.
    """
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"""(?:url\(#|href="#)([^)"]+)""", svg))
    svg = re.sub(r'\sid="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r"""(url\(#|href="#)""", lambda found: f"{found[1]}{name}-", svg)
    box = re.search(r'viewBox="([^"]+)"', svg)
    head = f'<svg class="plot" role="img" aria-label="{page(description)}" viewBox="{box[1] if box else ""}">'
    svg = head + re.sub(r'\s(?:d|x|y|transform)="[^"]*"', _shortened, svg[svg.index(">") + 1 :])
    for variable, colour in _INK.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return re.sub(r">\s+<", "><", svg.strip())


def _shortened(attribute: re.Match[str]) -> str:
    """Round coordinates to a hundredth of a point, finer than any screen."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])
