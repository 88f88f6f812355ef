"""Removal of metrics and telemetry of old runs: the rows that stay, the runs that keep all, interruptions."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from history_tools import RunFiles, at, dump, run_sql, synced, whole_run

from rlhf_core.history import prune, queries
from rlhf_core.history.prune import PrunableRun
from rlhf_core.history.queries.baselines import newest_completed
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.compare import compare
from rlhf_core.schemas.attempts import PromotionState, RunState
from rlhf_core.schemas.journal import PromotionMoved

BEFORE = at(1000)
DERIVED = ("run_goodput", "run_lost_time", "run_recoveries", "undriven_times", "interruptions")
"""Views that read metrics, and not the cache of ended runs."""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None))


def old_run(runs: Path) -> RunFiles:
    """An ended run with an evaluation during training."""
    run = whole_run(runs)
    run.metrics(2, 0, 10, 50.2, **{"eval/greedy": 0.9, "time/rollout_s": 1.5})
    return run


def all_pruned(store: HistoryStore) -> None:
    for run in prune.prunable(store, BEFORE):
        prune.prune(store, run, BEFORE)


def keep_none_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let also runs be pruned that others are compared with."""
    monkeypatch.setattr(prune, "_compared", list)


def derived(store: HistoryStore, run_id: str) -> dict[str, Any]:
    """Everything that is known about a run except the metrics themselves."""
    shown = queries.show_run(store, run_id).document()
    del shown["run"]["metrics_pruned"]
    (listed,) = queries.list_runs(store)
    views = {view: run_sql(store, f"SELECT * FROM {view} ORDER BY 1, 2, 3").rows for view in DERIVED}
    best = run_sql(store, "SELECT step, value FROM run_curve WHERE key = 'eval/greedy'").rows
    pace = queries.seconds_per_step(store, shown["run"]["shape"])
    return {"shown": shown, "listed": listed, "views": views, "best": best, "pace": pace}


@pytest.mark.parametrize("predicts", [True, False])
def test_only_metrics_and_telemetry_are_removed_and_nothing_else_changes(
    store: HistoryStore, runs: Path, monkeypatch: pytest.MonkeyPatch, predicts: bool
) -> None:
    """Control: without the times of steps, what is derived from them would be wrong."""
    keep_none_compared(monkeypatch)
    if not predicts:
        monkeypatch.setattr(prune, "newest_completed", lambda shape: newest_completed("another shape"))
    run = synced(old_run(runs), store)
    tables, known = dump(store), derived(store, run.run_id)
    shape = known["shown"]["run"]["shape"]
    predicted = queries.measured_shape(store, shape)
    (found,) = prune.prunable(store, BEFORE)
    all_pruned(store)
    left = dump(store)
    assert len(tables["metrics"]) - len(left["metrics"]) == found.num_metrics == (13 if predicts else 14)
    assert len(tables["node_telemetry"]) - len(left["node_telemetry"]) == found.num_telemetry == (0 if predicts else 4)
    times = ["time/rollout_s"] * predicts + ["time/step_s"]
    assert sorted(queries.curve(store, run.run_id)) == ["eval/greedy", *times]
    changed = {name for name, rows in left.items() if rows != tables[name]}
    assert changed <= {"metrics", "node_telemetry"}
    assert derived(store, run.run_id) == known
    assert (queries.measured_shape(store, shape) == predicted) is predicts
    assert prune.prunable(store, BEFORE) == []
    synced(run, store)
    assert dump(store) == left, "what was read is not read again"
    with store.writing() as connection:
        connection.exec_driver_sql("DELETE FROM metrics")
    assert derived(store, run.run_id) != known


def test_a_run_without_its_metrics_says_so(store: HistoryStore, runs: Path) -> None:
    old, new = synced(whole_run(runs), store), synced(whole_run(runs, tail="bbbbbb"), store)
    prune.prune(store, PrunableRun(old.run_id, at(55), False, 0, 0), BEFORE)
    pruned = [queries.show_run(store, run.run_id).run["metrics_pruned"] for run in (old, new)]
    assert pruned == [True, False]
    compared = {row["key"]: row for row in compare(store, (old.run_id, new.run_id))["metrics"]}
    assert compared["train/loss"]["values"][0] is None
    assert compared["train/loss"]["note"] == "removed of A with `rlhf db prune`"
    assert compared["time/step_s"]["note"] == ""


