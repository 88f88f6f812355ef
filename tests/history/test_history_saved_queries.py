"""The saved queries on both databases, with results calculated by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from history_tools import table_row
from sqlalchemy import Table, insert

from rlhf_core.errors import BadInput, UnknownRun
from rlhf_core.history import saved_queries
from rlhf_core.history.saved_queries import find, parse, run, saved
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import UtcDateTime, metadata

NOW = datetime.now(UTC).replace(microsecond=0)
"""Queries look back from the present."""


class History:
    """A history written row by row; missing values are empty."""

    def __init__(self, store: HistoryStore) -> None:
        self.store = store
        self._keys: dict[str, int] = {}
        self._measured: set[tuple[str, str]] = set()

    def add(self, table: str, **facts: Any) -> None:
        """Add a row. Times may be given in seconds before :data:`NOW`."""
        target = metadata.tables[table]
        given = {name: self._value(target, name, value) for name, value in facts.items()}
        with self.store.writing() as connection:
            connection.execute(insert(target).values(table_row(table, NOW, **given)))

    def _value(self, table: Table, name: str, value: Any) -> Any:
        is_time = isinstance(table.c[name].type, UtcDateTime)
        return NOW - timedelta(seconds=value) if is_time and isinstance(value, int | float) else value

    def metric(
        self, run_id: str, key: str, step: int, ago: float, value: float, start: tuple[int, int] = (1, 0)
    ) -> None:
        """Add a metric of a step, with its end in seconds before now."""
        if key not in self._keys:
            self._keys[key] = len(self._keys) + 1
            self.add("metric_keys", key_id=self._keys[key], name=key)
        place = {"step": step, "attempt": start[0], "restart": start[1], "time": ago}
        facts: dict[str, Any] = {"run_id": run_id, "key_id": self._keys[key], "value": value, **place}
        self.add("metrics", **facts)
        if (run_id, key) not in self._measured:
            self._measured.add((run_id, key))
            self.add("latest_metrics", **facts)

    def run(self, run_id: str, **facts: Any) -> None:
        """Add a completed run with one attempt on two nodes, requested 1000 s ago and ended 100 s ago."""
        known = {"name": "sort", "state": "completed", "created_at": 1000, "ended_at": 100, "progress_at": 100}
        self.add("runs", run_id=run_id, **{**known, **facts})
        self.add("attempts", run_id=run_id, number=1, num_nodes=2, state="completed")

    def restart(self, run_id: str, place: tuple[int, int], steps: tuple[int, int, int], started_at: float) -> None:
        """Add a start of the workers, with its first, last and last valid step."""
        (attempt, restart), (first, last, valid) = place, steps
        facts = {"first_step": first, "last_step": last, "last_valid_step": valid, "started_at": started_at}
        self.add("restarts", run_id=run_id, attempt=attempt, restart=restart, **facts)

    def incident(self, run_id: str, ago: float, kind: str, **facts: Any) -> None:
        """Add an incident in the first start of the first attempt."""
        known = {"incident_id": "1.0", "attempt": 1, "restart": 0, "failure_kind": kind, "seen_at": ago}
        self.add("incidents", run_id=run_id, **{**known, **facts})

    def ask(self, query: str, **given: str) -> list[dict[str, Any]]:
        """Result of a saved query, with numbers to four digits, because the databases round sums differently."""
        answer = run(self.store, find(query), given)
        return [
            {
                column: float(f"{value:.4g}") if isinstance(value, float) else value
                for column, value in zip(answer.columns, row, strict=True)
            }
            for row in answer.rows
        ]


@pytest.fixture
def history(store: HistoryStore) -> History:
    """An empty history."""
    return History(store)


def pick(rows: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    """Some columns of all rows."""
    return [tuple(row[column] for column in columns) for row in rows]


DAY = 86400.0

# ---------------------------------------------------------------------------------------------------------------------
# Failures and their cost


def test_failures_by_kind(history: History) -> None:
    history.run("a")
    history.run("b")
    history.incident("a", 900, "hang")
    history.incident("a", 800, "hang", incident_id="1.1", restart=1)
    history.incident("b", 700, "hang")
    history.incident("b", 600, "cuda_oom", incident_id="1.1", restart=1)
    history.incident("b", 40 * DAY, "network", incident_id="1.2", restart=2)
    history.add("decisions", run_id="b", decision_id="1.0", attempt=1, action="restart_in_place")
    history.add("decisions", run_id="b", decision_id="control-9", attempt=1, action="stop", decided_by="controller")
    history.add("decisions", run_id="a", decision_id="1.0", attempt=1, action="stop", decided_by="agent")
    counted = ("failure_kind", "num_incidents", "num_runs", "num_stopped")
    assert pick(history.ask("failures-by-kind"), *counted) == [("hang", 3, 2, 0), ("cuda_oom", 1, 1, 1)]
    assert len(history.ask("failures-by-kind", days="50")) == 3


def a_run_that_was_stopped_once(history: History, run_id: str = "a", **facts: Any) -> None:
    """Steps 1 to 3 of 10 s each, a hang, then steps 3 and 4 by another start: 40 s of valid steps."""
    history.run(run_id, **facts)
    history.add("attempts", run_id=run_id, number=2, num_nodes=2, submitted_at=700, started_at=600)
    history.restart(run_id, (1, 0), (1, 3, 2), 960)
    history.restart(run_id, (2, 0), (3, 4, 4), 600)
    for step, ago in ((1, 950), (2, 940), (3, 930)):
        history.metric(run_id, "time/step_s", step, ago, 10.0)
    history.incident(run_id, 900, "hang")
    history.add("node_strikes", run_id=run_id, incident_id="1.0", node="n2", attempt=1, struck_at=900)
    for step, ago in ((3, 500), (4, 490)):
        history.metric(run_id, "time/step_s", step, ago, 10.0, (2, 0))


def test_goodput(history: History) -> None:
    a_run_that_was_stopped_once(history)
    history.run("b", name="other")
    history.run("c", trial_of="a")
    history.run("d", created_at=60 * DAY)
    # a: 900 s from start to end, 100 s of them in a queue; 4 valid steps, 1 repeated; 420 s from the end of step 3 to
    # the start of the next, and the 10 s of that step.
    columns = ("run_id", "ettr", "wall_s", "queue_s", "productive_s", "repeated_s", "lost_s")
    assert pick(history.ask("goodput"), *columns) == [
        ("b", 0.0, 900.0, 0, 0.0, 0.0, 0),
        ("a", 0.05, 900.0, 100.0, 40.0, 10.0, 430.0),
    ]
    assert pick(history.ask("goodput", name="other"), "run_id") == [("b",)]


def test_time_lost(history: History) -> None:
    a_run_that_was_stopped_once(history)
    a_run_that_was_stopped_once(history, "b")
    history.incident("b", 300, "network", incident_id="2.0", attempt=2)  # 490 s ago to the end, 100 s ago
    columns = ("failure_kind", "num_incidents", "num_runs", "downtime_s", "repeated_s", "lost_s")
    rows = history.ask("time-lost")
    assert pick(rows, *columns) == [("hang", 2, 2, 840.0, 20.0, 860.0), ("network", 1, 1, 390.0, 0.0, 390.0)]
    assert pick(rows, "share") == [(0.688,), (0.312,)]
    assert history.ask("time-lost", days="0") == []


def test_nodes_by_cost(history: History) -> None:
    a_run_that_was_stopped_once(history)  # 420 s from step 2 to step 3, and 10 s for a repeated step, on two nodes
    a_run_that_was_stopped_once(history, "b")
    # In b, the first incident costs 80 s until the second, plus the step; the second costs 340 s until the next step.
    history.incident("b", 850, "hang", incident_id="1.1", restart=1)
    history.add("node_strikes", run_id="b", incident_id="1.1", node="n3", attempt=1, struck_at=850)
    rows = history.ask("nodes-by-cost")
    assert pick(rows, "node", "num_strikes", "num_runs", "lost_s", "node_hours") == [
        ("n2", 2, 2, 520.0, 0.2889),
        ("n3", 1, 1, 340.0, 0.1889),
    ]
    # Every incident suspects one node here, so the cost of the nodes is the lost time.
    assert sum(row["lost_s"] for row in rows) == sum(row["lost_s"] for row in history.ask("time-lost"))
    assert sum(row["lost_s"] for row in rows) == sum(row["lost_s"] for row in history.ask("goodput"))
    assert history.ask("nodes-by-cost", days="0") == []


def test_recovery_times(history: History) -> None:
    for run_id, seen in (("a", 900), ("b", 800), ("c", 700), ("d", 690)):
        history.run(run_id)
        history.incident(run_id, seen, "hang")
    for run_id, ago in (("a", 890), ("b", 770), ("c", 600)):  # after 10, 30 and 100 s
        history.metric(run_id, "time/step_s", 5, ago, 1.0, (1, 1))
    history.metric("a", "time/step_s", 4, 895, 1.0)  # the old start was still working on it
    history.run("e")
    history.incident("e", 500, "network")
    history.metric("e", "time/step_s", 5, 460, 1.0, (1, 1))
    history.run("f")
    history.incident("f", 500, "network")
    history.metric("f", "time/step_s", 5, 480, 1.0, (1, 1))
    for run_id, attempt, restart in (("a", 1, 1), ("b", 1, 1), ("c", 1, 1), ("a", 1, 0), ("e", 1, 1), ("f", 1, 1)):
        history.add("restarts", run_id=run_id, attempt=attempt, restart=restart, first_step=4, last_step=5)
    columns = ("failure_kind", "num_recovered", "num_without", "fastest_s", "median_s", "slowest_s")
    assert pick(history.ask("recovery-times"), *columns) == [
        ("hang", 3, 1, 10.0, 30.0, 100.0),
        ("network", 2, 0, 20.0, 30.0, 40.0),
    ]


def test_same_root_cause(history: History) -> None:
    for run_id, fingerprint in (("a", "f1"), ("b", "f1"), ("c", "f2"), ("d", "")):
        history.run(run_id)
        history.incident(run_id, 900, "shape", fingerprint=fingerprint, message=f"of {run_id}")
    history.incident("c", 800, "shape", incident_id="1.1", restart=1, fingerprint="f2")  # the same attempt
    history.incident("d", 40 * DAY, "shape", incident_id="1.1", restart=1, fingerprint="f2")
    columns = ("fingerprint", "failure_kind", "num_attempts", "num_runs", "one_run", "message")
    assert pick(history.ask("same-root-cause"), *columns) == [("f1", "shape", 2, 2, "b", "of a")]
    assert pick(history.ask("same-root-cause", at_least="1"), "fingerprint") == [("f1",), ("f2",)]
    assert pick(history.ask("same-root-cause", days="50"), "fingerprint") == [("f1",), ("f2",)]


def test_remedies(history: History) -> None:
    history.run("a")
    history.add("attempts", run_id="a", number=2, failure_kind="cuda_oom")
    changed = {"train.micro_batch_size": 2, "train.checkpointing": True, "rollout": {"engine": "slow"}}
    history.add("decisions", run_id="a", decision_id="control-9", attempt=2, action="new_attempt", config_diff=changed)
    history.add("decisions", run_id="a", decision_id="2.1", attempt=2, action="restart_in_place", config_diff={})
    columns = ("run_id", "failure_kind", "setting", "new_value", "action", "run_state")
    common = ("new_attempt", "completed")
    assert pick(history.ask("remedies"), *columns) == [
        ("a", "cuda_oom", "rollout.engine", "slow", *common),
        ("a", "cuda_oom", "train.checkpointing", "true", *common),
        ("a", "cuda_oom", "train.micro_batch_size", "2", *common),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Runs and models


def test_best_checkpoint(history: History) -> None:
    for run_id, name, trial_of in (("a", "sort", ""), ("b", "other", ""), ("a-trial", "sort", "a")):
        history.run(run_id, name=name, trial_of=trial_of)
        for step, removed in ((5, None), (10, None), (15, 50)):
            path = f"checkpoints/step-{step:06d}"
            history.add("checkpoints", run_id=run_id, step=step, path=path, removed_at=removed)
    for run_id, step, value in (("a", 10, 0.8), ("b", 10, 0.7), ("a-trial", 5, 1.0)):
        history.add(
            "evaluations", run_id=run_id, when_made="after", name="greedy", value=value, checkpoint_step=step,
            ci_low=value - 0.1, ci_high=value + 0.1, metric="exact_match",
        )  # fmt: skip
    history.add("evaluations", run_id="a", when_made="before", name="sampled", value=0.99, checkpoint_step=5)
    for step, value in ((5, 0.9), (7, 0.95), (15, 0.97)):  # no checkpoint at 7; the one at 15 is gone
        history.metric("a", "eval/greedy", step, 500, value)
    columns = ("run_id", "step", "path", "value", "ci_low", "measured")
    assert pick(history.ask("best-checkpoint"), *columns) == [
        ("a", 5, "checkpoints/step-000005", 0.9, None, "in training"),
        ("a", 10, "checkpoints/step-000010", 0.8, 0.7, "after"),
        ("b", 10, "checkpoints/step-000010", 0.7, 0.6, "after"),
    ]
    assert pick(history.ask("best-checkpoint", name="other"), "run_id") == [("b",)]
    assert pick(history.ask("best-checkpoint", limit="1"), "value") == [(0.9,)]
    assert pick(history.ask("best-checkpoint", evaluation="sampled"), "value") == [(0.99,)]
    for step, value in ((5, 0.9), (10, 0.4)):
        history.metric("a", "eval/loss", step, 500, value)
    assert pick(history.ask("best-checkpoint", evaluation="loss"), "value") == [(0.4,), (0.9,)], "the lowest is best"


def test_config_differences(history: History) -> None:
    history.run(
        "a-1", spec={"seed": 1, "train": {"rate": 0.5, "clip": True}, "tags": ["x", "y"], "same": "s", "gone": None}
    )
    history.run(
        "b-1", spec={"seed": 2, "train": {"rate": 0.5, "clip": False, "more": "m"}, "tags": ["x"], "same": "s"},
        created_at=900,
    )  # fmt: skip
    rows = pick(history.ask("config-differences", a="a-1"), "setting", "in_a", "in_b")
    assert [(setting, left, right) for setting, left, right in rows if setting != "tags"] == [
        ("seed", "1", "2"),
        ("train.clip", "true", "false"),
        ("train.more", None, "m"),
    ]
    assert [setting for setting, _, _ in rows] == ["seed", "tags", "train.clip", "train.more"]
    assert history.ask("config-differences", a="a-1", b="a-1") == []


def test_step_time(history: History) -> None:
    history.run("a")
    for step, whole in ((1, 10.0), (2, 14.0)):
        history.metric("a", "time/step_s", step, 500, whole)
        history.metric("a", "time/rollout_s", step, 500, 6.0)
        history.metric("a", "time/train_s", step, 500, 3.0)
        history.metric("a", "time/checkpoint_s", step, 500, 2.0)
    history.metric("a", "speed/tokens_per_s", 1, 500, 99.0)
    for name, seconds in (("weight_sync", 1.0), ("weight_wire", 0.5), ("checkpoint_write", 20.0), ("run", 90.0)):
        history.metric("a", f"time/{name}_s", 2, 500, seconds)
    columns = ("part", "num_steps", "mean_s", "longest_s", "total_s", "share")
    assert pick(history.ask("step-time"), *columns) == [
        ("time/run_s", 1, 90.0, 90.0, 90.0, 3.75),
        ("time/step_s", 2, 12.0, 14.0, 24.0, 1.0),
        ("time/checkpoint_write_s", 1, 20.0, 20.0, 20.0, 0.8333),
        ("time/rollout_s", 2, 6.0, 6.0, 12.0, 0.5),
        ("time/train_s", 2, 3.0, 3.0, 6.0, 0.25),
        ("other", 2, 2.5, 4.0, 5.0, 0.2083),
        ("time/checkpoint_s", 2, 2.0, 2.0, 4.0, 0.1667),
        ("time/weight_sync_s", 1, 1.0, 1.0, 1.0, 0.04167),
        ("time/weight_wire_s", 1, 0.5, 0.5, 0.5, 0.02083),
    ]


def test_reward_collapses(history: History) -> None:
    for run_id, after in (("bad", 0.2), ("good", 0.7), ("below-zero", -0.9)):
        history.run(run_id)
        before = -0.4 if run_id == "below-zero" else 0.8
        history.restart(run_id, (1, 0), (1, 6, 4), 900)
        history.restart(run_id, (1, 1), (5, 8, 8), 800)
        for step in range(1, 7):  # steps 1 and 2 are too long ago, 5 and 6 were repeated
            value = {1: 9.0, 2: 9.0}.get(step, before if step < 5 else 9.0)
            history.metric(run_id, "reward/mean", step, 850, value)
        for step in (5, 6, 7, 8):
            history.metric(run_id, "reward/mean", step, 700, after if step < 7 else 9.0, (1, 1))
    columns = ("run_id", "attempt", "restart", "step", "reward_before", "reward_after", "why")
    assert pick(history.ask("reward-collapses", steps="2"), *columns) == [
        ("bad", 1, 1, 5, 0.8, 0.2, "after a resume"),
        ("below-zero", 1, 1, 5, -0.4, -0.9, "after a resume"),
    ]
    assert pick(history.ask("reward-collapses", steps="2", share="0.1"), "run_id") == [
        ("bad",),
        ("below-zero",),
        ("good",),
    ]
    assert history.ask("reward-collapses", steps="2", days="0") == []


def test_training_that_learned_nothing_is_a_collapse_of_the_reward(history: History) -> None:
    history.run("a")
    found = {"run_id": "a", "attempt": 1, "restart": 0, "step": 4, "seen_at": 500}
    history.add("incidents", **found, incident_id="1", failure_kind="degenerate_rl", message="gone")
    history.add("incidents", **found, incident_id="2", failure_kind="hang")
    history.add("incidents", **found, incident_id="3", failure_kind="degenerate_rl", message="a warning")
    history.add("decisions", run_id="a", decision_id="3", attempt=1, action="continue")
    for step, value in enumerate((0.5, 0.75, 0.25, 0.0), start=1):
        history.metric("a", "reward/mean", step, 900, value)
    columns = ("run_id", "attempt", "restart", "step", "reward_before", "reward_after", "why")
    assert pick(history.ask("reward-collapses", steps="2"), *columns) == [("a", 1, 0, 4, 0.75, 0.125, "gone")]
    assert history.ask("reward-collapses", days="0") == []


def test_weight_syncs(history: History) -> None:
    history.run("a")
    for number, (acknowledged, seconds) in enumerate(((2, 1.0), (2, 3.0), (1, 2.0))):
        rates = {"seconds": seconds, "wire_s": seconds / 2, "apply_s": 0.5, "gb_per_s": 4 / seconds, "bytes": 4 * 10**9}
        facts = {"number": number, "version": number + 4, "engines": 2, "acknowledged": acknowledged}
        history.add("weight_syncs", run_id="a", attempt=1, restart=0, transport="broadcast", **facts, **rates)
    history.add("weight_syncs", run_id="a", attempt=1, restart=0, number=3, version=7, engines=2)
    columns = ("restart", "transport", "num_syncs", "first_version", "last_version", "missing", "mean_s", "mean_wire_s")
    assert pick(history.ask("weight-syncs", run="sort"), *columns) == [
        (0, "", 1, 7, 7, 1, None, None),
        (0, "broadcast", 3, 4, 6, 1, 2.0, 1.0),
    ]


def test_evaluated_checkpoints(history: History) -> None:
    history.run("a")
    history.add("checkpoints", run_id="a", step=4, path="checkpoints/step-000004", removed_at=50)
    history.add("checkpoints", run_id="a", step=8, path="checkpoints/step-000008")
    history.add("weight_versions", run_id="a", version=8, checkpoint_step=8, sha256="feedfeedfeed0000")
    for when, name, step, ago in (("before", "greedy", 0, 900), ("after", "greedy", 8, 200), ("after", "pass", 4, 190)):
        history.add("evaluations", run_id="a", when_made=when, name=name, value=0.5, checkpoint_step=step, made_at=ago)
    columns = ("when_made", "name", "checkpoint_step", "checkpoint", "now", "weights")
    assert pick(history.ask("evaluated-checkpoints", run="sort"), *columns) == [
        ("before", "greedy", 0, None, "", None),
        ("after", "greedy", 8, "checkpoints/step-000008", "there", "feedfeedfeed"),
        ("after", "pass", 4, "checkpoints/step-000004", "removed", None),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The site


def test_slowest_nodes(history: History) -> None:
    history.run("a")
    history.add("attempts", run_id="a", number=2)
    speeds = (
        ("n1", 1, "cpu", 1.0, 4.0),
        ("n1", 2, "cpu", 3.0, 4.0),
        ("n2", 1, "cpu", 2.0, 1.0),
        ("n3", 1, "cpu", 2.0, 0.0),  # had no neighbour
        ("n4", 1, "gpu", 1.0, 9.0),
    )
    for node, attempt, device, tflops, gb_s in speeds:
        history.add(
            "node_speeds", run_id="a", attempt=attempt, node=node, device=device, matmul_tflops=tflops,
            bandwidth_gb_s=gb_s, core_share=1.0,
        )  # fmt: skip
    columns = ("node", "num_probes", "matmul_tflops", "compute_share", "bandwidth_gb_s", "bandwidth_share")
    assert pick(history.ask("slowest-nodes"), *columns) == [
        ("n2", 1, 2.0, 1.0, 1.0, 0.4),
        ("n1", 2, 2.0, 1.0, 4.0, 1.6),
        ("n3", 1, 2.0, 1.0, None, None),
        ("n4", 1, 1.0, 1.0, 9.0, 1.0),
    ]


def test_probe_speeds(history: History) -> None:
    history.run("a", created_at=1001)
    history.run("b")
    for run_id, node, tflops, gb_s in (("b", "n1", 3.0, 2.0), ("b", "n2", 1.0, 0.0), ("a", "n3", 9.0, 9.0)):
        facts = {"device": "cpu", "matmul_tflops": tflops, "bandwidth_gb_s": gb_s}
        history.add("node_speeds", run_id=run_id, attempt=1, node=node, **facts)
    columns = ("attempt", "node", "matmul_tflops", "compute_share", "bandwidth_gb_s")
    assert pick(history.ask("probe-speeds"), *columns) == [(1, "n1", 3.0, 1.5, 2.0), (1, "n2", 1.0, 0.5, None)]


def test_queue_time_by_week(history: History) -> None:
    monday = (NOW - timedelta(days=14 + NOW.weekday())).replace(hour=0, minute=0, second=0)
    history.run("a")
    waits = (
        (2, monday, 10, True),
        (3, monday + timedelta(days=7, seconds=-1), 30, True),  # the end of Sunday
        (4, monday + timedelta(days=7), 60, True),
        (5, monday + timedelta(days=8), 100, False),
    )
    for number, submitted, seconds, started in waits:
        ended = {"started_at" if started else "ended_at": submitted + timedelta(seconds=seconds)}
        history.add("attempts", run_id="a", number=number, submitted_at=submitted, **ended)
    columns = ("week", "num_attempts", "mean_s", "longest_s", "num_never_started", "num_waiting")
    first, second = f"{monday:%Y-%m-%d}", f"{monday + timedelta(days=7):%Y-%m-%d}"
    assert pick(history.ask("queue-time"), *columns) == [(first, 2, 20.0, 30.0, 0, 0), (second, 2, 80.0, 100.0, 1, 0)]


def test_queue_time_of_jobs_that_wait_and_of_those_that_started_unseen(history: History) -> None:
    history.run("a", state="queued", ended_at=None)
    history.run("b")  # ended 100 s ago
    for run_id, number, submitted in (("a", 2, 90), ("a", 3, 3000), ("b", 2, 150)):
        history.add("attempts", run_id=run_id, number=number, submitted_at=submitted)
    history.add("restarts", run_id="a", attempt=3, restart=0, started_at=2990)
    (week, *earlier) = reversed(history.ask("queue-time"))
    rows = [week, *earlier]  # on a Monday just after midnight, there are two weeks
    assert sum(row["num_attempts"] for row in rows) == 3
    assert sum(row["num_waiting"] for row in rows) == 1
    assert sum(row["num_never_started"] for row in rows) == 1
    waited_s = 90 + (datetime.now(UTC) - NOW).total_seconds()
    assert 90 <= max(row["longest_s"] for row in rows) <= waited_s + 1


def test_trials(history: History) -> None:
    history.run("a")
    history.run("a-trial", trial_of="a", message="loss is finite", created_at=1000, ended_at=400, state="failed")
    history.add("attempts", run_id="a-trial", number=2, num_nodes=4, started_at=910, ended_at=460)  # 1800 s of nodes
    history.run("of-none", trial_of="gone", created_at=900)
    history.add(
        "attempts", run_id="of-none", number=2, num_nodes=4, started_at=900, outcome_at=450, ended_at=150
    )  # 1800 s of nodes, noticed later
    columns = ("trial", "trial_of", "state", "message", "wall_s", "node_hours", "run_state")
    assert pick(history.ask("trials"), *columns) == [
        ("of-none", "gone", "completed", "", 800.0, 0.5, None),
        ("a-trial", "a", "failed", "loss is finite", 600.0, 0.5, "completed"),
    ]


def test_trials_are_no_runs_and_no_failures(history: History) -> None:
    """Only queries on trials, nodes and usage count them."""

    def answers() -> dict[str, list[tuple[Any, ...]]]:
        names = (query.name for query in saved() if not any(one.type == "run" for one in query.arguments))
        return {name: [tuple(row.values()) for row in history.ask(name)] for name in names}

    def add_run_with_everything(run_id: str, trial_of: str) -> None:
        a_run_that_was_stopped_once(history, run_id, trial_of=trial_of)
        second = {"incident_id": "2.0", "attempt": 2, "fingerprint": "f1"}
        history.incident(run_id, 300, "degenerate_rl", **second)
        history.incident(run_id, 290, "degenerate_rl", **{**second, "incident_id": "2.1", "restart": 1})
        history.add("attempts", run_id=run_id, number=3, num_nodes=2)
        history.incident(run_id, 280, "network", incident_id="3.0", attempt=3, fingerprint="f1")
        changed = {"train.micro_batch_size": 2}
        facts = {"decision_id": "control-9", "attempt": 2, "action": "new_attempt", "config_diff": changed}
        history.add("decisions", run_id=run_id, **facts)
        history.add("checkpoints", run_id=run_id, step=4, path="step-000004")
        history.add(
            "evaluations", run_id=run_id, name="greedy", when_made="after", value=0.5, checkpoint_step=4, made_at=400
        )
        for step, ago, start in ((1, 950, (1, 0)), (2, 940, (1, 0)), (3, 500, (2, 0))):
            history.metric(run_id, "reward/mean", step, ago, 1.0 if start == (1, 0) else 0.1, start)

    empty = answers()
    add_run_with_everything("a-trial", "a")
    of_trial = answers()
    assert {name for name in of_trial if of_trial[name] != empty[name]} == {"trials", "nodes-by-cost", "usage"}
    assert [row[:2] for row in of_trial["usage"]] == [("", 0)], "hours without a run"
    add_run_with_everything("b", "")
    unchanged = {name for name, rows in answers().items() if rows == of_trial[name]}
    assert unchanged == {"trials", "slowest-nodes"}, "control: the same rows of a run count"


def test_usage(history: History) -> None:
    history.run("a", owner="anna")
    history.run("b", owner="ben", state="training", ended_at=None, progress_at=200)
    history.run("a-trial", owner="anna", trial_of="a")
    history.run("old", owner="old", created_at=40 * DAY, ended_at=29 * DAY)
    eight = {"gpus_per_node": 8}
    attempts: tuple[dict[str, Any], ...] = (
        {"run_id": "a", "state": "failed", "started_at": 7200, "outcome_at": 3600, "ended_at": 100, "placement": eight},
        {"run_id": "a", "number": 3, "state": "completed", "started_at": 3600, "ended_at": 1800, "placement": {}},
        {"run_id": "b", "state": "running", "started_at": 3800, "placement": eight},  # until its newest line
        {"run_id": "a-trial", "state": "completed", "started_at": 5400, "ended_at": 3600, "num_nodes": 1},
        {"run_id": "old", "state": "lost", "started_at": 40 * DAY, "ended_at": 29 * DAY},  # a day of it in the period
        {"run_id": "old", "number": 3, "state": "cancelled", "submitted_at": 100},  # never started
    )
    for facts in attempts:
        history.add("attempts", **{"number": 2, "num_nodes": 2, **facts})
    assert pick(history.ask("usage"), "owner", "num_runs", "node_hours", "gpu_hours", "failed_share") == [
        ("old", 1, pytest.approx(48, abs=8), 0.0, 1.0),  # the period ends when the query runs, hours after NOW at most
        ("anna", 1, 3.5, 16.0, 0.5714),
        ("ben", 1, 2.0, 16.0, 0.0),
    ]
    assert pick(history.ask("usage", days="29"), "owner") == [("anna",), ("ben",)]


# ---------------------------------------------------------------------------------------------------------------------
# All queries


def test_every_question_has_a_test_and_says_what_it_means() -> None:
    tests = {name.removeprefix("test_").replace("_", "-") for name in globals()}
    for query in saved():
        assert any(name.startswith(query.name) for name in tests), query.name
        assert query.title
        assert query.meaning, query.name
        assert len(query.title) <= 80, query.name
        assert saved_queries.parameters(query.sql) == {argument.name for argument in query.arguments}, query.name
    assert len(saved()) >= 15


def test_the_text_that_is_shown_can_be_asked_again(history: History) -> None:
    """It is run again with another argument, and as a user's own statement."""
    a_run_that_was_stopped_once(history)
    own_dialect = saved_queries.dialect_of(history.store)
    for query in saved():
        given = {"a": "a"} if query.name == "config-differences" else {}
        shown = parse(saved_queries.statement(query, own_dialect))
        assert shown.arguments == query.arguments
        assert run(history.store, shown, given) == run(history.store, query, given), query.name
        assert "@" not in shown.sql, query.name


