"""Progress of a run, read repeatedly from its directory or from one poll of its watcher."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.files.whole import read_all
from rlhf_core.launch.journal import RunRecord, fold
from rlhf_core.render.progress import RunProgress
from rlhf_core.render.timeline import Timeline
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RUN_ENDS, RunState
from rlhf_core.schemas.base import LONGEST_S
from rlhf_core.schemas.regression import Regression
from rlhf_core.schemas.reports import AgentStatus, RankStatus
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.watchdog.evidence import AttemptProgress, AttemptReader, regressed
from rlhf_core.watchdog.watcher import AttemptSnapshot

SMOOTHING = 0.1
"""Weight of the newest step in the moving average of the step time."""


@dataclass(frozen=True)
class RunSnapshot:
    """Snapshot of a run, taken from its directory."""

    stored: StoredSpec
    record: RunRecord
    timeline: Timeline
    progress: RunProgress
    ranks: Sequence[RankStatus] = ()
    """Workers of the most recent start."""
    regressed: Sequence[Regression] = ()
    """Held-out scores that became worse."""
    undriven_since: datetime | None = None
    """Time since when no controller drives the run; None if one does, or if the history was not asked."""


class StepTimer:
    """Mean step time of each loop, computed from the metrics of the steps."""

    def __init__(self) -> None:
        self._mean_s: dict[str, float] = {}
        self._newest: tuple[int, int, int] = (0, 0, 0)

    def update(self, place: tuple[int, int, int], loop: str, metrics: Mapping[str, float]) -> float | None:
        """Count a step once, and return the mean of its loop in seconds; None if unknown.

        Args:
            place: attempt, restart and step.
        """
        seconds = metrics.get("time/step_s")
        # External trainers may log NaN, for instance, which would stay in the mean.
        if seconds is not None and 0 <= seconds <= LONGEST_S and loop and place != self._newest:
            mean_s = self._mean_s.get(loop, seconds)
            self._mean_s[loop] = mean_s + SMOOTHING * (seconds - mean_s)
            self._newest = place
        return self._mean_s.get(loop)


class RunReader:
    """Reads a run repeatedly; growing files are read from where the last call stopped.

    Raises:
        RunDirError: the run directory is missing or damaged.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.stored = run_dir.read_spec()
        self._attempts: dict[int, AttemptReader] = {}
        self._timer = StepTimer()

    def read(self) -> RunSnapshot:
        """Read the current state of the run.

        Raises:
            JournalDamaged: a line of its journal cannot be read.
            OSError: the file system does not respond.
        """
        timeline = read_timeline(self.run_dir)
        attempts = self.run_dir.attempts()
        restarts = attempts[-1].restarts() if attempts else []
        statuses = read_all(restarts[-1].agent_statuses(), AgentStatus) if restarts else []
        return RunSnapshot(
            stored=self.stored,
            record=fold(timeline.lines),
            timeline=timeline,
            progress=self._progress(timeline.state),
            ranks=[rank for status in statuses for rank in status.ranks],
            regressed=regressed(self.run_dir),
        )

    def _progress(self, state: RunState) -> RunProgress:
        for attempt in self.run_dir.attempts():
            known = self._attempts.get(attempt.number)
            # Only the newest one still grows.
            if known is None or attempt.number == max(self._attempts):
                self._attempts.setdefault(attempt.number, AttemptReader(attempt)).update()
        if not self._attempts:
            return RunProgress(state, self.stored.spec.total_steps)
        number = max(self._attempts)
        newest = self._attempts[number]
        found = _run_progress(state, number, newest.progress, self.stored.spec, self._timer)
        furthest = max(one.progress.step for one in self._attempts.values())
        return replace(found, furthest=furthest, nodes=sorted(newest.published))


def progress_of_poll(snapshot: AttemptSnapshot, spec: RunSpec, timer: StepTimer) -> RunProgress:
    """Progress according to one poll of an attempt.

    Args:
        timer: the timer of the run or trial with this spec.
    """
    found = _run_progress(RunState.TRAINING, snapshot.attempt, snapshot.progress, spec, timer)
    job = snapshot.job
    return replace(found, nodes=job.nodes, waits_for=job.reason, history_behind=snapshot.history_behind)


def _run_progress(
    state: RunState, attempt: int, progress: AttemptProgress, spec: RunSpec, timer: StepTimer
) -> RunProgress:
    found = RunProgress(
        state=state,
        total_steps=spec.total_steps,
        attempt=attempt,
        restarts=progress.restarts_made,
        role=progress.role,
        phase=progress.phase,
        loop=progress.loop,
        step=progress.step,
        furthest=progress.step,
        evaluating=progress.evaluating,
        metrics=progress.metrics,
    )
    if state in RUN_ENDS:
        return found
    if progress.is_restarting:
        return replace(found, loop="")
    step_s = timer.update((attempt, progress.restart, progress.step), progress.loop, progress.metrics)
    num_left = spec.total_steps - progress.step
    has_more = progress.loop == spec.algorithm and not progress.evaluating and num_left > 0
    return replace(found, step_s=step_s, left_s=num_left * step_s if has_more and step_s is not None else None)
