"""The reading of all active run directories of a site into the history."""

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
from rlhf_core.watchdog.ingest import glance, sync

log = logging.getLogger("rlhf.daemon")

SWEEP_RUNS = 20
"""Run directories beside the active ones that each turn looks at: what was left unread, or is not known yet."""

LINGER = timedelta(minutes=10)
"""Time for which the files of a run that has ended are still read as often as those of the others."""


@dataclass
class Ingester:
    """Reads run directories into the history. It remembers one number per run directory: what it looked like when
    everything in it had been read."""

    site: Site
    store: HistoryStore
    say: Callable[[str], None] = log.warning
    _read: dict[str, int] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    _sweep: list[str] = field(default_factory=list)

    def ingest(self) -> int:
        """Read what is new in all active runs, and in some of the others; how many had something new."""
        try:
            found = open_runs.find(self.store, utc_now(), since=utc_now() - LINGER)
        except HistoryError as error:
            self._complain("", str(error))
            return 0
        self._problems.pop("", None)
        # In an order of its own each time: where there is more to do than time, no run is always last.
        ids = random.sample(sorted(found), len(found))
        return sum(self._sync(run_id) for run_id in [*ids, *self._next_of_the_others()])

    def _next_of_the_others(self) -> list[str]:
        if not self._sweep:
            self._sweep = [one.run_id for one in run_dirs(self.site.runs_dir)]
            for gone in self._read.keys() - set(self._sweep):
                del self._read[gone]
        taken, self._sweep = self._sweep[:SWEEP_RUNS], self._sweep[SWEEP_RUNS:]
        return taken

    def _sync(self, run_id: str) -> bool:
        with Survived() as found:  # a directory that breaks the reader must not cost the others theirs
            run_dir = RunDir.of(self.site.runs_dir, run_id)
            seen = glance(run_dir)
            if seen is None or self._read.get(run_id) == seen:
                return False
            sync(run_dir, self.store)
            self._read[run_id] = seen
            self._problems.pop(run_id, None)
            return True
        self._complain(run_id, found.message)
        return False

    def _complain(self, run_id: str, problem: str) -> None:
        """Once per problem, not every two seconds."""
        if self._problems.get(run_id) != problem:
            self._problems[run_id] = problem
            self.say(f"{run_id}: {problem}" if run_id else problem)
