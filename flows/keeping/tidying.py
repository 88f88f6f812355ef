"""Removes kept configs and code (``flows/asking/kept.py``) that nothing refers to any more."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType

from flows.asking import kept
from flows.promoting.promotion import is_due
from flows.server import server_answers
from rlhf_core.config import Site
from rlhf_core.errors import RunDirError
from rlhf_core.history import active
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir import RunDir, run_dirs
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import utc_now

log = logging.getLogger("rlhf.keeper")

_Row = TypeVar("_Row")

_PAGE = 200
"""As many as Prefect gives at a time."""


class Tidier:
    """Removes configs and code that were deployed once and that nothing can need any more. It remembers what the run
    directories refer to, which never changes: each is read once."""

    def __init__(self, site: Site, store: HistoryStore, now: Callable[[], datetime] = utc_now) -> None:
        self._site = site
        self._store = store
        self._now = now
        self._sources: dict[str, str] = {}

    def tidy(self, may: Callable[[], bool] = lambda: True) -> list[Path]:
        """Remove what may go, and say so in the log; the folders that were removed.

        Where Prefect does not answer nothing goes: whether something is scheduled is not known then.

        Raises:
            HistoryError: the history does not answer.
        """
        old = self._removable(())
        if not old or not server_answers():
            return []
        referred = {*_referred_in_prefect(), *self._referred_by_runs()}
        removed = []
        for copy in self._removable(referred):
            if not may():
                break
            if kept.remove(copy):
                removed.append(copy.folder)
                log.info("removed %s: asked for last at %s, nothing refers to it", copy.folder, f"{copy.asked_at:%F}")
        return removed

    def _removable(self, referred: Collection[tuple[str, str]]) -> list[kept.Copy]:
        days = self._site.retention.deployments_days
        return kept.removable(kept.copies(self._site.home), referred, days=days, now=self._now()) if days else []

    def _referred_by_runs(self) -> Iterator[tuple[str, str]]:
        """Of runs that may be gone on with. The history knows them also where this site has other folders of runs, the
        directories also where the history has not read them."""
        sources = [*active.resumable_sources(self._store)]
        for run_dir in run_dirs(self._site.runs_dir):
            source = self._source(run_dir)
            if kept.key_of(source) is not None and self._may_go_on(run_dir):
                sources.append(source)
        yield from _keys(sources)

    def _source(self, run_dir: RunDir) -> str:
        if run_dir.run_id not in self._sources:
            try:
                self._sources[run_dir.run_id] = run_dir.read_spec().config_source
            except RunDirError:
                return ""  # nobody can go on with it; the next round looks again
        return self._sources[run_dir.run_id]

    @staticmethod
    def _may_go_on(run_dir: RunDir) -> bool:
        try:
            record = read_record(run_dir)
        except RunDirError:
            return True  # its journal is damaged: it goes on once that is mended
        return record.state is not RunState.COMPLETED or is_due(run_dir.read_spec(), record)


def _referred_in_prefect() -> Iterator[tuple[str, str]]:
    """Of deployments, and of flow runs that may still begin or be tried again.

    Raises whatever Prefect raises when it does not answer.
    """
    begun_again = [one for one in StateType if one is not StateType.COMPLETED]
    open_ones = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=begun_again)))
    with get_client(sync_client=True) as client:
        for page in _overlapping(lambda offset: client.read_deployments(limit=_PAGE, offset=offset)):
            yield from _keys(str(one.parameters.get("config") or "") for one in page)
        for runs in _overlapping(
            lambda offset: client.read_flow_runs(flow_run_filter=open_ones, limit=_PAGE, offset=offset)
        ):
            yield from _keys(str(one.parameters.get("config") or "") for one in runs)


def _overlapping(read: Callable[[int], Sequence[_Row]]) -> Iterator[Sequence[_Row]]:
    """Pages that overlap by half: one that ends while it is read moves all after it, and none may be missed."""
    offset = 0
    while True:
        page = read(offset)
        yield page
        if len(page) < _PAGE:
            return
        offset += _PAGE // 2


def _keys(sources: Iterable[str]) -> Iterator[tuple[str, str]]:
    for source in sources:
        key = kept.key_of(source)
        if key is not None:
            yield key
