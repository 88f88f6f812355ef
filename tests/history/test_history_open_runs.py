"""Runs that the site daemon follows: which they are, and that a long history does not slow it down."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from history_tools import RunFiles, at, synced, table_row
from sqlalchemy import event, insert

from rlhf_core.history.queries import open_runs
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import metadata
from rlhf_core.schemas.attempts import PromotionState, RunState
from rlhf_core.schemas.journal import ControllerStarted


def ended_run(store: HistoryStore, runs: Path, name: str, seconds: float) -> RunFiles:
    """A run that has failed after some seconds."""
    run = RunFiles(runs, name).created()
    for state in (RunState.PREFLIGHT, RunState.FAILED):
        run.moved(state, seconds)
    return synced(run, store)


def with_promotion(store: HistoryStore, run: RunFiles, state: PromotionState) -> None:
    row = table_row("promotions", run_id=run.run_id, state=state.value, checkpoint_step=3)
    with store.writing() as connection:
        connection.execute(insert(metadata.tables["promotions"]), row)


def test_runs_are_found_that_are_active_wait_or_have_just_ended(store: HistoryStore, runs: Path) -> None:
    ended_run(store, runs, "long-over", 10)
    just_over = ended_run(store, runs, "just-over", 100)
    resumed = ended_run(store, runs, "resumed", 10)
    resumed.moved(RunState.PREFLIGHT, 20)
    synced(resumed, store)
    new = synced(RunFiles(runs, "new").created(), store)
    waiting, promoted = (ended_run(store, runs, name, 10) for name in ("waiting", "promoted"))
    with_promotion(store, waiting, PromotionState.WAITING)
    with_promotion(store, promoted, PromotionState.PROMOTED)
    now = at(150)
    always = {resumed.run_id, new.run_id, waiting.run_id}
    assert open_runs.find(store, now).keys() == always
    assert open_runs.find(store, now, since=now - timedelta(seconds=60)).keys() == {*always, just_over.run_id}
    assert open_runs.find(store, now, since=now - timedelta(seconds=50)).keys() == {*always, just_over.run_id}
    assert open_runs.find(store, now, since=now - timedelta(seconds=49)).keys() == always
    found = open_runs.find(store, now, run_ids=[promoted.run_id])
    assert found.keys() == {*always, promoted.run_id}
    assert (found[promoted.run_id].promotion, found[resumed.run_id].ended_at) == ("promoted", None)


def test_neither_all_runs_nor_all_controllers_are_read(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs, "new").created()
    for name in ("c1", "c2"):
        run.journal(ControllerStarted(controller=name, flow_run_id=name), 1)
    synced(run, store)
    asked: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        asked.append((statement, parameters))

    event.listen(store._reading, "before_cursor_execute", note)
    found = open_runs.find(store, at(9000), since=at(8000))[run.run_id]
    event.remove(store._reading, "before_cursor_execute", note)
    assert [one.flow_run_id for one in found.controllers] == ["c2"]
    with store.reading() as connection:
        if connection.dialect.name != "sqlite":
            return  # PostgreSQL scans small tables anyway
        plans = [
            str(row[-1])
            for statement, parameters in asked
            if statement.startswith("SELECT")
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]
    scanned = [line for line in plans if line.startswith(("SCAN runs", "SCAN controllers", "SCAN events"))]
    assert plans
    assert scanned == []
