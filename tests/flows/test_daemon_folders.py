"""A site whose folder of runs has several paths, was moved, or is not the only one of the history."""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from control_fakes import FakeScheduler
from history_tools import RunFiles, new_sqlite, runs, store, synced

from rlhf_core.cli import doctor
from rlhf_core.config.site import Site, load_site
from rlhf_core.control import run_folders
from rlhf_core.control.ingester import Ingester
from rlhf_core.control.reconcile.actions import Reconciler
from rlhf_core.control.reconcile.loop import take_lease
from rlhf_core.control.run_folders import earlier_lease_name, lease_name
from rlhf_core.diagnosis.reconcile.decisions import ActionKind
from rlhf_core.errors import LeaseLost
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.site import RetentionSite

__all__ = ["runs", "store"]


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return new_sqlite(tmp_path)


@pytest.fixture
def site(runs: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr("rlhf_core.control.reconcile.actions.get_scheduler", lambda name: FakeScheduler())
    return dataclasses.replace(load_site(), runs_dir=runs, database_url=database_url)


@pytest.fixture
def run(store: HistoryStore, runs: Path) -> RunFiles:
    """A run in training that has lost its controller."""
    made = RunFiles(runs).created()
    for seconds, state in enumerate((RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING), start=1):
        made.moved(state, seconds)
    return synced(made, store)


def found(site: Site, store: HistoryStore, folder: Path, warnings: list[str]) -> Sequence[ActionKind]:
    """Actions of a daemon of the site with another path of the folder."""
    reconciler = Reconciler(dataclasses.replace(site, runs_dir=folder), store, flow_runs=None, warn=warnings.append)
    reconciler.poll()
    return [one.kind for one in reconciler.poll()]


def linked(folder: Path) -> Path:
    link = folder.with_name("link")
    link.symlink_to(folder)
    return link


def test_a_run_is_looked_after_through_another_path_of_its_folder(
    site: Site, store: HistoryStore, run: RunFiles
) -> None:
    """Before, a daemon with a link as RLHF_RUNS left all runs alone, and said nothing."""
    warnings: list[str] = []
    assert found(site, store, site.runs_dir, warnings) == [ActionKind.ADOPT], "the control"
    link = linked(site.runs_dir)
    Ingester(dataclasses.replace(site, runs_dir=link), store).ingest()
    assert found(site, store, link, warnings) == [ActionKind.ADOPT]
    assert warnings == []
    assert queries.run_dir_of(store, run.run_id) == run.dir, "it is still right"


def test_retention_looks_through_another_path_of_the_folder(site: Site, store: HistoryStore, run: RunFiles) -> None:
    for step in (4, 8):
        run.checkpoint(step, 5)
    run.moved(RunState.FAILED, 6)
    synced(run, store)
    site = dataclasses.replace(site, runs_dir=linked(site.runs_dir), retention=RetentionSite(checkpoints_days=7))
    (action,) = Reconciler(site, store, flow_runs=None).poll(retention=True)
    assert (action.kind, action.step) == (ActionKind.REMOVE_CHECKPOINT, 4)


def test_the_paths_of_a_moved_folder_are_corrected(site: Site, store: HistoryStore, run: RunFiles) -> None:
    """Before, a daemon looked after none of its runs until `rlhf db rebuild`."""
    moved, warnings = site.runs_dir.with_name("moved"), list[str]()
    site.runs_dir.rename(moved)
    assert found(site, store, moved, warnings) == []
    assert warnings == [], "the ingester is about to correct them"
    Ingester(dataclasses.replace(site, runs_dir=moved), store).ingest()
    assert queries.run_dir_of(store, run.run_id).root == moved / run.run_id
    assert found(site, store, moved, warnings) == [ActionKind.ADOPT]


def test_runs_without_a_daemon_are_reported_once(site: Site, store: HistoryStore, run: RunFiles) -> None:
    elsewhere, warnings = site.runs_dir.with_name("elsewhere"), list[str]()
    elsewhere.mkdir()
    here = dataclasses.replace(site, runs_dir=elsewhere)
    assert found(site, store, elsewhere, warnings) == []
    (warning,) = warnings
    assert warning.startswith(f"{site.runs_dir} has open runs and no known daemon: set RLHF_RUNS to that folder")
    item = doctor._open_runs(here, store)
    assert item.ok, "they may be those of another site"
    assert item.found == f"1 run active or waiting for a promotion; no known daemon for {site.runs_dir}"
    store.acquire_lease(lease_name(site.runs_dir), "daemon@elsewhere:1:1.00", 60)
    assert found(site, store, elsewhere, warnings) == []
    assert len(warnings) == 1, "it has its own daemon now"
    assert doctor._open_runs(here, store).advice == ""


def test_a_controller_drives_its_run_without_a_daemon(site: Site, store: HistoryStore, run: RunFiles) -> None:
    """A run in a terminal with an RLHF_RUNS of its own, for instance."""
    elsewhere, warnings = site.runs_dir.with_name("elsewhere"), list[str]()
    elsewhere.mkdir()
    token = store.acquire_lease(run.run_id, "ann@elsewhere:1:1.00", 60)
    assert found(site, store, elsewhere, warnings) == []
    assert warnings == []
    store.release_lease(run.run_id, "ann@elsewhere:1:1.00", token)
    found(site, store, elsewhere, warnings)
    assert len(warnings) == 1, "the control"


def test_a_folder_that_does_not_respond_is_left_alone(
    site: Site, store: HistoryStore, run: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hard NFS mount of another site, whose server is down."""
    elsewhere, warnings = site.runs_dir.with_name("elsewhere"), list[str]()
    elsewhere.mkdir()
    is_up, lookups = threading.Event(), list[Path]()

    def waits(folder: Path, other: Path) -> bool:
        lookups.append(folder)
        is_up.wait(5)
        return False

    monkeypatch.setattr(Path, "samefile", waits)
    monkeypatch.setattr(run_folders, "TIMEOUT_S", 0.05)
    assert found(site, store, elsewhere, warnings) == []
    Ingester(dataclasses.replace(site, runs_dir=elsewhere), store).ingest()
    assert (lookups, warnings) == ([site.runs_dir], [])
    is_up.set()
    run_folders._unanswered[site.runs_dir].join()
    found(site, store, elsewhere, warnings)
    assert len(warnings) == 1, "it responds again"


def test_the_daemons_of_a_folder_have_one_lease(site: Site, store: HistoryStore) -> None:
    """Before, one that was given a link acted beside the other."""
    through_link = dataclasses.replace(site, runs_dir=linked(site.runs_dir))
    assert lease_name(through_link.runs_dir) == lease_name(site.runs_dir)
    store.acquire_lease(lease_name(site.runs_dir), "daemon@elsewhere:1:1.00", 60)
    with pytest.raises(LeaseLost):
        take_lease(through_link, store)


def test_a_daemon_of_an_earlier_version_is_respected(site: Site, store: HistoryStore) -> None:
    through_link = dataclasses.replace(site, runs_dir=linked(site.runs_dir))
    name, owner = earlier_lease_name(through_link.runs_dir), "daemon@elsewhere:1:1.00"
    token = store.acquire_lease(name, owner, 60)
    with pytest.raises(LeaseLost, match="earlier version"):
        take_lease(through_link, store)
    store.release_lease(name, owner, token)
    take_lease(through_link, store).release()
