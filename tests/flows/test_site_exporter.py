"""Export of all runs of a site to experiment trackers by processes of the site daemon."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from control_fakes import FakeScheduler
from history_tools import RunFiles, new_sqlite, synced
from tracker_readers import scalars

from rlhf_core.config.site import Site, load_site
from rlhf_core.control.exporters import processes, program
from rlhf_core.control.exporters.processes import HUNG, Exporters
from rlhf_core.control.exporters.program import SiteExporter
from rlhf_core.control.reconcile import loop
from rlhf_core.errors import BadConfig
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.scheduler.passed_environment import without_private
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.site import ExportSite

WAIT_S = 120.0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site that exports to TensorBoard."""
    home, runs = tmp_path / "home", tmp_path / "runs"
    home.mkdir()
    runs.mkdir()
    (home / "rlhf.toml").write_text(f'[export]\ntensorboard = "{tmp_path}/curves"\n')
    for name, value in (("HOME", home), ("RUNS", runs), ("DATABASE_URL", new_sqlite(tmp_path))):
        monkeypatch.setenv(f"RLHF_{name}", str(value))
    monkeypatch.setattr("rlhf_core.control.reconcile.actions.get_scheduler", lambda name: FakeScheduler())
    return load_site()


@pytest.fixture
def store(site: Site) -> Iterator[HistoryStore]:
    with HistoryStore(site.database_url) as store:
        yield store


def _active(site: Site, name: str = "sort", trial_of: str = "") -> RunFiles:
    run = RunFiles(site.runs_dir, name, trial_of=trial_of).created()
    run.moved(RunState.PREFLIGHT, 1)
    run.metrics(1, 0, 1, 10)
    return run


def _curves(site: Site) -> dict[str, list[int]]:
    """Steps of the loss of each run that TensorBoard has."""
    folders = Path(site.export.tensorboard).glob("*")
    return {one.name: [step for step, _, _ in scalars(one).get("train/loss", ())] for one in folders}


def test_active_runs_of_the_site_are_exported(site: Site, store: HistoryStore, tmp_path: Path) -> None:
    run, other = _active(site), _active(site, "other")
    trial = _active(site, "trial", trial_of=run.run_id)
    elsewhere = _active(dataclasses.replace(site, runs_dir=tmp_path / "elsewhere"), "elsewhere")
    for one in (run, other, trial, elsewhere):
        synced(one, store)
    exports = SiteExporter(site, store, "tensorboard")
    exports.update()
    assert _curves(site) == {run.run_id: [1], other.run_id: [1]}
    run.metrics(1, 0, 2, 20)
    synced(run, store)
    exports.update()
    assert _curves(site) == {run.run_id: [1, 2], other.run_id: [1]}


