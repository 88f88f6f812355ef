"""One run in an experiment tracker: its points by step, and its export as a whole."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Protocol

from rlhf_core.history import queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.queries.exports import CurvePoint, curve_points
from rlhf_core.history.queries.rows import EvaluationRow
from rlhf_core.history.store import HistoryStore


def evaluation_points(evaluations: Iterable[EvaluationRow]) -> list[CurvePoint]:
    """The evaluations of a run by step: points ``evaluation/<when>/<name>``, ``..._ci_low`` and ``..._ci_high``."""
    points = []
    for row in evaluations:
        name = f"evaluation/{row['when']}/{row['name']}"
        time = datetime.fromisoformat(row["made_at"])
        for key, value in (
            (name, row["value"]),
            (f"{name}_ci_low", row["ci_low"]),
            (f"{name}_ci_high", row["ci_high"]),
        ):
            if value is not None:
                points.append(CurvePoint(key, row["checkpoint_step"], value, time))
    return sorted(points, key=lambda point: (point.step, point.key))


class TrackedRun(Protocol):
    """One run in an experiment tracker."""

    place: str
    """Folder, address or id of the run in the tracker; empty until it is written."""

    def write(self, details: RunDetails, points: Iterable[CurvePoint]) -> None:
        """Make the tracker have exactly these points of the run, whatever it had before."""

    def add(self, details: RunDetails, points: Sequence[CurvePoint]) -> bool:
        """Add points to those that this object has written, by step. False if the tracker cannot take them any more, so
        that the run has to be written as a whole."""

    def end(self, store: HistoryStore, details: RunDetails) -> None:
        """Record the end of the run, all of whose points the tracker has."""


def export_whole(store: HistoryStore, run_id: str, tracked: TrackedRun) -> str:
    """Export effective metrics and evaluations of a run as far as the history has it; return its place in the
    tracker."""
    details = queries.show_run(store, run_id)
    tracked.write(details, by_step(curve_points(store, run_id), evaluation_points(details.evaluations)))
    tracked.end(store, details)
    return tracked.place


def by_step(metrics: Iterable[CurvePoint], evaluations: Iterable[CurvePoint]) -> Iterator[CurvePoint]:
    """Merge metrics and evaluations, each in the order of their steps."""
    return heapq.merge(metrics, evaluations, key=lambda point: point.step)
