"""Strikes against nodes in the history, without those from before a repair of the node."""

import os
import shutil
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from history_tools import at, whole_run

from rlhf_core.errors import BadInput
from rlhf_core.files.whole import write_text
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import cleared_nodes, run_dirs
from rlhf_core.watchdog.ingest import sync
from rlhf_core.watchdog.node_records import clear_node, clearings, node_records, node_standings

NOW = at(3600)


@pytest.fixture
def store(tmp_path: Path, runs: Path) -> Iterator[HistoryStore]:
    """A history in which n2 was lost a few seconds after the run started."""
    with HistoryStore(f"sqlite:///{tmp_path}/history.db") as store:
        sync(whole_run(runs).dir, store)
        yield store


def excluded(store: HistoryStore, runs: Path) -> list[str]:
    return [one.node for one in node_standings(store, NOW, runs) if one.excluded_until is not None]


def test_strikes_before_a_repair_no_longer_count(store: HistoryStore, runs: Path) -> None:
    assert excluded(store, runs) == ["n2"], "negative control: without a clearance it stays excluded"
    struck = queries.node_strikes(store, at(0))
    done = clear_node(store, runs, "n2", "bea", " new cable ", NOW)
    assert done.cleared is not None
    assert (done.cleared.by, done.cleared.reason, done.cleared.time) == ("bea", "new cable", NOW)
    assert (done.num_cleared, done.standing.num_strikes, done.standing.score) == (1, 0, 0.0)
    assert excluded(store, runs) == []
    assert queries.node_strikes(store, at(0)) == struck, "the history keeps it"
    (shown,) = [one for one in node_records(store, NOW, runs) if one.standing.node == "n2"]
    assert shown == done


def test_strikes_after_a_repair_count(store: HistoryStore, runs: Path) -> None:
    first, second = [time for _, node, _, time in queries.node_strikes(store, at(0)) if node == "n2"]
    clear_node(store, runs, "n2", "bea", "new cable", first + (second - first) / 2)
    (standing,) = [one for one in node_standings(store, NOW, runs) if one.node == "n2"]
    assert (standing.num_strikes, standing.last_at, standing.excluded_until is not None) == (1, second, True)
    again = clear_node(store, runs, "n2", "carl", "new board", NOW)
    assert again.cleared is not None
    assert (again.cleared.by, again.num_cleared) == ("carl", 1)
    assert len(list(cleared_nodes(runs).iterdir())) == 2, "both are kept"


def test_a_repair_survives_a_rebuild_of_the_history(store: HistoryStore, runs: Path, tmp_path: Path) -> None:
    clear_node(store, runs, "n2", "bea", "new cable", NOW)
    with HistoryStore(f"sqlite:///{tmp_path}/other.db") as other:
        for run_dir in run_dirs(runs):
            sync(run_dir, other)
        assert queries.node_strikes(other, at(0)) != []
        assert excluded(other, runs) == []
        shutil.rmtree(cleared_nodes(runs))
        assert excluded(other, runs) == ["n2"], "negative control: the clearance comes from the file"


def test_a_node_without_strikes_is_not_cleared(store: HistoryStore, runs: Path) -> None:
    first = clear_node(store, runs, "n2", "bea", "new cable", NOW)
    assert clear_node(store, runs, "n2", "carl", "again", NOW + timedelta(seconds=5)) == first
    assert len(list(cleared_nodes(runs).iterdir())) == 1


def test_a_node_that_cannot_be_cleared_is_reported(store: HistoryStore, runs: Path) -> None:
    with pytest.raises(BadInput, match="'n7'; known are n2"):
        clear_node(store, runs, "n7", "bea", "new cable", NOW)
    with pytest.raises(BadInput, match="--reason is missing"):
        clear_node(store, runs, "n2", "bea", " ", NOW)
    assert excluded(store, runs) == ["n2"]
    write_text(cleared_nodes(runs) / "torn.json", "{")
    assert clearings(runs) == {}


@pytest.mark.parametrize(("rights", "of_file"), [(0o3770, 0o640), (0o755, 0o644), (0o700, 0o600)])
def test_all_who_share_the_runs_read_a_repair_whatever_the_umask(
    store: HistoryStore, runs: Path, rights: int, of_file: int
) -> None:
    runs.chmod(rights)
    before = os.umask(0o077)
    try:
        clear_node(store, runs, "n2", "bea", "new cable", NOW)
    finally:
        os.umask(before)
    (file,) = cleared_nodes(runs).iterdir()
    assert stat.S_IMODE(cleared_nodes(runs).stat().st_mode) == rights
    assert stat.S_IMODE(file.stat().st_mode) == of_file
