"""Many synthetic runs for ``bench_history.py``: small tables by bulk inserts, metrics by the database itself."""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from history_tools import T0, small_loops
from sqlalchemy import insert, text

from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import metadata
from rlhf_core.schemas.data import DataSpec
from rlhf_core.schemas.model import ModelSpec
from rlhf_core.schemas.run import RunSpec

DENSE_KEYS = (
    *("time/step_s", "time/rollout_s", "time/train_s", "reward/mean"),
    *(f"group/key_{key}" for key in range(16)),
)
"""Metrics of every step."""
KEYS = (*DENSE_KEYS, "eval/greedy")
"""The last one is measured at every tenth step only."""
STEPS = 46
"""Steps of a run; every hundredth run has ten times as many. Together 1,000 rows per run."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the synthetic history."""

    num_runs: int
    days: int = 100
    """Number of days over which the runs are spread."""
    num_incidents: int = 1
    """Incidents of each run that had any, two at most."""
    broken_every: int = 10
    """One of this many runs had incidents."""


QUICK = Scale(200)
SMALL = Scale(1_000)
FULL = Scale(10_000)


def load(store: HistoryStore, scale: Scale) -> None:
    """Fill an empty history. After each incident, a run went back five steps; one in 50 is a trial of the run before
    it; each was probed, evaluated twice and has two checkpoints; the newest 20 are active."""
    spec = RunSpec(
        name="bench",
        model=ModelSpec(config={"model_type": "qwen3"}, tokenizer="char"),
        data=DataSpec(train="train.jsonl"),
        loops=small_loops(STEPS),
    ).model_dump(mode="json")
    rows: dict[str, list[dict[str, Any]]] = {}
    for number in range(scale.num_runs):
        for table, made in _run(number, scale, spec).items():
            rows.setdefault(table, []).extend(made)
    with store.writing() as connection:
        connection.execute(insert(metadata.tables["metric_keys"]), [{"name": name} for name in KEYS])
        for table, made in rows.items():
            for first in range(0, len(made), 5000):
                connection.execute(insert(metadata.tables[table]), made[first : first + 5000])
        for statement in _metrics(connection.dialect.name):
            connection.execute(text(statement))
        connection.execute(
            text(
                "INSERT INTO goodput_cache "
                "(run_id, ingest_stamp, wall_s, queue_s, productive_s, repeated_s, lost_s, ettr) "
                "SELECT n.run_id, n.ingest_stamp, wall_s, queue_s, productive_s, repeated_s, lost_s, ettr "
                "FROM runs n JOIN run_goodput g ON g.run_id = n.run_id WHERE n.state <> 'training'"
            )
        )
    with store.writing() as connection:
        connection.execute(text("ANALYZE"))


def count(store: HistoryStore) -> tuple[int, int]:
    """Number of runs and metric rows."""
    with store.reading() as connection:
        counts = (connection.execute(text(f"SELECT COUNT(*) FROM {name}")).scalar_one() for name in ("runs", "metrics"))
        runs, metrics = counts
        return runs, metrics


def compare_goodput(store: HistoryStore) -> None:
    """Require that the cached goodput of ended runs equals the view's."""
    with store.reading() as connection:
        columns = "run_id, wall_s, queue_s, productive_s, repeated_s, lost_s, ettr"
        kept, true = (
            connection.execute(text(f"SELECT {columns} FROM {name} ORDER BY run_id")).all()
            for name in ("all_goodput", "run_goodput")
        )
    assert kept == true, "goodput that was kept is not what the view says"


def _identity(number: int, scale: Scale) -> tuple[str, datetime]:
    created = T0 + timedelta(days=scale.days * number / scale.num_runs)
    return f"name-{number % 20}-{created:%Y%m%d-%H%M%S}-{number:06x}", created


