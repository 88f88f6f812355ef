"""``rlhf runs``, ``show`` and ``watch`` of a run without controller and job, whose state alone looks healthy."""

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from control_fakes import make_run
from history_tools import RunFiles, living_controller, synced
from process_tools import Rlhf

from flows.deployments.submission import Submitted
from rlhf_core.cli import watching
from rlhf_core.cli.commands import deploy
from rlhf_core.config.site import load_site
from rlhf_core.control.undriven import undriven_since
from rlhf_core.errors import RunFailed
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal
from rlhf_core.launch.lease import TTL_S, Owner
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.journal import ControllerStarted
from rlhf_core.watchdog.watcher import record

Printed = pytest.CaptureFixture[str]


def driven_by(owner: Owner, runs: Path) -> RunDir:
    """A run in training whose lease a controller has just renewed."""
    run_dir = make_run(runs)
    with HistoryStore(load_site().database_url) as store:
        journal = Journal(run_dir, store.acquire_lease(run_dir.run_id, str(owner), TTL_S))
        journal.append(ControllerStarted(controller=str(owner), flow_run_id="", flow_run_url=""))
        for state in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING):
            journal.move_run(state, "because")
        journal.close()
        record(run_dir, store)
    return run_dir


def fails_soon(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run fail between the first two looks of a command at it."""

    def fail(_seconds: float) -> None:
        journal = Journal(run_dir, 9)
        journal.move_run(RunState.FAILED, "enough")
        journal.close()

    # Not in the module time itself: a thread that an earlier test has left may sleep, too.
    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=fail))


def watched(run_dir: RunDir, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """Output of ``rlhf watch`` up to the failure of the run."""
    fails_soon(run_dir, monkeypatch)
    return rlhf("watch", run_dir.run_id, *options, code=1).stdout


def test_a_run_without_a_controller_is_shown_as_such(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    with living_controller() as owner:
        run_dir = driven_by(owner, load_site().runs_dir)
        for command in ("runs", "show"):
            assert "no controller" not in rlhf(command).stdout.lower(), "control: one that is driven"
        assert rlhf("show", "--json").json()["undriven_since"] is None
    advice = f"`rlhf resume {run_dir.run_id}` continues it"
    for command in ("runs", "show"):
        output = rlhf(command).stdout
        assert "training, no controller" in output
        assert "No controller has driven this run since 20" in output
        assert advice in output
    assert rlhf("show", "--json").json()["undriven_since"] is not None
    assert [one["undriven_since"] is not None for one in rlhf("runs", "--json").json()] == [True]
    assert watched(run_dir, rlhf, monkeypatch).count(advice) == 1


def test_a_run_whose_nodes_do_not_start_is_shown_as_such(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with living_controller() as owner:
        run = RunFiles(load_site().runs_dir).created()
        for state in (RunState.PREFLIGHT, RunState.QUEUED):
            run.moved(state, 1)
        run.without_nodes(1, 60)
        with HistoryStore(load_site().database_url) as store:
            store.acquire_lease(synced(run, store).run_id, str(owner), TTL_S)
        for command in ("runs", "show"):
            output = rlhf(command).stdout
            assert "queued, no nodes" in output
            assert "no node for this run since 2026-03-01 12:01 UTC" in output
            assert f"`rlhf cancel {run.run_id}` ends it" in output
    for command in ("runs", "show"):
        output = rlhf(command).stdout
        assert "queued, no controller" in output
        assert "goes on asking" not in output, "without a controller, nothing asks"


def test_watch_as_json_has_the_time_without_a_controller(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    with living_controller() as owner:
        run_dir = driven_by(owner, load_site().runs_dir)
    running, failed = map(json.loads, watched(run_dir, rlhf, monkeypatch, "--json").splitlines())
    assert running["undriven_since"] is not None
    assert failed["undriven_since"] is None


def test_a_run_between_two_controllers_is_given_time() -> None:
    """As in the site daemon: the next controller of a released lease may be about to start."""
    with living_controller() as owner:
        run_dir = driven_by(owner, load_site().runs_dir)
        url = load_site().database_url
        with HistoryStore(url) as store:
            store.release_lease(run_dir.run_id, str(owner), 1)
            assert undriven_since(store, [run_dir.run_id]) == {}
        with HistoryStore(url) as store:
            store.time = lambda connection: utc_now() + timedelta(seconds=60)  # type: ignore[method-assign]
            assert [*undriven_since(store, [run_dir.run_id])] == [run_dir.run_id]


def test_a_submitted_run_that_loses_its_controller_is_shown_as_such(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, ``rlhf submit --watch`` showed its last state for as long as nothing drove it."""
    with living_controller() as owner:
        run_dir = driven_by(owner, load_site().runs_dir)
    fails_soon(run_dir, monkeypatch)
    with pytest.raises(RunFailed):
        deploy._watch(load_site(), Submitted(run_dir.run_id, "", ""), None, as_json=False)
    assert f"`rlhf resume {run_dir.run_id}` continues it" in capsys.readouterr().out


def test_a_submitted_run_is_watched_without_its_history(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    with living_controller() as owner:
        run_dir = driven_by(owner, load_site().runs_dir)
    monkeypatch.setenv("RLHF_DATABASE_URL", f"sqlite:///{run_dir.root}")
    fails_soon(run_dir, monkeypatch)
    with pytest.raises(RunFailed):
        deploy._watch(load_site(), Submitted(run_dir.run_id, "", ""), None, as_json=False)
    told = capsys.readouterr()
    assert "is a folder, expected a file" in told.err
    assert "training" in told.out
