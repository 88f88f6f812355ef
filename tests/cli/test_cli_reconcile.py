"""``rlhf reconcile`` with a separate history."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from history_tools import orphaned_run
from process_tools import Rlhf

from rlhf_core.cli import doctor
from rlhf_core.config.site import load_site
from rlhf_core.control.run_folders import earlier_lease_name, lease_name
from rlhf_core.errors import SchedulerError
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.local import LocalScheduler


@pytest.fixture
def orphan() -> RunDir:
    """Run without a controller for which a cancellation was requested."""
    site = load_site()
    site.home.mkdir(parents=True, exist_ok=True)
    run_dir = orphaned_run(site)
    run_dir.cancel_request.write_text('{"kind": "cancel", "reason": "enough", "time": "2026-01-01T00:00:00Z"}')
    return run_dir


def test_a_dry_run_reports_actions_without_taking_them(orphan: RunDir, rlhf: Rlhf) -> None:
    before = orphan.control.read_bytes()
    (found,) = rlhf("reconcile", "--dry-run", "--json").json()
    assert (found["action"], found["run_id"], found["done"]) == ("cancel_run", orphan.run_id, None)
    assert found["reason"] == "enough"
    assert orphan.control.read_bytes() == before


def test_it_is_done_once(orphan: RunDir, rlhf: Rlhf) -> None:
    assert "cancelled" in rlhf("reconcile").stdout
    assert "agree" in rlhf("reconcile").stdout


def test_the_daemon_at_work_is_named(orphan: RunDir, rlhf: Rlhf) -> None:
    """Before, the message had the internal name of its lease, as that of a run."""
    site = load_site()
    with HistoryStore(site.database_url) as store:
        store.acquire_lease(lease_name(site.runs_dir), "ann@elsewhere:71:1767225600.00", 60)
    told = rlhf("reconcile", code=1).stderr
    assert "daemon of this site (ann on elsewhere, process 71, since 2026-01-01 00:00:00 UTC) reconciles every" in told
    assert "keeper" not in told


def test_a_daemon_of_an_earlier_version_is_named(orphan: RunDir, rlhf: Rlhf) -> None:
    """Its lease has the path as it was given, here that of a link."""
    site = load_site()
    site.runs_dir.rename(site.home / "elsewhere")
    site.runs_dir.symlink_to(site.home / "elsewhere")
    with HistoryStore(site.database_url) as store:
        store.acquire_lease(earlier_lease_name(site.runs_dir), "ann@elsewhere:71:1767225600.00", 60)
        assert "ann on elsewhere, process 71" in doctor._daemon(site, store, {"daemon": "stopped"}).found
    assert "daemon of this site (ann on elsewhere, process 71" in rlhf("reconcile", code=1).stderr


def test_unknown_is_not_agreement(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    load_site().home.mkdir(parents=True)
    down = SchedulerError("slurmctld does not respond")
    monkeypatch.setattr(LocalScheduler, "living", Mock(side_effect=down))
    for options in ([], ["--dry-run"]):
        shown = rlhf("reconcile", *options)
        assert "slurmctld does not respond" in shown.stderr
        assert shown.stdout == "Nothing to do, as far as could be seen.\n"


def test_a_site_without_runs_is_consistent(tmp_path: Path, rlhf: Rlhf) -> None:
    load_site().home.mkdir(parents=True)
    assert rlhf("reconcile", "--json").json() == []
