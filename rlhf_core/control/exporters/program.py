"""``python -m rlhf_core.control.exporters.program TRACKER``: export of the runs of a site to an experiment tracker.

The site daemon keeps one such process for each tracker of ``[export]``. The process reads the history and nothing else,
so a tracker that is slow, away, or makes its library hang or crash delays neither a run, nor the daemon, nor another
tracker. What it has missed is exported later.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from pydantic import Field

from rlhf_core.condition_log import ConditionLog
from rlhf_core.config.site import Site, load_site
from rlhf_core.control import run_folders
from rlhf_core.control.exporters.processes import HANG_S, HUNG
from rlhf_core.errors import BadConfig, HistoryError, RlhfError
from rlhf_core.files import private as private_files
from rlhf_core.files.whole import read_model, remove_tree, write_model
from rlhf_core.history.queries import open_runs
from rlhf_core.history.store import HistoryStore
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.render.exports.following import INTERVAL_S, LiveExport
from rlhf_core.scheduler.passed_environment import read_private
from rlhf_core.schemas.base import Schema, utc_now
from rlhf_core.text.escaping import terminal

CATCH_UP = timedelta(days=7)
"""Time after the end of a run in which it is exported if the tracker lacks something of it."""


class Exported(Schema):
    """``services/exported-<tracker>.json`` of the home folder: the ended runs that the tracker has."""

    runs: dict[str, int] = Field(default_factory=dict)
    """By run, the number of the ingestion up to which the tracker has it."""


def main(tracker: str, parent: int) -> int:
    """Export runs until the daemon ends. The exit code is 2 if an administrator has to correct something first."""
    die_with_parent(parent=parent)
    try:
        site = load_site()
        if tracker not in site.export.trackers:
            raise BadConfig(f"{site.home / 'rlhf.toml'}: export.{tracker} is no longer set")
        _take_credentials(site)
        if tracker == "wandb":
            _make_unsent(site)
        with HistoryStore(site.database_url) as store:
            exporter = SiteExporter(site, store, tracker)
            while True:
                exporter.update()
                time.sleep(INTERVAL_S)
    except RlhfError as error:
        _log(str(error))
        return error.exit_code


def _take_credentials(site: Site) -> None:
    """Add the variables of ``export.pass_environment`` to the environment of this process.

    Raises:
        BadConfig: a value is missing.
        SubmissionFailed: the file with the values is not usable.
    """
    missing = [name for name in site.export.pass_environment if not os.environ.get(name)]
    stored = read_private(site.job_secrets) if missing and site.job_secrets is not None else {}
    for name in missing:
        if not stored.get(name):
            raise BadConfig(
                f"{name}: named in export.pass_environment but not set. Set it in the environment of the site daemon, "
                f"or write NAME=value into {site.job_secrets} (mode 600), and restart the daemon"
            )
        os.environ[name] = stored[name]


def _make_unsent(site: Site) -> None:
    """Give wandb an empty folder for what it has not sent yet: an earlier process may have been killed. What was in it
    is exported again."""
    folder = site.home / "services" / "unsent-wandb"
    remove_tree(folder)
    private_files.make_folder(folder)
    os.environ["WANDB_DIR"] = str(folder)


class SiteExporter:
    """The active runs of a site, and those that ended lately, in one tracker."""

    def __init__(self, site: Site, store: HistoryStore, tracker: str, limit_s: float = HANG_S) -> None:
        self._site = site
        self._store = store
        self._limit_s = limit_s
        self._live = LiveExport(store, tracker, site.export.trackers[tracker], _log)
        self._outage = ConditionLog(_log)
        self._file = exported_file(site.home, tracker)
        self._complete = (read_model(self._file, Exported) or Exported()).runs

    def update(self) -> None:
        """Export what is new. Errors of the history and of the tracker are logged, and the next call tries again."""
        now = utc_now()
        try:
            found = open_runs.find(self._store, now, since=now - CATCH_UP)
        except HistoryError as error:
            self._outage.log_change(str(error))
            return
        self._outage.end()
        due = {
            run_id: one.ingest_stamp
            for run_id, one in found.items()
            if not one.trial_of
            and self._complete.get(run_id) != one.ingest_stamp
            and run_folders.is_same(Path(one.run_dir).parent, self._site.runs_dir)
        }
        # The order is shuffled, so that one run that makes the tracker hang is not always before the others.
        complete = self._live.update(
            {run_id: due[run_id] for run_id in random.sample(sorted(due), len(due))}, lambda: _at_most(self._limit_s)
        )
        if complete:
            known = {run_id: stamp for run_id, stamp in self._complete.items() if run_id in found}
            self._complete = known | {run_id: due[run_id] for run_id in complete}
            private_files.make_folder(self._file.parent)
            write_model(self._file, Exported(runs=self._complete))


def exported_file(home: Path, tracker: str) -> Path:
    """Path of the record of exported runs."""
    return home / "services" / f"exported-{tracker}.json"


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Exit from this process if the block takes longer: libraries of trackers may wait forever."""
    timer = threading.Timer(seconds, os._exit, (HUNG,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _log(text: str) -> None:
    print(f"{utc_now():%Y-%m-%d %H:%M:%S} {terminal(text)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
