"""The baseline of a run: earlier runs that preflight compares it with. A history that does not answer blocks no run."""

from collections.abc import Callable

from rlhf_core.config.site import Site
from rlhf_core.errors import HistoryError
from rlhf_core.history import database, migrate, queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.preflight.facts import NO_BASELINE, Baseline, GoodRun
from rlhf_core.preflight.trial import read_basis
from rlhf_core.schemas.run import RunSpec, shape_key

Say = Callable[[str], None]
"""Told that the history does not answer."""


def read_baseline(store: HistoryStore, spec: RunSpec, say: Say, run_id: str = "") -> Baseline:
    """The past of a run; empty where there is none. What was tried out for the run itself is no past."""
    try:
        found = queries.last_good(store, spec.name, run_id)
        return Baseline(
            seconds_per_step=queries.seconds_per_step(store, shape_key(spec)),
            last_good=GoodRun(found["run_id"], found["spec"], read_basis(found["basis"])) if found else None,
            known=True,
        )
    except HistoryError as error:
        say(_without(error))
        return NO_BASELINE


def read_baseline_of_site(site: Site, spec: RunSpec, say: Say) -> Baseline:
    """The same for `rlhf check`, which has no history open, and makes none."""
    try:
        file = database.sqlite_file(database.parse_url(site.database_url))
        if file is not None and migrate.is_new(file):
            return Baseline(known=True)
        with HistoryStore(site.database_url) as store:
            return read_baseline(store, spec, say)
    except HistoryError as error:
        say(_without(error))
        return NO_BASELINE


def _without(error: HistoryError) -> str:
    return f"nothing is compared with earlier runs: {error}"
