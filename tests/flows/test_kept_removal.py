"""Removal of kept configs and code on a real Prefect server: only those that can no longer be needed."""

import dataclasses
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from control_fakes import make_run, make_spec
from harness import ControllerHarness
from history_tools import remove_run
from sites import Site

from flows.deployments.registration import register
from flows.deployments.submission import submit
from flows.flow_runs.facts import PrefectFlowRuns
from rlhf_core.control import snapshots
from rlhf_core.control.reconcile import loop
from rlhf_core.control.reconcile.cleanup import SnapshotCleanup
from rlhf_core.files.whole import read_model, remove_tree, write_model
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.site import RetentionSite
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.watchdog.watcher import record

DAYS = 30


@pytest.fixture
def client(server: Site, pool: None) -> Iterator[Any]:
    from flows.server.clients import api_client

    with api_client() as found:
        for one in found.read_deployments():
            found.delete_deployment(one.id)
        for flow_run in found.read_flow_runs():
            found.delete_flow_run(flow_run.id)
        yield found


def keep(harness: ControllerHarness, name: str, *overrides: str, days: float = DAYS + 1) -> Path:
    """Keep a config as of the given number of days ago; returns its file."""
    file = snapshots.keep("quickstart", overrides, name, harness.site.home, harness.site.home).config
    age(file, days)
    return file


def age(file: Path, days: float) -> None:
    then = (datetime.now(UTC) - timedelta(days=days)).timestamp()
    os.utime(file.parent, (then, then))


def tidier(harness: ControllerHarness, days: int = DAYS) -> SnapshotCleanup:
    site = dataclasses.replace(harness.site, retention=RetentionSite(deployments_days=days))
    return SnapshotCleanup(site, harness.store, PrefectFlowRuns(site))


def run_of(harness: ControllerHarness, file: Path, *states: RunState) -> RunDir:
    """A run made from a kept config, in the last of the given states."""
    run_dir = make_run(harness.site.runs_dir, make_spec())
    stored = read_model(run_dir.spec, StoredSpec)
    assert stored is not None
    write_model(run_dir.spec, stored.model_copy(update={"config_source": str(file)}))
    journal = Journal(run_dir, 1)
    for state in states:
        journal.move_run(state, "because")
    journal.close()
    return run_dir


COMPLETED = (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING, RunState.EVALUATING, RunState.COMPLETED)


# ---------------------------------------------------------------------------------------------------------------------
# Removed


def test_old_unreferenced_configs_are_removed(
    client: Any, harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, other, young = keep(harness, "a"), keep(harness, "b", "seed=3"), keep(harness, "a", "seed=2", days=DAYS - 1)
    run_of(harness, other, *COMPLETED)
    logged: list[str] = []
    monkeypatch.setattr(logging.getLogger("rlhf.daemon"), "info", lambda text, *values: logged.append(text % values))
    assert tidier(harness).run() == [old.parent, other.parent]
    assert not old.parent.exists(), "the code as well"
    assert young.is_file()
    assert sum("nothing refers to it" in text for text in logged) == 2
    assert tidier(harness).run() == []


def test_zero_days_keep_everything(client: Any, harness: ControllerHarness) -> None:
    file = keep(harness, "a", days=10_000)
    assert tidier(harness, days=0).run() == []
    assert file.is_file()


# ---------------------------------------------------------------------------------------------------------------------
# Kept: each of these would be removed but for one condition


def test_a_config_of_a_deployment_is_kept(client: Any, harness: ControllerHarness) -> None:
    done = register("quickstart", harness.site, name="mine", overrides=["seed=5"], folder=harness.site.home)
    deployment = client.read_deployment(UUID(done.id))
    file = Path(deployment.parameters["config"])
    age(file, DAYS + 1)
    assert tidier(harness).run() == []
    client.delete_deployment(deployment.id)
    assert tidier(harness).run() == [file.parent]


@pytest.mark.parametrize(("state", "stays"), [("Scheduled", True), ("Failed", True), ("Completed", False)])
def test_a_config_of_a_flow_run_that_may_be_retried_is_kept(
    client: Any, harness: ControllerHarness, state: str, stays: bool
) -> None:
    from prefect import states

    register("quickstart", harness.site, name="mine", folder=harness.site.home)
    file = keep(harness, "mine", "seed=6")
    submitted = submit("mine", harness.site, config=str(file))
    client.set_flow_run_state(UUID(submitted.flow_run_id), getattr(states, state)(), force=True)
    age(file, DAYS + 1)
    assert tidier(harness).run() == ([] if stays else [file.parent])


def test_deployments_on_later_pages_are_found(
    client: Any, harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.queries.PAGE", 4)
    files = []
    for number in range(11):
        register("quickstart", harness.site, name=f"d{number}", overrides=[f"seed={number}"], folder=harness.site.home)
        files += harness.site.home.glob(f"deployments/d{number}/*/config.toml")
    for file in files:
        age(file, DAYS + 1)
    assert len(files) == 11
    assert tidier(harness).run() == []


@pytest.mark.parametrize(
    "states", [(), (RunState.PREFLIGHT,), (RunState.PREFLIGHT, RunState.FAILED), (RunState.CANCELLED,)]
)
def test_a_config_of_a_resumable_run_is_kept(
    client: Any, harness: ControllerHarness, states: tuple[RunState, ...]
) -> None:
    """Also a run that the history does not know yet, and one outside of this site's folder of runs."""
    file = keep(harness, "a")
    run_dir = run_of(harness, file, *states)
    assert tidier(harness).run() == [], "from its directory"
    record(run_dir, harness.store)
    shutil.move(run_dir.root, harness.site.home / "elsewhere")
    assert tidier(harness).run() == [], "from the history"
    remove_run(harness.store, run_dir.run_id)
    assert tidier(harness).run() == [file.parent]


def test_without_an_answer_of_prefect_everything_is_kept(harness: ControllerHarness) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    file = keep(harness, "a")
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert tidier(harness).run() == []
    assert file.is_file()


def test_a_new_request_resets_the_age(client: Any, harness: ControllerHarness) -> None:
    file = keep(harness, "a")
    again = snapshots.keep("quickstart", (), "a", harness.site.home, harness.site.home)
    assert again.config == file
    assert tidier(harness).run() == []


def test_a_config_requested_during_its_removal_is_kept(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = keep(harness, "a")
    (old,) = snapshots.copies(harness.site.home)
    os.utime(file.parent)  # a user submits it between the check and the removal
    assert not snapshots.remove(old)
    assert file.is_file()


def test_an_interrupted_removal_is_finished(
    client: Any, harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = keep(harness, "a")

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshots, "remove_tree", die)
    with pytest.raises(KeyboardInterrupt):
        tidier(harness).run()
    monkeypatch.setattr(snapshots, "remove_tree", remove_tree)
    assert not file.exists()
    assert tidier(harness).run() == [file.parent.with_suffix(".old")]
    assert list((harness.site.home / "deployments" / "a").iterdir()) == []


def test_the_daemon_removes_kept_configs(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    done, stop = threading.Event(), threading.Event()

    def tidy(self: SnapshotCleanup, may: Callable[[], bool]) -> list[Path]:
        done.set()
        return []

    monkeypatch.setattr("rlhf_core.control.reconcile.actions.get_scheduler", lambda name: harness.scheduler)
    monkeypatch.setattr(SnapshotCleanup, "run", tidy)
    thread = threading.Thread(target=loop.run, args=(harness.site, stop, None), daemon=True)
    thread.start()
    assert done.wait(60)
    stop.set()
    thread.join(60)
