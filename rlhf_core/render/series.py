"""Series of a plot: the numbers of its curves and points, prepared for drawing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

Curve = Sequence[tuple[int, float]]
"""Values over optimizer steps, in ascending order of steps."""

MAX_POINTS = 600
"""Number of points above which a curve is averaged in equal stretches: more are not visible at this size."""

LARGEST = 1e300
"""Largest magnitude that counts as finite: beyond it, ends and ticks of an axis exceed the largest number."""


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


def is_finite(value: float | None) -> TypeGuard[float]:
    """True for a number that is neither NaN nor infinite, nor larger than :data:`LARGEST`."""
    return value is not None and abs(value) <= LARGEST


def finite(curve: Curve) -> list[tuple[int, float]]:
    """The points that can be drawn."""
    return [(step, value) for step, value in curve if is_finite(value)]


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


def smoothing_window(num_points: int) -> int:
    """Number of points to average for the bold line of a noisy curve; 1 for a curve too short to need it."""
    if num_points < 30:
        return 1
    return 2 * (max(5, num_points // 15) // 2) + 1