def test_an_ended_run_is_exported_once(site: Site, store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _active(site)
    run.moved(RunState.FAILED, 20)
    synced(run, store)
    monkeypatch.setattr(program, "CATCH_UP", program.CATCH_UP * 1000)  # the run is of an earlier year
    SiteExporter(site, store, "tensorboard").update()
    (file,) = (Path(site.export.tensorboard) / run.run_id).iterdir()
    written = file.stat().st_mtime_ns
    SiteExporter(site, store, "tensorboard").update()  # another process
    assert [file] == list((Path(site.export.tensorboard) / run.run_id).iterdir())
    assert file.stat().st_mtime_ns == written
    run.moved(RunState.PREFLIGHT, 60)  # it is resumed
    run.metrics(2, 0, 2, 70)
    synced(run, store)
    SiteExporter(site, store, "tensorboard").update()
    assert _curves(site) == {run.run_id: [1, 2]}


def test_credentials_are_read_from_the_private_file(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.job_secrets is not None
    named = dataclasses.replace(site, export=ExportSite(pass_environment=("TRACKER_KEY",)))
    monkeypatch.delenv("TRACKER_KEY", raising=False)
    with pytest.raises(BadConfig, match=r"TRACKER_KEY: named in .* but not set"):
        program._take_credentials(named)
    site.job_secrets.write_text("TRACKER_KEY=secret\nOTHER=other\n")
    site.job_secrets.chmod(0o600)
    jobs = without_private(os.environ)
    program._take_credentials(named)
    monkeypatch.setenv("TRACKER_KEY", os.environ["TRACKER_KEY"])  # undone after the test
    assert os.environ["TRACKER_KEY"] == "secret"
    assert "OTHER" not in os.environ
    assert "TRACKER_KEY" not in jobs


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children() -> list[psutil.Process]:
    found = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # or it is a zombie
            found += [one] if processes.PROGRAM in one.cmdline() else []
    return found


@pytest.fixture
def running(site: Site) -> Iterator[Exporters]:
    running = Exporters(site)
    running.keep()
    yield running
    running.stop()
    assert _children() == []


def test_a_process_exports(site: Site, store: HistoryStore, running: Exporters) -> None:
    run = synced(_active(site), store)
    _until(lambda: _curves(site) == {run.run_id: [1]})


def test_a_process_that_ends_is_started_again(site: Site, monkeypatch: pytest.MonkeyPatch, running: Exporters) -> None:
    (first,) = _children()
    first.kill()
    _until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
    running.keep()
    assert [one for one in _children() if one.pid != first.pid] == [], "not before its time"
    monkeypatch.setattr(processes, "RESTART_INTERVAL_S", 0.0)
    running.keep()
    assert [one.pid for one in _children()] != [first.pid]


def test_a_process_that_needs_a_correction_is_not_started_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, running: Exporters
) -> None:
    running.stop()
    (site.home / "rlhf.toml").write_text("")  # while the daemon runs on with the settings it has read
    monkeypatch.setattr(processes, "RESTART_INTERVAL_S", 0.0)
    running.keep()
    process = running._processes["tensorboard"]
    assert process.wait(WAIT_S) == processes.TO_BE_CORRECTED
    running.keep()
    assert running._processes["tensorboard"] is process


def test_a_site_without_trackers_has_no_process(site: Site) -> None:
    running = Exporters(dataclasses.replace(site, export=ExportSite()))
    running.keep()
    assert _children() == []


def test_the_process_ends_with_the_daemon(site: Site) -> None:
    daemon = (
        "import sys, time; from rlhf_core.config.site import load_site\n"
        "from rlhf_core.control.exporters.processes import Exporters\n"
        "running = Exporters(load_site()); running.keep()\n"
        "print(running._processes['tensorboard'].pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            child = psutil.Process(int(started.stdout.readline()))
            _until(lambda: child.cmdline()[-1:] == [str(started.pid)])  # empty until the program is loaded
        finally:
            started.kill()
    _until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


# ---------------------------------------------------------------------------------------------------------------------
# A tracker that hangs

HANGING = """
import sys
from rlhf_core.config.site import load_site
from rlhf_core.control.exporters.program import SiteExporter
from rlhf_core.history.store import HistoryStore
site = load_site()
with HistoryStore(site.database_url) as store:
    SiteExporter(site, store, "mlflow", limit_s=float(sys.argv[1])).update()
"""


@pytest.fixture
def silent_mlflow(site: Site) -> Iterator[Site]:
    """The site with an MLflow server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        (site.home / "rlhf.toml").write_text(f'[prefect]\ningest_s = 0.1\n[export]\nmlflow = "{address}"\n')
        yield load_site()


@contextlib.contextmanager
def _daemon(site: Site) -> Iterator[None]:
    """The site daemon, without repairs."""
    stop = threading.Event()
    daemon = threading.Thread(target=loop.run, args=(site, stop, None, lambda *_: []), daemon=True)
    daemon.start()
    try:
        yield
    finally:
        stop.set()
        daemon.join(WAIT_S)


def test_a_process_whose_tracker_never_answers_exits(
    silent_mlflow: Site, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")  # as a library that waits forever
    synced(_active(silent_mlflow), store)
    ended = subprocess.run([sys.executable, "-c", HANGING, "5"], timeout=WAIT_S, check=False)
    assert ended.returncode == HUNG


def test_the_daemon_does_not_wait_for_a_tracker(silent_mlflow: Site, store: HistoryStore) -> None:
    run = _active(silent_mlflow)
    synced(run, store)
    with _daemon(silent_mlflow):
        _until(lambda: any(one.net_connections(kind="tcp") for one in _children()))  # it waits for the tracker
        run.metrics(1, 0, 2, 20)
        _until(lambda: queries.show_run(store, run.run_id).metrics["train/loss"]["step"] == 2)
        assert _children() != []
    assert _children() == []


def test_a_tracker_in_the_daemon_itself_would_delay_it(
    silent_mlflow: Site, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the same work in the daemon's own thread."""
    asked, let_go = threading.Event(), threading.Event()

    def keep(self: Exporters) -> None:
        asked.set()
        let_go.wait(WAIT_S)

    monkeypatch.setattr(Exporters, "keep", keep)
    run = synced(_active(silent_mlflow), store)
    with _daemon(silent_mlflow):
        assert asked.wait(WAIT_S)
        run.metrics(1, 0, 2, 20)
        time.sleep(20 * silent_mlflow.prefect.ingest_s)
        assert queries.show_run(store, run.run_id).metrics["train/loss"]["step"] == 1
        let_go.set()


# ---------------------------------------------------------------------------------------------------------------------
# Settings


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('mlflow = "http://user:secret@mlflow:5000"', "name its variable in export.pass_environment instead"),
        ('tensorboard = "curves"', "expected an address with ://, or the absolute path of a folder"),
        ('comet = "x"', 'unknown key "export.comet"'),
    ],
)
def test_settings_that_are_refused(site: Site, line: str, problem: str) -> None:
    (site.home / "rlhf.toml").write_text(f"[export]\n{line}\n")
    with pytest.raises(BadConfig) as refused:
        load_site()
    assert problem in str(refused.value)
    assert "secret" not in str(refused.value)
