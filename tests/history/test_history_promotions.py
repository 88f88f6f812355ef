"""Promotions in the history, from the journal."""

from pathlib import Path

import pytest
from control_fakes import make_run

from rlhf_core.errors import IllegalMove
from rlhf_core.history.queries import show_run
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState
from rlhf_core.schemas.journal import PromotionMoved
from rlhf_core.watchdog.ingest import sync


def moved(run_dir: RunDir, *states: str) -> None:
    journal = Journal(run_dir, token=1)
    for state in states:
        journal.append(PromotionMoved(state=PromotionState(state), checkpoint_step=7, by="ada", reason="good"))
    journal.close()


def test_the_state_of_a_promotion_is_a_row(store: HistoryStore, runs: Path) -> None:
    waiting, done = make_run(runs), make_run(runs)
    moved(waiting, "waiting")
    moved(done, "waiting", "approved", "promoted")
    for run_dir in (waiting, done):
        sync(run_dir, store)
    assert show_run(store, waiting.run_id).promotion["state"] == "waiting"
    found = show_run(store, done.run_id).promotion
    assert (found["state"], found["checkpoint_step"], found["decided_by"]) == ("promoted", 7, "ada")
    assert found["requested_at"] < found["state_changed_at"]
    none = make_run(runs)
    sync(none, store)
    assert show_run(store, none.run_id).promotion is None


def test_a_promotion_that_is_requested_again_has_the_time_of_that_request(store: HistoryStore, runs: Path) -> None:
    run_dir = make_run(runs)
    moved(run_dir, "waiting", "expired", "waiting")
    sync(run_dir, store)
    found, record = show_run(store, run_dir.run_id).promotion, read_record(run_dir).promotion
    assert record is not None
    assert found["requested_at"] == found["state_changed_at"] == record.requested_at.isoformat()
    moved(run_dir, "approved")
    sync(run_dir, store)
    assert show_run(store, run_dir.run_id).promotion["requested_at"] == record.requested_at.isoformat()


def test_an_illegal_change_of_state_is_refused(store: HistoryStore, runs: Path) -> None:
    run_dir = make_run(runs)
    moved(run_dir, "waiting", "promoted")
    with pytest.raises(IllegalMove, match="is waiting and cannot become promoted; that is possible only from approved"):
        sync(run_dir, store)
