"""``rlhf reconcile`` with a separate history."""

import json
from pathlib import Path

import pytest
from history_tools import orphaned_run

from rlhf_core.cli import doctor, main
from rlhf_core.config.site import load_site
from rlhf_core.control.run_folders import earlier_lease_name, lease_name
from rlhf_core.errors import SchedulerError
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import LivingJob
from rlhf_core.scheduler.local import LocalScheduler


@pytest.fixture
def orphan() -> RunDir:
    """Run without a controller for which a cancellation was requested."""
    site = load_site()
    site.home.mkdir(parents=True, exist_ok=True)
    run_dir = orphaned_run(site)
    run_dir.cancel_request.write_text('{"kind": "cancel", "reason": "enough", "time": "2026-01-01T00:00:00Z"}')
    return run_dir


def test_a_dry_run_reports_actions_without_taking_them(orphan: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    before = orphan.control.read_bytes()
    assert main.execute(["reconcile", "--dry-run", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["action"], found["run_id"], found["done"]) == ("cancel_run", orphan.run_id, None)
    assert found["reason"] == "enough"
    assert orphan.control.read_bytes() == before


def test_it_is_done_once(orphan: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.execute(["reconcile"]) == 0
    assert "cancelled" in capsys.readouterr().out
    assert main.execute(["reconcile"]) == 0
    assert "agree" in capsys.readouterr().out


def test_the_daemon_at_work_is_named(orphan: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, the message had the internal name of its lease, as that of a run."""
    site = load_site()
    with HistoryStore(site.database_url) as store:
        store.acquire_lease(lease_name(site.runs_dir), "ann@elsewhere:71:1767225600.00", 60)
    assert main.execute(["reconcile"]) == 1
    told = capsys.readouterr().err
    assert "daemon of this site (ann on elsewhere, process 71, since 2026-01-01 00:00:00 UTC) reconciles every" in told
    assert "keeper" not in told


def test_a_daemon_of_an_earlier_version_is_named(orphan: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lease has the path as it was given, here that of a link."""
    site = load_site()
    site.runs_dir.rename(site.home / "elsewhere")
    site.runs_dir.symlink_to(site.home / "elsewhere")
    with HistoryStore(site.database_url) as store:
        store.acquire_lease(earlier_lease_name(site.runs_dir), "ann@elsewhere:71:1767225600.00", 60)
        assert "ann on elsewhere, process 71" in doctor._daemon(site, store, {"daemon": "stopped"}).found
    assert main.execute(["reconcile"]) == 1
    assert "daemon of this site (ann on elsewhere, process 71" in capsys.readouterr().err


def test_unknown_is_not_agreement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def down(_self: object) -> list[LivingJob]:
        raise SchedulerError("slurmctld does not respond")

    load_site().home.mkdir(parents=True)
    monkeypatch.setattr(LocalScheduler, "living", down)
    for options in ([], ["--dry-run"]):
        assert main.execute(["reconcile", *options]) == 0
        shown = capsys.readouterr()
        assert "slurmctld does not respond" in shown.err
        assert shown.out == "Nothing to do, as far as could be seen.\n"


def test_a_site_without_runs_is_consistent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_site().home.mkdir(parents=True)
    assert main.execute(["reconcile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
