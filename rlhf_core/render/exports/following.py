"""Runs in experiment trackers while they go on: written as a whole once, and extended from then on."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime

from rlhf_core.condition_log import ConditionLog
from rlhf_core.history import queries
from rlhf_core.history.queries.exports import CurvePoint, curve_points
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.exports.mlflow import MlflowRun, bound_requests
from rlhf_core.render.exports.tensorboard import TensorBoardRun
from rlhf_core.render.exports.tracked_run import TrackedRun, by_step, evaluation_points
from rlhf_core.render.exports.wandb import WandbRun, WandbServerRun
from rlhf_core.survival import Survived

INTERVAL_S = 10.0
"""Time between two looks at the history, in seconds."""

RETRY_INTERVAL_S = 60.0
"""Time between two attempts to export a run that a tracker did not take, in seconds."""


class RunFollower:
    """One run in one tracker. Remembers the newest step that the tracker has, and adds what is new.

    Steps that the tracker has may cease to count: the run goes back to a checkpoint and repeats them. Everything from
    the first such step on ceases to count at once, so the newest step always shows it. The run is then written as a
    whole again, and so it is after an error, because the tracker may have taken a part, and by a new process.
    """

    def __init__(self, store: HistoryStore, run_id: str, tracked: TrackedRun) -> None:
        self._store = store
        self._run_id = run_id
        self.tracked = tracked
        self._is_written = False
        self._step = 0
        """Newest step that the tracker has."""
        self._times: dict[str, datetime] = {}
        """Names and times of the metrics that it has of this step."""
        self._evaluations: set[tuple[str, int, datetime]] = set()
        """Names, steps and times of the evaluations that it has."""

    def update(self) -> bool:
        """Export what the tracker lacks. True if the run has ended, and the tracker has all of it.

        Raises whatever the tracker raises.
        """
        details = queries.show_run(self._store, self._run_id)
        evaluations = evaluation_points(details.evaluations)
        new = self._new_points(evaluations) if self._is_written else None
        self._is_written = False
        if new is None or not self.tracked.add(details, list(by_step(*new))):
            # In memory: a tracker may be slow, and the history must not be kept open for it.
            new = list(curve_points(self._store, self._run_id)), evaluations
            self.tracked.write(details, by_step(*new))
            self._step, self._times = 0, {}
        for point in new[0]:
            if point.step > self._step:
                self._step, self._times = point.step, {}
            self._times[point.key] = point.time
        self._evaluations = set(map(_identity, evaluations))
        self._is_written = True
        if details.run["ended_at"] is None:
            return False
        self.tracked.end(self._store, details)
        return True

    def _new_points(self, evaluations: Sequence[CurvePoint]) -> tuple[list[CurvePoint], list[CurvePoint]] | None:
        """Metrics and evaluations that the tracker lacks; None if it has some that do not count any more."""
        found = list(curve_points(self._store, self._run_id, first_step=self._step))
        present = {point.key: point.time for point in found if point.step == self._step}
        if not (self._times.items() <= present.items() and self._evaluations <= set(map(_identity, evaluations))):
            return None
        return (
            [point for point in found if point.step > self._step or point.key not in self._times],
            [point for point in evaluations if _identity(point) not in self._evaluations],
        )


def _identity(point: CurvePoint) -> tuple[str, int, datetime]:
    return point.key, point.step, point.time


class LiveExport:
    """Export of several runs to one tracker, each as far as the history has it. Errors of the tracker are logged once,
    until they end, and tried again."""

    def __init__(
        self,
        store: HistoryStore,
        tracker: str,
        out: str,
        warn: Callable[[str], None],
        *,
        artifacts: bool = True,
    ) -> None:
        """Prepare the export.

        Args:
            tracker: ``mlflow``, ``tensorboard`` or ``wandb``.
            out: folder or address, as for ``rlhf export --out``.
            warn: called with each problem.
            artifacts: store the texts of a run in MLflow when it has ended.
        """
        self._store = store
        self._tracker = tracker
        self._out = out
        self._artifacts = artifacts
        self._problems = ConditionLog(warn)
        self._followers: dict[str, RunFollower] = {}
        self._exported: dict[str, int] = {}
        self._refused_s: dict[str, float] = {}
        """Time of the last attempt for each run that the tracker did not take."""
        if tracker == "mlflow":
            bound_requests()

    def update(
        self,
        stamps: Mapping[str, int],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> dict[str, str]:
        """Export what is new of these runs.

        Args:
            stamps: by run, the number of its last ingestion.
            around: makes the context in which each run is exported.

        Returns:
            The runs that have ended, and of which the tracker now has everything; with their place there.
        """
        for run_id in self._followers.keys() - stamps.keys():
            del self._followers[run_id]
        complete: dict[str, str] = {}
        taken: list[str] = []
        refused: dict[str, str] = {}
        for run_id, stamp in stamps.items():
            if self._exported.get(run_id) == stamp or self._is_put_off(run_id):
                continue
            with Survived() as found, around():  # the errors of a tracker's library are of many kinds
                place = self._update(run_id)
                if place:
                    complete[run_id] = place
                self._exported[run_id] = stamp
                taken.append(run_id)
            if found.error is not None:
                refused[run_id] = found.message
        self._log(taken, refused)
        return complete

    def _update(self, run_id: str) -> str:
        """Export one run. Returns its place if it has ended, or an empty text."""
        if run_id not in self._followers:
            tracked = tracked_run(self._tracker, self._out, run_id, artifacts=self._artifacts)
            self._followers[run_id] = RunFollower(self._store, run_id, tracked)
        if not self._followers[run_id].update():
            return ""
        return self._followers.pop(run_id).tracked.place  # if it is resumed, it is written as a whole

    def _is_put_off(self, run_id: str) -> bool:
        refused_s = self._refused_s.get(run_id)
        return refused_s is not None and time.monotonic() - refused_s < RETRY_INTERVAL_S

    def _log(self, taken: Sequence[str], refused: Mapping[str, str]) -> None:
        """Log what was refused: once for all runs, if the tracker takes none."""
        for run_id in taken:
            self._refused_s.pop(run_id, None)
            self._problems.end(run_id)
        if taken:
            self._problems.end()
        for run_id, message in refused.items():
            self._refused_s[run_id] = time.monotonic()
            line = f"{run_id} is not exported to {self._tracker} for now, and tried again: {message}"
            self._problems.log_once(line, run_id if taken else "")


def tracked_run(tracker: str, out: str, run_id: str, *, artifacts: bool = True) -> TrackedRun:
    """Prepare the export of a run to a tracker: ``mlflow``, ``tensorboard`` or ``wandb``.

    Args:
        out: folder or address, as for ``rlhf export --out``.
        artifacts: store the texts of the run in MLflow when it has ended.

    Raises:
        BadInput: its library is missing, or ``out`` is not usable.
    """
    match tracker:
        case "mlflow":
            return MlflowRun(out, run_id, artifacts=artifacts)
        case "tensorboard":
            return TensorBoardRun(out, run_id)
        case "wandb":
            return WandbServerRun(out, run_id) if "://" in out else WandbRun(out, run_id)
    raise ValueError(f"found {tracker!r}, expected a tracker")
