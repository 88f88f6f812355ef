"""Controllers of one run whose leases are in two databases, one of which was restored beside the other."""

from pathlib import Path

import pytest
from harness import ControllerHarness, Notes
from history_tools import new_sqlite

from rlhf_core.control.controller import opened
from rlhf_core.errors import LeaseLost
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import read_record
from rlhf_core.schemas.attempts import RunState


def test_the_older_controller_stops_at_its_next_line(harness: ControllerHarness, tmp_path: Path) -> None:
    """Before, both drove the run: each held the lease of its own database."""
    run_dir = harness.run()
    older = harness.controller(run_dir)
    older.journal.move_run(RunState.PREFLIGHT, "started")
    with HistoryStore(new_sqlite(tmp_path)) as restored, opened(run_dir, harness.site, restored, Notes()) as newer:
        newer.journal.move_run(RunState.QUEUED, "checked")
        before = run_dir.control.read_bytes()
        with pytest.raises(LeaseLost, match="another controller owns the run"):
            older.journal.move_run(RunState.QUEUED, "checked")
        assert run_dir.control.read_bytes() == before
        assert older.lease.lost
        harness._stack.close()
        assert run_dir.control_reserve.exists(), "it belongs to the newer one"
        newer.journal.move_run(RunState.TRAINING, "the newer one continues")
    assert read_record(run_dir).state is RunState.TRAINING