def made(store: HistoryStore, runs: Path, name: str, number: int, state: RunState, trial_of: str = "") -> RunFiles:
    """A run with one step, ingested; its ``number`` orders it among the others."""
    run = RunFiles(runs, name, f"{number:06d}", 10 * number, trial_of).created()
    for passed in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING):
        run.moved(passed, 10 * number)
    run.planned(1, 10 * number)
    run.metrics(1, 0, 1, 10 * number + 1)
    for end in (RunState.EVALUATING, state) if state is RunState.COMPLETED else (state,):
        run.moved(end, 10 * number + 2)
    return synced(run, store)


def test_runs_that_live_or_that_others_are_compared_with_keep_all(store: HistoryStore, runs: Path) -> None:
    completed = [made(store, runs, "sort", number, RunState.COMPLETED) for number in range(1, 9)]
    promoted, *_ = completed
    promoted.journal(PromotionMoved(state=PromotionState.APPROVED, checkpoint_step=1), 13)
    promoted.journal(PromotionMoved(state=PromotionState.PROMOTED, checkpoint_step=1, path="/models/a"), 14)
    synced(promoted, store)
    only_of_its_name = made(store, runs, "gsm8k", 0, RunState.COMPLETED)
    failed = made(store, runs, "sort", 20, RunState.FAILED)
    trial = made(store, runs, "sort", 21, RunState.COMPLETED, trial_of=failed.run_id)
    late = made(store, runs, "sort", 2000, RunState.FAILED)
    active = RunFiles(runs, "sort", "acacac", 30).created()
    active.metrics(1, 0, 1, 31)
    synced(active, store)
    found = {run.run_id: run.predicts for run in prune.prunable(store, BEFORE)}
    expected = {run.run_id: place >= 3 for place, run in enumerate(completed)}  # the newest five of the shape
    expected |= {failed.run_id: False, trial.run_id: False}
    for kept in (promoted, completed[-1], only_of_its_name, late, active):
        expected.pop(kept.run_id, None)
    assert found == expected


@pytest.mark.parametrize("is_timed", [True, False])
def test_an_interruption_leaves_less_to_remove(
    store: HistoryStore, runs: Path, monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    """Also if the trainer reports no times of steps, one metric of each step stays."""
    run = made(store, runs, "sort", 1, RunState.FAILED)
    for step in range(2, 8):
        run.metrics(1, 0, step, 20 + step, **{"policy/kl": 0.1})
    synced(run, store)
    if not is_timed:
        with store.writing() as connection:
            step_s = "SELECT key_id FROM metric_keys WHERE name = 'time/step_s'"
            for table in ("metrics", "latest_metrics"):
                connection.exec_driver_sql(f"DELETE FROM {table} WHERE key_id = ({step_s})")
    monkeypatch.setattr(prune, "BATCH_ROWS", 1)
    lives: Iterator[int] = iter(range(2))

    def killed(_seconds: float) -> None:
        if next(lives, None) is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(prune, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=killed))
    left = []
    for _ in range(3):
        left.append(sum(one.num_metrics for one in prune.prunable(store, BEFORE)))
        with suppress(KeyboardInterrupt):
            all_pruned(store)
    assert left == ([13, 12, 10] if is_timed else [6, 5, 4])
    assert prune.prunable(store, BEFORE) == []
    kept = "time/step_s" if is_timed else "train/loss"
    assert {key: [step for step, _ in curve] for key, curve in queries.curve(store, run.run_id).items()} == {
        kept: [*range(1, 8)]
    }


def test_a_run_that_was_resumed_meanwhile_keeps_its_metrics(store: HistoryStore, runs: Path) -> None:
    run = made(store, runs, "sort", 1, RunState.FAILED)
    rows = len(dump(store)["metrics"])
    (found,) = prune.prunable(store, BEFORE)
    run.moved(RunState.PREFLIGHT, 900, "resumed")
    synced(run, store)
    prune.prune(store, found, BEFORE)
    assert len(dump(store)["metrics"]) == rows
    run.moved(RunState.FAILED, 910)
    synced(run, store)
    prune.prune(store, found, BEFORE)
    assert len(dump(store)["metrics"]) < rows, "control"