def test_a_value_is_never_part_of_the_statement(history: History) -> None:
    values = ("x'; DROP TABLE runs; --", "%s", ":days", "100%", "'")
    for value in values:
        history.run(f"run of {value}", name=value)
    for value in values:
        assert pick(history.ask("goodput", name=value), "run_id") == [(f"run of {value}",)]
        assert run(history.store, parse("SELECT :v AS v"), {"v": value}).rows == [[value]]


def test_a_statement_of_ones_own_takes_values(history: History) -> None:
    history.run("a", name="50% 'of'")
    history.run("b", seed=3)
    own = "SELECT run_id, ':name' FROM runs -- :comment\nWHERE seed = :seed AND name LIKE '%or%'"
    assert run(history.store, parse(own), {"seed": "3"}).rows == [["b", ":name"]]


def test_a_value_has_the_type_of_its_place(history: History) -> None:
    history.run("a", name="123", message="00123456", seed=3)
    for condition, value, found in (
        ("name = :v", "123", True),
        ("name = :v", "124", False),
        ("message = :v", "00123456", True),
        ("message = :v", "123456", False),
        ("seed = :v", "3", True),
        ("seed > :v", "-1", True),
        ("seed + 0.5 > :v", "3.25", True),
        ("seed * 2 > :v", "10", False),
        ("length(name) = :v", "3", True),
        ("run_id IN (SELECT run_id FROM runs LIMIT :v)", "0", False),
    ):
        own = parse(f"SELECT run_id FROM runs WHERE {condition}")
        assert run(history.store, own, {"v": value}).rows == ([["a"]] if found else []), condition


