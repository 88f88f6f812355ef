"""Removal of old checkpoints, and of snapshots of configs and code that nothing refers to any more."""

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rlhf_core.config.site import Site
from rlhf_core.control import run_folders, snapshots
from rlhf_core.control.promotion import is_due
from rlhf_core.control.reconcile.facts import foreign_owner
from rlhf_core.control.reconcile.flow_runs import FlowRuns
from rlhf_core.diagnosis.reconcile.decisions import ActionKind, ReconcileAction
from rlhf_core.diagnosis.reconcile.facts import World
from rlhf_core.diagnosis.retention import Scored, removable
from rlhf_core.errors import RlhfError, RunDirError
from rlhf_core.files.whole import GONE, read_all, remove_tree
from rlhf_core.history.queries import open_runs
from rlhf_core.history.queries.open_runs import OpenRun
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir, run_dirs
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.evaluation import EvaluationReport

log = logging.getLogger("rlhf.daemon")

REMOVALS = frozenset({ActionKind.REMOVE_CHECKPOINT, ActionKind.REMOVE_PUT_ASIDE})
"""Actions that a search for checkpoints finds."""

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


class CheckpointSearch:
    """Search for checkpoints that are older than the site keeps them and are neither the newest, the best, promoted nor
    in use. It remembers the runs of which nothing is left to remove: otherwise, each round would read the files of all
    runs that ever ended."""

    def __init__(
        self, site: Site, store: HistoryStore, limit_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a search that remembers nothing yet.

        Args:
            limit_s: time after which a round stops; the next one continues there.
        """
        self._site = site
        self._store = store
        self._limit_s = limit_s
        self._clock = clock
        self._settled: dict[str, tuple[object, ...]] = {}
        """Runs of which nothing is left to remove, each with what may change that: its end and its promotion."""
        self._next = ""

    @property
    def is_complete(self) -> bool:
        """False if the last round has stopped before the last run or the last removal."""
        return not self._next

    def put_off(self, actions: Iterable[ReconcileAction]) -> None:
        """Have the next round begin at the first run whose removals are among these, which this one does not reach."""
        self._next = min((one.run_id for one in actions if one.kind in REMOVALS), default=self._next)

    def removals(self, world: World, now: datetime) -> Iterator[ReconcileAction]:
        """Removals that are due, one round of the search.

        Raises:
            HistoryError: the history does not answer.
        """
        days = self._site.retention.checkpoints_days
        if not days:
            return
        begin, self._next = self._next, ""
        ended_at = {run_id: end for run_id, end in self._ended(now - timedelta(days=days)).items() if run_id >= begin}
        used = _folders_in_use(self._site, self._store, world) if ended_at else []
        standings = open_runs.named(self._store, now, ended_at)
        until_s = self._clock() + self._limit_s
        for run_id, standing in sorted(standings.items()):
            end = (ended_at[run_id], standing.promotion, standing.promoted_step)
            if self._settled.get(run_id) == end:
                continue
            if self._clock() > until_s:
                self._next = run_id
                return
            run_dir = RunDir.find(self._site.runs_dir, run_id)
            if run_dir is None:
                continue
            with suppress(RlhfError, OSError):
                if run_dir.checkpoints_dir.is_symlink() or foreign_owner(run_dir.root):
                    continue
                actions = [*_removals(run_dir, standing, ended_at[run_id], used, days, now)]
                may_change = _put_aside(run_dir) or _contains(run_dir.root, used)
                # A day more, because the clocks of its nodes may have been ahead.
                if not actions and not may_change and ended_at[run_id] < now - timedelta(days=days + 1):
                    self._settled[run_id] = end
                yield from actions

    def _ended(self, latest: datetime) -> dict[str, datetime]:
        """The runs of this site that ended before a time, each with its end."""
        found = open_runs.ended_before(self._store, latest)
        parents = {Path(path).parent for path, _ in found.values()}
        own = {folder for folder in parents if run_folders.is_same(folder, self._site.runs_dir)}
        return {run_id: ended_at for run_id, (path, ended_at) in found.items() if Path(path).parent in own}


def removed(run_dir: RunDir, folder: Path) -> tuple[bool, str]:
    """Remove a folder of checkpoints of a run. Returns True if nothing is left to do, and the outcome for the log.

    Raises:
        RunDirError, OSError: the file system failed, or the journal is damaged.
    """
    if not read_record(run_dir).ended:  # removals before this one may have taken hours
        return True, "the run was resumed meanwhile; left alone"
    is_removed = remove_tree(folder)
    return is_removed, "removed" if is_removed else "some of its files could not be removed"


def _removals(
    run_dir: RunDir, standing: OpenRun, ended_at: datetime, used: Sequence[Path], days: int, now: datetime
) -> Iterator[ReconcileAction]:
    if not read_record(run_dir).ended:
        return  # resumed since; the history will show it soon
    for step in _old_steps(run_dir, standing, ended_at, used, days, now):
        reason = f"older than {days} days, and neither the newest, the best, promoted nor in use"
        yield ReconcileAction(ActionKind.REMOVE_CHECKPOINT, run_dir.run_id, reason, step=step)
    for name in _old_put_aside(run_dir, now - timedelta(days=days)):
        reason = f"put aside, given up or left of an interrupted save or removal, and older than {days} days"
        yield ReconcileAction(ActionKind.REMOVE_PUT_ASIDE, run_dir.run_id, reason, folder=name)


def _old_put_aside(run_dir: RunDir, latest: datetime) -> list[str]:
    """Folders of checkpoints that do not count and may be removed."""
    folders = [path for path in _put_aside(run_dir) if not path.is_symlink()]
    # A removal changes the time of its folder.
    return [
        path.name
        for path in folders
        if path.name.endswith(GONE) or datetime.fromtimestamp(path.stat().st_mtime, UTC) < latest
    ]


def _put_aside(run_dir: RunDir) -> list[Path]:
    return run_dir.put_aside_folders() + run_dir.leftovers()


def _old_steps(
    run_dir: RunDir, standing: OpenRun, ended_at: datetime, used: Sequence[Path], days: int, now: datetime
) -> list[int]:
    folders = [one for one in run_dir.checkpoints() if not one.root.is_symlink()]
    manifests = {one.step: manifest for one in folders if (manifest := one.manifest()) is not None}
    # The best one of a run that may be resumed has no report yet: the evaluation comes after training.
    best = manifests[max(manifests)].best if manifests else None
    reports = read_all(run_dir.evaluations(), EvaluationReport)
    return removable(
        {step: manifest.time for step, manifest in manifests.items()},
        [Scored(one.name, one.checkpoint_step, one.value) for one in reports if math.isfinite(one.value)],
        (standing.promotion, standing.promoted_step) if standing.promotion else None,
        {one.step for one in folders if _contains(one.root, used)} | ({best.step} if best is not None else set()),
        ended_at=ended_at,
        days=days,
        now=now,
    )


def _folders_in_use(site: Site, store: HistoryStore, world: World) -> list[Path]:
    """Folders and files that runs read which are active or may be resumed, without links."""
    active = [run.run_id for run in world.runs.values() if not run.ended and not run.missing_s]
    run_dirs = {*open_runs.resumable_dirs(store), *(str(site.runs_dir / run_id) for run_id in active)}
    found: set[str] = set()
    for path in run_dirs:
        with suppress(RlhfError, OSError):
            run_dir = RunDir(Path(path))
            found |= _folders_read(run_dir, run_dir.spec.stat().st_mtime_ns)
    return [_without_links(Path(path)) for path in found if Path(path).is_absolute()]


@functools.lru_cache(1 << 16)  # a large cleanup asks for the same runs in every round
def _folders_read(run_dir: RunDir, _changed_ns: int) -> frozenset[str]:
    return frozenset(run_dir.read_spec().spec.paths.values())


def _contains(folder: Path, paths: Sequence[Path]) -> bool:
    whole = _without_links(folder)
    return any(path.is_relative_to(whole) for path in paths)


def _without_links(path: Path) -> Path:
    return Path(os.path.realpath(path))  # unlike `resolve`, never fails


# ---------------------------------------------------------------------------------------------------------------------
# Snapshots of configs and code


class SnapshotCleanup:
    """Removal of deployed configs and code that nothing can need any more. What the run directories refer to never
    changes, so each directory is read once and remembered."""

    def __init__(self, site: Site, store: HistoryStore, flow_runs: FlowRuns | None) -> None:
        """Create a cleanup that remembers nothing yet.

        Args:
            flow_runs: those of the site's Prefect server; None if it has none.
        """
        self._site = site
        self._flow_runs = flow_runs
        self._store = store
        self._sources: dict[str, str] = {}

    def run(self, may: Callable[[], bool] = lambda: True) -> list[Path]:
        """Remove unneeded snapshots and log each one. Returns the folders that were removed.

        If Prefect does not answer, nothing is removed, because scheduled flow runs may still need any of them.

        Raises:
            HistoryError: the history does not answer.
        """
        if not self._removable(()) or self._flow_runs is None or not self._flow_runs.answers():
            return []
        sources = [*self._flow_runs.configs(), *self._sources_of_runs()]
        referred = {key for source in sources if (key := snapshots.key_of(source)) is not None}
        removed = []
        for copy in self._removable(referred):
            if not may():
                break
            if snapshots.remove(copy):
                removed.append(copy.folder)
                log.info(
                    "removed %s: asked for last at %s, nothing refers to it", copy.folder, f"{copy.requested_at:%F}"
                )
        return removed

    def _removable(self, referred: Collection[tuple[str, str]]) -> list[snapshots.Copy]:
        days = self._site.retention.deployments_days
        return snapshots.removable(snapshots.copies(self._site.home), referred, days=days, now=utc_now())

    def _sources_of_runs(self) -> Iterator[str]:
        """Configs of runs that may be resumed. The history also knows runs in other folders of this site; the
        directories also show runs that the history has not read."""
        yield from open_runs.resumable_sources(self._store)
        for run_dir in run_dirs(self._site.runs_dir):
            source = self._source(run_dir)
            if snapshots.key_of(source) is not None and self._may_go_on(run_dir):
                yield source

    def _source(self, run_dir: RunDir) -> str:
        if run_dir.run_id not in self._sources:
            try:
                self._sources[run_dir.run_id] = run_dir.read_spec().config_source
            except (RunDirError, OSError):
                return ""  # it cannot be resumed; the next round tries again
        return self._sources[run_dir.run_id]

    @staticmethod
    def _may_go_on(run_dir: RunDir) -> bool:
        try:
            record = read_record(run_dir)
            return record.state is not RunState.COMPLETED or is_due(run_dir.read_spec(), record)
        except (RunDirError, OSError):
            return True  # its journal is damaged or closed to others: it can be resumed once that is repaired
