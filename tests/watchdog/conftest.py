"""History fixtures on both databases for the tests of this folder."""

from pathlib import Path

import pytest
from history_tools import RunFiles, database_url, runs, store, synced, whole_run

from rlhf_core.history.store import HistoryStore

__all__ = ["database_url", "runs", "store"]


@pytest.fixture
def run(runs: Path) -> RunFiles:
    """A run that has just been created."""
    return RunFiles(runs).created()


@pytest.fixture
def whole(runs: Path) -> RunFiles:
    """A run from its creation to its end."""
    return whole_run(runs)


@pytest.fixture
def known(whole: RunFiles, store: HistoryStore) -> RunFiles:
    """A whole run whose files are in the history."""
    return synced(whole, store)
