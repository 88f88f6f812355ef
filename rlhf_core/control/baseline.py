"""The baseline of a run: the earlier runs that preflight compares it with. An unreachable history does not block a
run."""

from collections.abc import Callable

from rlhf_core.config.site import Site
from rlhf_core.errors import HistoryError
from rlhf_core.history import database, migrate, queries
from rlhf_core.history.run_shape import shape_key
from rlhf_core.history.store import HistoryStore
from rlhf_core.preflight.changes import read_basis
from rlhf_core.preflight.facts import Baseline, GoodRun
from rlhf_core.schemas.run import RunSpec

Warn = Callable[[str], None]
"""Called with a message if the history is unreachable."""


def read_baseline(store: HistoryStore, spec: RunSpec, warn: Warn, run_id: str = "") -> Baseline:
    """The baseline of a run; empty if there are no earlier runs. Trials of the run itself do not count."""
    try:
        found = queries.last_good(store, spec.name, run_id)
        return Baseline(
            seconds_per_step=queries.seconds_per_step(store, shape_key(spec)),
            last_good=GoodRun(found["run_id"], found["spec"], read_basis(found["basis"])) if found else None,
            known=True,
        )
    except HistoryError as error:
        warn(_without(error))
        return Baseline()


def read_baseline_of_site(site: Site, spec: RunSpec, warn: Warn) -> Baseline:
    """The baseline for `rlhf check`, which has no history open and must not create one."""
    try:
        file = database.sqlite_file(database.parse_url(site.database_url))
        if file is not None and migrate.is_new(file):
            return Baseline(known=True)
        with HistoryStore(site.database_url) as store:
            return read_baseline(store, spec, warn)
    except HistoryError as error:
        warn(_without(error))
        return Baseline()


def _without(error: HistoryError) -> str:
    return f"skipping the comparison with earlier runs: {error}"
