"""Ingestion speed: metric rows per second of a catch-up, against the bare driver inserting the same rows, and the
seconds of one poll of a running run.

    python tests/benchmarks/bench_ingest.py [URL]    a database without runs; default: SQLite in a temporary folder
"""

import math
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from history_tools import RunFiles

from rlhf_core.history.store import HistoryStore
from rlhf_core.watchdog.ingest import sync

NUM_STEPS = 4000
NUM_KEYS = 30


def seconds(work: Callable[[], object]) -> float:
    """Duration of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def require_empty(store: HistoryStore) -> None:
    """Refuse a database with runs, to which those of a benchmark would be added."""
    if store.run_ids():
        raise SystemExit(f"found runs in {store.url}; expected a database without any, which the benchmark fills")


def long_run(runs: Path) -> RunFiles:
    """A run with ``NUM_STEPS`` steps of ``NUM_KEYS`` metrics each."""
    run = RunFiles(runs).created()
    for step in range(1, NUM_STEPS + 1):
        run.metrics(1, 0, step, step, **{f"group/key_{key}": math.sin(step * key) for key in range(NUM_KEYS - 2)})
    return run


def bare_sqlite(file: Path, rows: int) -> float:
    """Insert the same rows with ``executemany`` of the driver, into the same table without its references."""
    connection = sqlite3.connect(file)
    connection.executescript(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; "
        "CREATE TABLE metrics (run_id TEXT, key_id INTEGER, step INTEGER, attempt INTEGER, restart INTEGER,"
        " value DOUBLE, non_finite TEXT, time DATETIME,"
        " PRIMARY KEY (run_id, key_id, step, attempt, restart)) WITHOUT ROWID"
    )
    content = [
        ("sort-20260301-120000-aaaaaa", i % NUM_KEYS, i // NUM_KEYS, 1, 0, 0.5, None, "2026-03-01 12:00:00.000000")
        for i in range(rows)
    ]

    def insert() -> None:
        connection.executemany("INSERT OR IGNORE INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?, ?)", content)
        connection.commit()

    return seconds(insert)


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{folder}/history.db"
        rows = NUM_STEPS * NUM_KEYS
        with HistoryStore(url) as store:
            require_empty(store)
            run = long_run(Path(folder) / "runs")
            took = seconds(lambda: sync(run.dir, store))
            updates = []
            for step in range(NUM_STEPS + 1, NUM_STEPS + 51):
                run.metrics(1, 0, step, step, **{f"group/key_{key}": 0.5 for key in range(NUM_KEYS - 2)})
                updates.append(seconds(lambda: sync(run.dir, store)))
        bare = bare_sqlite(Path(folder) / "bare.db", rows)
        print(
            f"{store.url.get_backend_name()}: {rows} metric rows from files in {took:.2f} s = {rows / took:,.0f} rows/s"
        )
        print(f"bare sqlite3 executemany of ready rows: {bare:.2f} s; ingestion takes {took / bare:.1f} times as long")
        print(f"one look with one new step ({NUM_KEYS} rows): median {sorted(updates)[25] * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
