"""Ingestion of all active run directories of a site into the history."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from rlhf_core.config.site import Site
from rlhf_core.errors import HistoryError
from rlhf_core.history.queries import open_runs
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir, run_dirs
from rlhf_core.schemas.base import utc_now
from rlhf_core.survival import Survived
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
    _read: dict[str, int] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    _sweep: list[str] = field(default_factory=list)

    def ingest(self) -> int:
        """Read new data from all active runs and some of the others. Returns the number of runs that had any."""
        try:
            found = open_runs.find(self.store, utc_now(), since=utc_now() - LINGER)
        except HistoryError as error:
            self._warn_once("", str(error))
            return 0
        self._problems.pop("", None)
        # The order is shuffled each time, so that under load no run always comes last.
        ids = random.sample(sorted(found), len(found))
        return sum(self._sync(run_id) for run_id in [*ids, *self._next_of_the_others()])

    def _next_of_the_others(self) -> list[str]:
        if not self._sweep:
            try:
                self._sweep = [one.run_id for one in run_dirs(self.site.runs_dir)]
            except OSError as error:
                self._warn_once(str(self.site.runs_dir), f"cannot be listed: {error.strerror}")
                return []
            self._problems.pop(str(self.site.runs_dir), None)
            for gone in self._read.keys() - set(self._sweep):
                del self._read[gone]
        taken, self._sweep = self._sweep[:SWEEP_RUNS], self._sweep[SWEEP_RUNS:]
        return taken

    def _sync(self, run_id: str) -> bool:
        with Survived() as found:  # a directory that breaks the reader must not keep the others from being read
            run_dir = RunDir.of(self.site.runs_dir, run_id)
            seen = files_digest(run_dir)
            if seen is None or self._read.get(run_id) == seen:
                return False
            sync(run_dir, self.store)
            self._read[run_id] = seen
            self._problems.pop(run_id, None)
            return True
        self._warn_once(run_id, found.message)
        return False

    def _warn_once(self, about: str, problem: str) -> None:
        """Log each problem once, not every two seconds."""
        if self._problems.get(about) != problem:
            self._problems[about] = problem
            self.warn(f"{about}: {problem}" if about else problem)
