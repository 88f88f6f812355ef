"""The history at scale: how fast files become rows (against MLflow's store on the same kind of database), how much
memory that takes, and how long questions take on many runs.

    python tests/benchmarks/bench_history.py [--full] [--database sqlite|postgresql] [--mlflow PYTHON]

Without ``--full``: 1,000 runs and 1 M metric rows; with it 10,000 and 10 M. ``--mlflow`` names the interpreter of an
environment with MLflow (``make bench-history`` makes one). PostgreSQL is a throw-away server, without fsync, for both.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import history_load
from bench_ingest import NUM_KEYS, long_run, seconds
from history_tools import T0, RunFiles, new_sqlite, postgres
from sqlalchemy import select

from rlhf_core.history import queries
from rlhf_core.history.batch import IngestBatch
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.write import RUNS
from rlhf_core.run_dir import RunDir
from rlhf_core.watchdog.ingest import sync

NUM_STEPS = 4000
QUESTIONS = 200
"""Of each kind, on runs taken at random."""

LIMIT_MS = 100.0
"""What 95 of 100 questions are to take at most."""


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--database", choices=("sqlite", "postgresql"))
    parser.add_argument("--mlflow", help="interpreter of an environment with MLflow")
    parser.add_argument("--swallow", nargs=2, metavar=("URL", "RUN_DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.swallow:
        swallow(*options.swallow)
        return
    scale = history_load.FULL if options.full else history_load.SMALL
    for kind in (options.database,) if options.database else ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"== {kind}, {'the full size' if options.full else 'the small size (--full: ten times as much)'}")
            bench_ingest(kind, Path(folder), options.mlflow)
            bench_memory(kind, Path(folder), 400 if options.full else 40)
            bench_questions(kind, Path(folder), scale)


@contextmanager
def new_history(kind: str, folder: Path) -> Iterator[HistoryStore]:
    """An empty history."""
    if kind == "sqlite":
        made = Path(tempfile.mkdtemp(dir=folder))
        url = new_sqlite(made)
    else:
        url = postgres().migrated_database()
    with HistoryStore(url) as store:
        yield store


# ---------------------------------------------------------------------------------------------------------------------
# Files into rows


def bench_ingest(kind: str, folder: Path, mlflow: str | None) -> None:
    """Rows per second of a catch-up, and the same rows by MLflow."""
    run = long_run(Path(tempfile.mkdtemp(dir=folder)))
    rows = NUM_STEPS * NUM_KEYS
    took = []
    for _ in range(3):
        with new_history(kind, folder) as store:
            took.append(seconds(lambda store=store: sync(run.dir, store)))  # type: ignore[misc]
    ours = rows / sorted(took)[1]
    print(f"ingest: {rows:,} metric rows from files, {ours:,.0f} rows/s (the middle of three)")
    if mlflow is None:
        print("MLflow: not compared (--mlflow PYTHON, or make bench-history)")
        return
    url = f"sqlite:///{folder}/mlflow.db" if kind == "sqlite" else postgres().empty_database()
    peer = Path(__file__).with_name("mlflow_ingest.py")
    command = [mlflow, str(peer), url.replace("postgresql:", "postgresql+psycopg:"), str(NUM_STEPS), str(NUM_KEYS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    theirs = said["rows"] / said["seconds"]
    print(f"MLflow {said['version']}: {said['rows']:,} rows, log_batch of 1,000: {theirs:,.0f} rows/s")
    print(f"ratio: {ours / theirs:.1f}")


def bench_memory(kind: str, folder: Path, megabytes: int) -> None:
    """Peak memory of a process that ingests a small and a large file, and whether it slows down on the way."""
    for size in (4, megabytes):
        run = metrics_file(Path(tempfile.mkdtemp(dir=folder)), size)
        with new_history(kind, folder) as store:
            url = store.url.render_as_string(hide_password=False)
        command = [sys.executable, __file__, "--swallow", url, str(run)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"memory: a file of {size} MB: {done.stdout.strip()}")


def metrics_file(runs: Path, megabytes: int) -> Path:
    """A run whose metrics file has that size."""
    run = RunFiles(runs)
    run.created()
    run.metrics(1, 0, 1, 1.0)
    path = run.dir.attempt(1).restart(0).metrics
    line = json.loads(path.read_text())
    with path.open("a") as file:
        step = 1
        while file.tell() < megabytes << 20:
            step += 1
            line["step"] = step
            line["metrics"] = {f"group/key_{key}": step / (key + 1) for key in range(NUM_KEYS)}
            file.write(json.dumps(line) + "\n")
    return run.dir.root


def swallow(url: str, run_dir: str) -> None:
    """Ingest a run from nothing; say what it took."""
    took: list[float] = []

    class Timed(HistoryStore):
        def apply(self, run_id: str, batch: IngestBatch) -> bool:
            start = time.perf_counter()
            applied = super().apply(run_id, batch)
            took.append(time.perf_counter() - start)
            return applied

    with Timed(url) as store:
        whole = seconds(lambda: sync(RunDir(Path(run_dir)), store))
    full = took[:-1] or took
    quarter = max(1, len(full) // 4)
    first, last = (sum(part) / quarter for part in (full[:quarter], full[-quarter:]))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"peak {peak_mb:.0f} MB, {len(took)} batches in {whole:.1f} s, a batch of the first quarter {first:.3f} s, of "
        f"the last {last:.3f} s"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Questions


def bench_questions(kind: str, folder: Path, scale: history_load.Scale) -> None:
    """Times of the questions people ask, each over a connection of its own."""
    with new_history(kind, folder) as store:
        loading = seconds(lambda: history_load.load(store, scale))
        runs, rows = history_load.count(store)
        print(f"questions: {runs:,} runs, {rows:,} metric rows, made in {loading:.0f} s")
        url = store.url.render_as_string(hide_password=False)
        ids = store.run_ids()
        history_load.compare_goodput(store)
    chance = random.Random(7)
    since = T0 + timedelta(days=30)

    def compare(store: HistoryStore) -> None:
        pair = chance.sample(ids, 2)
        for run_id in pair:
            queries.curve(store, run_id)
        with store.reading() as connection:
            connection.execute(select(RUNS.c.spec).where(RUNS.c.run_id.in_(pair))).all()

    questions: dict[str, Callable[[HistoryStore], object]] = {
        "list": lambda store: queries.list_runs(store),
        "list, by state": lambda store: queries.list_runs(store, state="failed"),
        "list, by name": lambda store: queries.list_runs(store, name=f"name-{chance.randrange(20)}"),
        "list, by owner": lambda store: queries.list_runs(store, owner=f"owner-{chance.randrange(10)}"),
        "list, by tag": lambda store: queries.list_runs(store, tag=f"tag-{chance.randrange(50)}"),
        "list, by all four": lambda store: queries.list_runs(
            store, state="completed", name="name-3", owner="owner-3", tag="tag-3"
        ),
        "show": lambda store: queries.show_run(store, chance.choice(ids)),
        "curve, one metric": lambda store: queries.curve(store, chance.choice(ids), ["group/key_3"]),
        "curve, all metrics": lambda store: queries.curve(store, chance.choice(ids)),
        "compare two runs": compare,
        "goodput of a run": lambda store: queries.run_sql(
            store, f"SELECT * FROM run_goodput WHERE run_id = '{chance.choice(ids)}'"
        ),
        "goodput of all runs of a month": lambda store: queries.goodput_of_runs(store, since, since + timedelta(30)),
        "where the time of a run's steps went": lambda store: queries.run_sql(
            store, f"SELECT * FROM run_step_time WHERE run_id = '{chance.choice(ids)}'"
        ),
        "recoveries of a run": lambda store: queries.run_sql(
            store, f"SELECT * FROM run_recoveries WHERE run_id = '{chance.choice(ids)}'"
        ),
    }
    for name, ask in questions.items():
        took = sorted(asked(url, ask) for _ in range(QUESTIONS))
        p95 = took[int(0.95 * QUESTIONS)]
        verdict = "" if p95 <= LIMIT_MS else f"   MORE THAN {LIMIT_MS:.0f} ms"
        print(f"  {name:38} p50 {took[QUESTIONS // 2]:6.1f} ms   p95 {p95:6.1f} ms{verdict}")


def asked(url: str, ask: Callable[[HistoryStore], object]) -> float:
    """Milliseconds of opening the history and asking it once."""

    def open_and_ask() -> None:
        with HistoryStore(url) as store:
            ask(store)

    return seconds(open_and_ask) * 1e3


if __name__ == "__main__":
    main()