WRONG: tuple[tuple[str, dict[str, str], str], ...] = (
    ("goodput", {"dys": "3"}, "the query has no argument 'dys'. Its arguments: days, name."),
    ("goodput", {"days": "many"}, "found days=many, expected a number: length of the period."),
    ("goodput", {"days": "9" * 20}, f"found days={'9' * 20}, expected a number: length of the period."),
    ("config-differences", {}, "the query needs a value for 'a': give a=VALUE."),
)


def test_wrong_arguments_an_unknown_question_and_an_unknown_run(history: History) -> None:
    history.run("a")
    for name, given, expected in WRONG:
        with pytest.raises(BadInput) as error:
            run(history.store, find(name), given)
        assert str(error.value) == expected
    with pytest.raises(BadInput, match=r"saved query 'godput' not found; did you mean goodput\?"):
        find("godput")
    with pytest.raises(UnknownRun):
        history.ask("step-time", run="nobody")


def test_a_question_changes_nothing(history: History) -> None:
    """The guard of free SQL also applies to statements with values; PostgreSQL would accept ``RETURNING`` as a
    result."""
    history.run("a")
    for text in ("DELETE FROM runs WHERE seed = :seed", "DELETE FROM runs WHERE seed = :seed RETURNING run_id"):
        with pytest.raises(BadInput, match="refused"):
            run(history.store, parse(text), {"seed": "0"})
    assert run(history.store, parse("SELECT COUNT(*) FROM runs"), {}).rows == [[1]]
