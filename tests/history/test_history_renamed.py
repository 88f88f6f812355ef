"""Saved SQL with a name from before a migration gets an error with the new one, on both databases."""

from pathlib import Path

import pytest
from history_tools import at, run_sql, whole_run

from rlhf_core.errors import BadInput
from rlhf_core.files.appended import append_lines
from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.reports import ReconcileNote
from rlhf_core.watchdog.ingest import sync

OLD = {
    "SELECT c.stage FROM checkpoints c": "checkpoints.stage is called loop since schema 0019: write loop instead",
    "SELECT stage_finished FROM checkpoints": "write loop_finished instead",
    "SELECT owner FROM leases": "write holder instead",
    "SELECT run_id FROM checks ORDER BY position": "checks.position is called check_index",
    "SELECT position FROM evaluation_samples": "evaluation_samples.position is called row_index",
    "SELECT p.moved_at - p.asked_at FROM promotions p": r"write (state_changed_at|requested_at) instead",
    "SELECT * FROM kept_goodput": "kept_goodput is called goodput_cache since schema 0019: write goodput_cache instead",
    "SELECT time FROM events WHERE kind = 'keeper_adopt'": "write 'reconcile_adopt' instead",
    "SELECT time FROM events WHERE kind = 'keeper_tell'": "write 'reconcile_publish' instead",
    "SELECT time FROM events WHERE kind LIKE 'keeper%'": "write 'reconcile%' instead",
}


def test_an_old_name_is_answered_with_the_new_one(store: HistoryStore) -> None:
    for statement, advice in OLD.items():
        with pytest.raises(BadInput, match=advice) as error:
            run_sql(store, statement)
        assert error.value.exit_code == 2


UNKNOWN = {
    "SELECT stage FROM runs": "Columns of runs: run_id, name, state, message, .*, ingest_stamp.$",
    "SELECT d.position FROM decisions d": "Columns of decisions: run_id, decision_id",
    "SELECT wall FROM Run_Goodput": "Columns of run_goodput: run_id, name, state, wall_s",
    "SELECT r.x FROM runs r, stages s": "Columns of runs: .*. Columns of stages: ",
    'SELECT r."time/step_s" FROM runs r': "Columns of runs: ",
    "SELECT * FROM kept": "Tables and views: all_goodput, attempt_nodes",
    "SELECT asked_at": "Tables and views: all_goodput, attempt_nodes",
}


def test_another_unknown_name_gets_the_columns_of_the_tables_that_are_read_or_all_tables(store: HistoryStore) -> None:
    for statement, names in UNKNOWN.items():
        with pytest.raises(BadInput, match=rf"names a missing table or column: .*\. {names}"):
            run_sql(store, statement)


def test_an_unknown_function_is_no_missing_name(store: HistoryStore) -> None:
    """PostgreSQL says of it, too, that it does not exist."""
    with pytest.raises(BadInput, match=r"^the database rejected the query: .*no_such_function"):
        run_sql(store, "SELECT no_such_function(run_id) FROM runs")


def test_the_word_alone_is_no_old_name(store: HistoryStore) -> None:
    assert run_sql(store, "SELECT message FROM runs WHERE message = 'keeper_adopt'").rows == []
    assert run_sql(store, "SELECT position FROM events").rows == []


def test_notes_of_an_earlier_version_get_the_present_word(store: HistoryStore, runs: Path) -> None:
    run_dir = whole_run(runs).dir
    for kind in ("tell", "publish", "adopt"):
        append_lines(run_dir.housekeeping, ReconcileNote(time=at(60), kind=kind, message="done"))
    sync(run_dir, store)
    found = run_sql(store, "SELECT kind, count(*) FROM events WHERE kind LIKE 'reconcile%' GROUP BY kind ORDER BY kind")
    assert found.rows == [["reconcile_adopt", 1], ["reconcile_publish", 2]]
