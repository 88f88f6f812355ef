"""Series of a plot: the numbers of its curves and points, made fit to be drawn."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[int, float]]
"""Values over optimizer steps, by rising step."""

MAX_POINTS = 600
"""More points than this are averaged in equal stretches: a longer line shows no more at this size."""


@dataclass(frozen=True)
class Series:
    """One labelled curve."""

    label: str
    curve: Curve
    colour: int | None = None
    """Number of its colour, from 0; None for the next one. For series that must look the same in every report."""


@dataclass(frozen=True)
class Marks:
    """Checkpoints, incidents and returns by optimizer step; drawn into every plot over steps."""

    last_step: int = 1
    """The axis ends here, so that all plots of a page have the same one."""
    warm_start_steps: int = 0
    """Steps 1 to this one are the supervised warm start: shaded."""
    checkpoints: tuple[int, ...] = ()
    """Steps with a complete checkpoint: triangles on the axis."""
    incidents: tuple[int, ...] = ()
    """Steps at which something went wrong: red lines."""
    resumes: tuple[int, ...] = ()
    """Steps from which a later attempt or restart went on: dashed lines."""


@dataclass(frozen=True)
class Point:
    """A measured share with its confidence interval at one step."""

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
    """The points that can be drawn."""
    return [(step, value) for step, value in curve if math.isfinite(value)]


def thin(curve: Curve, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """The curve, averaged in equal stretches of steps when it has more than ``max_points`` points."""
    if len(curve) <= max_points:
        return [(float(step), value) for step, value in curve]
    width = math.ceil(len(curve) / max_points)
    stretches = (curve[start : start + width] for start in range(0, len(curve), width))
    return [
        (sum(step for step, _ in stretch) / len(stretch), sum(value for _, value in stretch) / len(stretch))
        for stretch in stretches
    ]


def rolling_mean(curve: Curve, window: int) -> list[tuple[int, float]]:
    """Mean over ``window`` neighbouring points around each one; at the ends over those that there are."""
    half = window // 2
    sums = [0.0, *itertools.accumulate(value for _, value in curve)]
    smooth = []
    for index, (step, _) in enumerate(curve):
        low, high = max(0, index - half), min(len(curve), index + half + 1)
        smooth.append((step, (sums[high] - sums[low]) / (high - low)))
    return smooth


def smoothing_window(num_points: int) -> int:
    """Points to average over for the bold line of a noisy curve; 1 where the curve is too short to need one."""
    if num_points < 30:
        return 1
    return 2 * (max(5, num_points // 15) // 2) + 1
