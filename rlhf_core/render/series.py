"""Series of a plot: the numbers of its curves and points, prepared for drawing."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[int, float]]
"""Values over optimizer steps, in ascending order of steps."""

MAX_POINTS = 600
"""Number of points above which a curve is averaged in equal stretches: more are not visible at this size."""

LARGEST = 1e300
"""Largest magnitude that is drawn: beyond it, ends and ticks of an axis exceed the largest number."""


@dataclass(frozen=True)
class Series:
    """One labelled curve."""

    label: str
    curve: Curve
    colour: int | None = None
    """Index of its colour, from 0; None for the next one. For series that must look the same in every report."""


@dataclass(frozen=True)
class Marks:
    """Checkpoints, incidents and rewinds by optimizer step, drawn in every plot over steps."""

    last_step: int = 1
    """End of the axis, the same for all plots of a page."""
    warm_start_steps: int = 0
    """Last step of the supervised warm start: steps 1 to this one are shaded."""
    checkpoints: tuple[int, ...] = ()
    """Steps with a complete checkpoint: triangles on the axis."""
    incidents: tuple[int, ...] = ()
    """Steps at which something went wrong: red lines."""
    resumes: tuple[int, ...] = ()
    """Steps from which a later attempt or restart continued: dashed lines."""


@dataclass(frozen=True)
class Point:
    """A measured score with its confidence interval at one step."""

    step: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PointSeries:
    """Points of one kind, with the finer curve measured between them, if any."""

    label: str
    points: tuple[Point, ...]
    between: Curve = ()


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def finite(curve: Curve) -> list[tuple[int, float]]:
    """The points that are neither NaN nor infinite."""
    return [(step, value) for step, value in curve if math.isfinite(value)]


def drawable(curve: Curve) -> list[tuple[int, float]]:
    """The points that can be drawn: the finite ones, with values beyond :data:`LARGEST` moved there."""
    return [(step, _limited(value)) for step, value in finite(curve)]


def drawable_point(step: int, value: float, low: float, high: float) -> Point:
    """A point of finite numbers that can be drawn, likewise."""
    return Point(step, _limited(value), _limited(low), _limited(high))


def _limited(value: float) -> float:
    return max(-LARGEST, min(value, LARGEST))


def thin(curve: Curve, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """The curve, averaged in equal stretches of steps if it has more than ``max_points`` points."""
    if len(curve) <= max_points:
        return [(float(step), value) for step, value in curve]
    width = math.ceil(len(curve) / max_points)
    stretches = (curve[start : start + width] for start in range(0, len(curve), width))
    return [
        (sum(step for step, _ in stretch) / len(stretch), sum(value for _, value in stretch) / len(stretch))
        for stretch in stretches
    ]


def rolling_mean(curve: Curve, window: int) -> list[tuple[int, float]]:
    """Mean over ``window`` neighbouring points around each one; near the ends, over the available ones."""
    half = window // 2
    values = [value for _, value in curve]
    # Sums within blocks of the window's length, of which a window touches two at most. In differences of sums over the
    # whole curve, all points after a huge value would lose their digits.
    blocks = [values[start : start + window] for start in range(0, len(values), window)]
    from_start = [total for block in blocks for total in itertools.accumulate(block)]
    to_end = [total for block in blocks for total in [*itertools.accumulate(reversed(block))][::-1]]
    smooth = []
    for index, (step, _) in enumerate(curve):
        first, last = max(0, index - half), min(len(curve), index + half + 1) - 1
        if first // window != last // window:
            total = to_end[first] + from_start[last]
        else:
            total = from_start[last] if first % window == 0 else to_end[first]
        smooth.append((step, total / (last + 1 - first)))
    return smooth


def smoothing_window(num_points: int) -> int:
    """Number of points to average for the bold line of a noisy curve; 1 for a curve too short to need it."""
    if num_points < 30:
        return 1
    return 2 * (max(5, num_points // 15) // 2) + 1
