"""Ingestion of all active run directories of a site into the history."""

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from rlhf_core.condition_log import ConditionLog
from rlhf_core.config.site import Site
from rlhf_core.control.run_folders import moved_here
from rlhf_core.errors import HistoryError
from rlhf_core.history.queries import open_runs
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir, run_dirs
from rlhf_core.schemas.base import utc_now
from rlhf_core.survival import Survived
from rlhf_core.text.formatting import count
from rlhf_core.watchdog.ingest import files_digest, sync

log = logging.getLogger("rlhf.daemon")

SWEEP_RUNS = 20
"""Number of inactive run directories that each pass checks for unread or unknown contents."""

LINGER = timedelta(minutes=10)
"""Time for which the files of an ended run are still read as often as those of an active one."""


@dataclass
class Ingester:
    """Reads run directories into the history. For each directory, it remembers one number: the directory's fingerprint
    when everything in it had been read."""

    site: Site
    store: HistoryStore
    warn: Callable[[str], None] = log.warning
    _stamps: dict[str, int] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)
    _sweep: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._problems = ConditionLog(self.warn)

    def ingest(self) -> int:
        """Read new data from all active runs and some of the others. Returns the number of runs that had any."""
        try:
            found = open_runs.find(self.store, utc_now(), since=utc_now() - LINGER)
        except HistoryError as error:
            self._problems.log_change(str(error))
            return 0
        self._problems.end()
        # The order is shuffled each time, so that under load no run always comes last.
        ids = random.sample(sorted(found), len(found))
        return sum(self._sync(run_id) for run_id in [*ids, *self._next_of_the_others()])

    def _next_of_the_others(self) -> list[str]:
        runs = self.site.runs_dir
        if not self._sweep:
            try:
                self._sweep = [one.run_id for one in run_dirs(runs)]
            except OSError as error:
                self._problems.log_change(f"{runs}: cannot be listed: {error.strerror}", runs)
                return []
            self._problems.end(runs)
            for gone in self._read.keys() - set(self._sweep):
                del self._read[gone]
                self._problems.end(gone)
            with suppress(HistoryError):  # the next sweep compares them
                self._compare_rows()
        taken, self._sweep = self._sweep[:SWEEP_RUNS], self._sweep[SWEEP_RUNS:]
        return taken

    def _compare_rows(self) -> None:
        """Compare the directories with the rows: forget what was read of a run whose row has changed since, because a
        backup may have been restored, and correct the paths of those that were moved."""
        rows = self.store.ingested_runs()
        stamps = {run_id: stamp for run_id, (stamp, _) in rows.items()}
        for run_id in [*self._read]:
            if run_id not in stamps or stamps[run_id] != self._stamps.get(run_id):
                del self._read[run_id]
        self._stamps = stamps
        recorded = {run_id: rows[run_id][1] for run_id in self._sweep if run_id in rows}
        moved = moved_here(self.site.runs_dir, recorded)
        if moved:
            self.store.record_move(moved, str(self.site.runs_dir))
            log.info("%s had another path in the history: now in %s", count(len(moved), "run"), self.site.runs_dir)

    def _sync(self, run_id: str) -> bool:
        with Survived() as found:  # a directory that breaks the reader must not keep the others from being read
            run_dir = RunDir.of(self.site.runs_dir, run_id)
            seen = files_digest(run_dir)
            if seen is None or self._read.get(run_id) == seen:
                return False
            report = sync(run_dir, self.store)
            self._read[run_id] = seen
            self._problems.end(run_id)
            return report.batches > 0
        self._problems.log_change(f"{run_id}: {found.message}", run_id)
        return False
