"""Code shared by the export formats."""

import heapq
import importlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from rlhf_core.errors import BadInput
from rlhf_core.history import queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.queries.exports import CurvePoint, curve_points
from rlhf_core.history.queries.rows import EvaluationRow
from rlhf_core.history.store import HistoryStore
from rlhf_core.machine.installation import pip_install


def require(module: str, target: str) -> None:
    """Check that the library of a format is installed.

    Raises:
        BadInput: it is not; the message says how to install it.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"exporting to {target} needs the package {module}, which is missing here ({error}): "
            f"{pip_install('export')}"
        ) from None


def make_folder(out: Path) -> None:
    """Create the folder to export to.

    Raises:
        BadInput: it cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {out}: {error.strerror}; choose another with --out") from None


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turn an error of writing to a folder into one that names it.

    Raises:
        BadInput: it cannot be written, or an export failed in another way while its disk is full: some libraries wrap
            that error in errors of their own.
    """
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise BadInput(f"cannot write to {out}: {why}. {_ROOM}") from error
    except Exception as error:
        if out.is_dir() and shutil.disk_usage(out).free < _FULL_BYTES:
            raise BadInput(f"cannot write to {out}: its disk is full. {_ROOM}") from error
        raise


_ROOM = "Make room there, or choose another folder with --out; then export again"

_FULL_BYTES = 1 << 20
"""Free space below which a disk counts as full."""


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