def _run(number: int, scale: Scale, spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    run_id, created = _identity(number, scale)
    at_work = number >= scale.num_runs - 20
    num_steps = STEPS * (10 if number % 100 == 7 else 1)
    ended = created + timedelta(seconds=60 + 2 * num_steps + 60)
    state = "training" if at_work else "failed" if number % 8 == 5 else "completed"
    run = {
        "run_id": run_id, "name": f"name-{number % 20}", "state": state, "message": "", "owner": f"owner-{number % 10}",
        "seed": number, "algorithm": "grpo", "total_steps": num_steps, "config_source": "bench.toml", "overrides": [],
        "spec": spec, "shape": "", "tags": [f"tag-{number % 50}"], "package_version": "0",
        "trial_of": _identity(number - 1, scale)[0] if number % 50 == 49 else "",
        "code_revision": "", "run_dir": f"/gone/{run_id}", "created_at": created, "started_at": created,
        "ended_at": None if at_work else ended, "progress_at": ended, "journal_token": 1, "ingest_stamp": number + 1,
    }  # fmt: skip
    attempt = {
        "run_id": run_id, "number": 1, "state": state, "message": "", "scheduler": "slurm", "scheduler_job_id": "1",
        "num_nodes": 4, "resume_checkpoint": "", "resumed_from_step": 0, "planned_at": created,
        "submitted_at": created, "started_at": created + timedelta(seconds=30),
    }  # fmt: skip
    restarts = [
        {"run_id": run_id, "attempt": 1, "restart": 0, "started_at": created, "first_step": 1, "last_step": num_steps,
         "last_valid_step": num_steps}
    ]  # fmt: skip
    made: dict[str, list[dict[str, Any]]] = {
        "runs": [run],
        "run_tags": [{"run_id": run_id, "tag": f"tag-{number % 50}"}],
        "attempts": [attempt],
        "restarts": restarts,
        "stages": [
            {"run_id": run_id, "stage_index": index, "name": name, "state": "completed", "attempt": 1,
             "started_at": created, "seconds": 1.0, "message": ""}
            for index, name in enumerate(("preflight", "allocate", "train", "evaluate"))
        ],
        "events": [
            {"run_id": run_id, "source": "control.jsonl", "position": 100 * index, "time": created, "kind": kind,
             "node": "", "state": moved, "message": "", "data": {}}
            for index, (kind, moved) in enumerate(
                [("controller_started", None), ("run_moved", "preflight"), ("run_moved", "queued"),
                 ("run_moved", "training"), *(() if at_work else (("run_moved", state),))]
            )
        ],
        "attempt_nodes": [
            {"run_id": run_id, "attempt": 1, "node": f"node{(number + index) % 64}", "node_index": index, "restart": 0,
             "role": "trainer", "sequence": 1, "ranks": [], "telemetry": {"cpu_percent": 1.0}, "longest_gaps_s": {}}
            for index in range(4)
        ],
        "latest_metrics": [
            {"run_id": run_id, "key_id": key, "step": num_steps, "attempt": 1, "restart": 0, "value": math.sin(key),
             "time": ended}
            for key in range(1, len(KEYS) + 1)
        ],
        "node_speeds": [
            {"run_id": run_id, "attempt": 1, "node": f"node{(number + index) % 64}", "device": "gpu",
             "matmul_tflops": 600.0 + index, "core_share": 1.0, "bandwidth_gb_s": 40.0, "latency_ms": 0.1,
             "measured_at": created}
            for index in range(4)
        ],
        "checkpoints": [
            {"run_id": run_id, "step": step, "path": f"checkpoints/step-{step:06d}", "loop": "grpo",
             "loop_finished": step == num_steps, "num_ranks": 4, "spec_hash": "", "num_files": 3, "bytes": 1000,
             "completed_at": ended, "removed_at": None if step == num_steps else ended}
            for step in (num_steps // 10 * 5, num_steps)
        ],
        "evaluations": [
            {"run_id": run_id, "when_made": when, "name": "greedy", "metric": "exact_match", "value": value,
             "ci_low": value - 0.03, "ci_high": value + 0.03, "num_prompts": 512, "num_samples": 512,
             "checkpoint_step": step, "seconds": 1.0, "made_at": ended}
            for when, step, value in (("before", 0, 0.3), ("after", num_steps, 0.4 + math.sin(number) / 3))
        ],
    }  # fmt: skip
    for incident in range(scale.num_incidents if number % scale.broken_every == 0 else 0):
        step = num_steps * (incident + 1) // (scale.num_incidents + 1)
        seen_at = created + timedelta(seconds=60 + 2 * step + 30 * incident + 5)
        again = {**restarts[-1], "restart": incident + 1, "first_step": step - 4}
        restarts[-1] |= {"last_step": step, "last_valid_step": step - 5}
        restarts.append(again)
        about = {"run_id": run_id, "attempt": 1}
        made.setdefault("incidents", []).append(
            {**about, "incident_id": f"1.{incident}", "restart": incident, "found_by": "agent",
             "failure_kind": "hang" if number % 20 else "worker_killed", "phase": "train", "step": step,
             "suspect_ranks": [1], "suspect_nodes": ["node1"], "detected_after_s": 5.0,
             "seen_at": seen_at, "fingerprint": f"fault-{number % 7}", "evidence_dir": "",
             "message": "it hung", "collective": ""}
        )  # fmt: skip
        made.setdefault("decisions", []).append(
            {**about, "decision_id": f"1.{incident}", "restart": incident, "action": "restart_in_place",
             "reason": "", "decided_by": "agent", "decided_at": seen_at, "delay_s": 0.0, "excluded_nodes": [],
             "config_diff": {"train": {"micro_batch_size": 4}} if number % 3 == 0 else {}, "resume_checkpoint": ""}
        )  # fmt: skip
        made.setdefault("node_strikes", []).append(
            {**about, "incident_id": f"1.{incident}", "node": f"node{number % 64}", "failure_kind": "hang",
             "struck_at": seen_at}
        )  # fmt: skip
    return made


def _metrics(dialect: str) -> list[str]:
    """Insert rows for every step of every restart, two seconds each, within the database and in the order of the
    table."""
    if dialect == "sqlite":
        series = "WITH RECURSIVE steps(step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM steps WHERE step < 460) "
        steps, value = "steps s", "(abs(random()) % 1000000) / 1e6"
        time = "strftime('%Y-%m-%d %H:%M:%f000', n.created_at, printf('+%d seconds', 60 + 2 * s.step + 30 * r.restart))"
    else:
        series, steps, value = "", "generate_series(1, 460) AS s(step)", "random()"
        time = "n.created_at + (60 + 2 * s.step + 30 * r.restart) * INTERVAL '1 second'"
    made = f"""
{series}SELECT n.run_id, k.key_id, s.step, r.attempt, r.restart,
       CASE WHEN k.name = 'time/step_s' THEN 2.0 ELSE {value} END, NULL, {time}
FROM runs n CROSS JOIN metric_keys k CROSS JOIN {steps}
     JOIN restarts r ON r.run_id = n.run_id AND s.step BETWEEN r.first_step AND r.last_step
WHERE k.name <> 'eval/greedy' OR s.step % 10 = 0
ORDER BY n.run_id, k.key_id, s.step, r.restart"""
    columns = "run_id, key_id, step, attempt, restart, value, non_finite, time"
    return [f"INSERT INTO metrics ({columns}) {made}"]
