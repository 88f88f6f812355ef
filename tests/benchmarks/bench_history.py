"""The history at scale: speed of turning files into rows (against MLflow's store on the same kind of database), memory
used for it, bytes of a row, duration of queries over many runs, and delay of the history when many runs train at once.

    make bench-history                          all of it, MLflow in an environment of its own; some minutes
    make bench-history HISTORY=--full           10,000 runs and 10 M metric rows; a quarter of an hour, 4 GB of disk
    make bench-history HISTORY=--quick          smoke test: 200 runs, short; a minute or two
    make bench-history HISTORY="--full --into FILE"     finished parts go into FILE; a restart continues from there

    python tests/benchmarks/bench_history.py [--quick | --full] [--database sqlite|postgresql]
        [--part ingest|memory|bytes|questions|incidents|daemon ...] [--into FILE] [--mlflow PYTHON]

Without ``--mlflow``, the interpreter of an environment with MLflow, nothing is compared. PostgreSQL is a throw-away
server, without fsync, for both. Query times cover opening the history and asking once, in a process that has asked
before; the files of the database are in the page cache of the machine.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import history_load
import sqlalchemy
from bench_ingest import NUM_KEYS, long_run, seconds
from history_tools import T0, RunFiles, new_sqlite, postgres, run_sql

from rlhf_core.history import queries, saved_queries
from rlhf_core.history.batch import IngestBatch
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.compare import compare
from rlhf_core.run_dir.run import RunDir
from rlhf_core.watchdog.ingest import sync

NUM_STEPS = 4000
REPEATS = 3
"""Repetitions of every ingestion; the median counts."""

NUM_TELEMETRY_LINES = 2000
NODE_FIGURES = [f"node_figure_name_{number}" for number in range(13)]
GPU_FIGURES = [f"figure_name_{number}" for number in range(9)]
"""Names as long as those that an agent stores (docs/telemetry.md)."""

YEAR_S = 365 * 86_400

LIMIT_MS = 100.0
"""Limit for 95 of 100 queries about a run or a list."""

SAVED_LIMIT_MS = 1000.0
"""Limit for 95 of 100 saved queries: they cover all runs of a month or a quarter."""

INCIDENTS_LIMIT_S = 2.0
"""Limit for a saved query about 20,000 incidents."""

Lines = Iterator[str]


@dataclass(frozen=True)
class Size:
    """Sizes of all parts."""

    name: str
    scale: history_load.Scale
    num_questions: int
    """Queries of each kind, on runs chosen at random."""
    num_saved: int
    """Repetitions of each saved query."""
    large_mb: int
    """Size of the larger of two files, whose ingestion must take no more memory."""
    num_runs: int
    """Number of runs that train at once while one process reads them."""
    seconds: float
    """Duration of their training."""


QUICK = Size("quick", history_load.QUICK, 20, 5, 8, 20, 8.0)
SMALL = Size("small", history_load.SMALL, 200, 20, 40, 200, 30.0)
FULL = Size("full", history_load.FULL, 200, 20, 400, 200, 60.0)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const=QUICK)
    sizes.add_argument("--full", dest="size", action="store_const", const=FULL)
    parser.add_argument("--database", choices=("sqlite", "postgresql"))
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be given again")
    parser.add_argument("--into", type=Path, help="keep what is done in this file, and do not do it again")
    parser.add_argument("--mlflow", help="interpreter of an environment with MLflow")
    parser.add_argument("--swallow", nargs=2, metavar=("URL", "RUN_DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.swallow:
        swallow(*options.swallow)
        return
    size = options.size or SMALL
    for kind in (options.database,) if options.database else ("sqlite", "postgresql"):
        print(f"== {kind}, {size.name} size ({size.scale.num_runs:,} runs)", flush=True)
        for part in options.part or PARTS:
            with tempfile.TemporaryDirectory() as folder:
                lines = PARTS[part](kind, Path(folder), size, options.mlflow)
                name = f"{kind}, {size.name}, {part}{' with MLflow' if options.mlflow and part == 'ingest' else ''}"
                for line in lines if options.into is None else kept(options.into, name, lines):
                    print(line, flush=True)


def kept(file: Path, name: str, lines: Lines) -> Lines:
    """Lines of a part: those that ``file`` has, otherwise newly measured ones, which are written to it once all are
    there."""
    done = json.loads(file.read_text()) if file.exists() else {}
    if name in done:
        yield from done[name]
        return
    made = []
    for line in lines:
        made.append(line)
        yield line
    unfinished = file.with_name(f"{file.name}.new")
    unfinished.write_text(json.dumps({**done, name: made}, indent=1))
    unfinished.replace(file)


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
# From files to rows


def bench_ingest(kind: str, folder: Path, size: Size, mlflow: str | None) -> Lines:
    """Rows per second of a catch-up, and of the same rows by MLflow."""
    run = long_run(folder / "runs")
    rows = NUM_STEPS * NUM_KEYS
    took = []
    for _ in range(REPEATS):
        with new_history(kind, folder) as store:
            took.append(seconds(lambda store=store: sync(run.dir, store)))  # type: ignore[misc]
    ours = rows / median(took)
    yield f"ingest: {rows:,} metric rows from files, {ours:,.0f} rows/s (the middle of {REPEATS})"
    if mlflow is None:
        yield "MLflow: not compared (--mlflow PYTHON, or make bench-history)"
        return
    reports = [ingest_by_mlflow(kind, folder, mlflow, number) for number in range(REPEATS)]
    theirs = median(one["rows"] / one["seconds"] for one in reports)
    yield (
        f"MLflow {reports[0]['version']}: {reports[0]['rows']:,} rows, log_batch of 1,000: {theirs:,.0f} rows/s "
        f"(the middle of {REPEATS})"
    )
    yield f"ratio: {ours / theirs:.1f}"


def ingest_by_mlflow(kind: str, folder: Path, mlflow: str, number: int) -> dict[str, Any]:
    """MLflow's report of writing the same rows into an empty database."""
    url = f"sqlite:///{folder}/mlflow-{number}.db" if kind == "sqlite" else postgres().empty_database()
    peer = Path(__file__).with_name("mlflow_ingest.py")
    arguments = [mlflow, str(peer), url.replace("postgresql:", "postgresql+psycopg:"), str(NUM_STEPS), str(NUM_KEYS)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"MLflow's half of the comparison failed:\n{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def bench_memory(kind: str, folder: Path, size: Size, mlflow: str | None) -> Lines:
    """Peak memory of a process that ingests a small and a large file, and whether it slows down over time."""
    for megabytes in (4, size.large_mb):
        run = metrics_file(folder / f"runs-{megabytes}", megabytes)
        with new_history(kind, folder) as store:
            url = store.url.render_as_string(hide_password=False)
        arguments = [sys.executable, __file__, "--swallow", url, str(run)]
        done = subprocess.run(arguments, check=True, capture_output=True, text=True)
        yield f"memory: a file of {megabytes} MB: {done.stdout.strip()}"


def metrics_file(runs: Path, megabytes: int) -> Path:
    """A run with a metrics file of this size."""
    run = RunFiles(runs).created()
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
    """Ingest a run from the beginning; print the measurements."""
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
    print(
        f"peak {peak_mb():.0f} MB, {len(took)} batches in {whole:.1f} s, a batch of the first quarter {first:.3f} s, "
        f"of the last {last:.3f} s"
    )


def peak_mb() -> float:
    """Peak memory of this process. Not ``ru_maxrss``, which starts with that of the parent process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


# ---------------------------------------------------------------------------------------------------------------------
# Bytes of a row


def bench_bytes(kind: str, folder: Path, size: Size, mlflow: str | None) -> Lines:
    """Bytes of a row of metrics and of telemetry with their indexes, and what they come to in a year."""
    metric = bytes_per_row(kind, folder, long_run(folder / "metrics"), NUM_STEPS * NUM_KEYS)
    yield f"bytes: {metric:.0f} of a metric row"
    for step_s in (60, 10):
        rows = YEAR_S / step_s * NUM_KEYS
        yield (
            f"  a year of one run, {NUM_KEYS} metrics every {step_s} s: {rows / 1e6:.0f} M rows, "
            f"{rows * metric / 1e9:.1f} GB"
        )
    for num_gpus in (0, 8):
        run = telemetry_of(folder / f"telemetry-{num_gpus}", num_gpus)
        line = bytes_per_row(kind, folder, run, NUM_TELEMETRY_LINES)
        yield (
            f"  a year of one node, {num_gpus} GPUs, a line every minute: {YEAR_S / 60 / 1e6:.1f} M rows of "
            f"{line:,.0f} bytes, {YEAR_S / 60 * line / 1e9:.1f} GB"
        )


def bytes_per_row(kind: str, folder: Path, run: RunFiles, num_rows: int) -> float:
    """Growth of a new history by a run, per row."""
    with new_history(kind, folder) as store:
        before = stored_bytes(store)
        sync(run.dir, store)
        return (stored_bytes(store) - before) / num_rows


def stored_bytes(store: HistoryStore) -> int:
    """Size of a database."""
    is_sqlite = store.url.get_backend_name() == "sqlite"
    of_pages = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    query = of_pages if is_sqlite else "SELECT pg_database_size(current_database())"
    with store.reading() as connection:
        return int(connection.execute(sqlalchemy.text(query)).scalar_one())


def telemetry_of(runs: Path, num_gpus: int) -> RunFiles:
    """A run with telemetry of one node, as many figures as an agent stores."""
    run, chance = RunFiles(runs).created(), random.Random(7)
    names = [*NODE_FIGURES, *(f"gpu{gpu}_{figure}" for gpu in range(num_gpus) for figure in GPU_FIGURES)]
    for line in range(NUM_TELEMETRY_LINES):
        figures = {name: round(chance.uniform(0, 100), 2) for name in names}
        run.telemetry(1, 0, 60.0 * line, node="n1", **figures)
    return run


# ---------------------------------------------------------------------------------------------------------------------
# Queries


def bench_questions(kind: str, folder: Path, size: Size, mlflow: str | None) -> Lines:
    """Times of typical queries, each over a connection of its own."""
    with new_history(kind, folder) as store:
        loading = seconds(lambda: history_load.load(store, size.scale))
        runs, rows = history_load.count(store)
        yield f"questions: {runs:,} runs, {rows:,} metric rows, made in {loading:.0f} s"
        url = store.url.render_as_string(hide_password=False)
        ids = store.run_ids()
        history_load.compare_goodput(store)
    chance = random.Random(7)
    for name, ask in what_people_ask(ids, chance).items():
        yield timed(url, name, ask, size.num_questions, LIMIT_MS)
    yield "saved questions:"
    for question in saved_queries.saved():
        yield timed(url, question.name, saved_question(question, ids, chance), size.num_saved, SAVED_LIMIT_MS)


def what_people_ask(ids: Sequence[str], chance: random.Random) -> dict[str, Callable[[HistoryStore], object]]:
    """Queries about one run or a list, keyed by their topic."""
    month = (T0 + timedelta(days=30), T0 + timedelta(days=60))
    goodput = "SELECT * FROM all_goodput WHERE created_at >= '{}' AND created_at < '{}'".format(*month)

    def about_a_run(view: str) -> Callable[[HistoryStore], object]:
        return lambda store: run_sql(store, f"SELECT * FROM {view} WHERE run_id = '{chance.choice(ids)}'")

    return {
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
        "compare two runs": lambda store: compare(store, chance.sample(ids, 2)),
        "goodput of a run": about_a_run("run_goodput"),
        "goodput of all runs of a month": lambda store: run_sql(store, goodput),
        "where the time of a run's steps went": about_a_run("run_step_time"),
        "recoveries of a run": about_a_run("run_recoveries"),
    }


def saved_question(
    question: saved_queries.SavedQuery, ids: Sequence[str], chance: random.Random
) -> Callable[[HistoryStore], object]:
    """A saved query with its defaults, as if today were the day of the newest run; runs are chosen at random."""
    age_days = (datetime.now(UTC) - T0).days - history_load.FULL.days

    def value(argument: saved_queries.Argument) -> str | None:
        if argument.type == "run":
            return chance.choice(ids)
        if argument.name == "days":
            return str(int(argument.default or 0) + age_days)
        return argument.default

    def ask(store: HistoryStore) -> object:
        given = {argument.name: text for argument in question.arguments if (text := value(argument)) is not None}
        return saved_queries.run(store, question, given)

    return ask


def timed(url: str, name: str, ask: Callable[[HistoryStore], object], number: int, limit_ms: float) -> str:
    """A line about this many answers, each over a connection of its own, after an answer that does not count."""
    asked(url, ask)
    took = sorted(asked(url, ask) for _ in range(number))
    p95 = took[int(0.95 * number)]
    verdict = "" if p95 <= limit_ms else f"   MORE THAN {limit_ms:.0f} ms"
    return f"  {name:38} p50 {median(took):6.1f} ms   p95 {p95:6.1f} ms{verdict}"


def asked(url: str, ask: Callable[[HistoryStore], object]) -> float:
    """Milliseconds of opening the history and running the query once."""

    def open_and_ask() -> None:
        with HistoryStore(url) as store:
            ask(store)

    return seconds(open_and_ask) * 1e3


# ---------------------------------------------------------------------------------------------------------------------
# Many incidents


def bench_incidents(kind: str, folder: Path, size: Size, mlflow: str | None) -> Lines:
    """Times of the saved queries about the cost of incidents, two of every run."""
    scale = history_load.Scale(size.scale.num_runs, days=28, num_incidents=2, broken_every=1)
    days = {"days": str((datetime.now(UTC) - T0).days + 1)}
    yield f"incidents: {scale.num_runs:,} runs, {2 * scale.num_runs:,} incidents in the period"
    with new_history(kind, folder) as store:
        history_load.load(store, scale)
        for name in ("recovery-times", "time-lost", "nodes-by-cost"):
            query = saved_queries.find(name)
            took = seconds(lambda query=query: saved_queries.run(store, query, days))  # type: ignore[misc]
            verdict = "" if took <= INCIDENTS_LIMIT_S else f"   MORE THAN {INCIDENTS_LIMIT_S:.0f} s"
            yield f"  {name:38} {took:6.2f} s{verdict}"


# ---------------------------------------------------------------------------------------------------------------------
# Many runs at once


def bench_daemon(kind: str, folder: Path, size: Size, mlflow: str | None) -> Lines:
    """Delay of one daemon (``bench_daemon.py``)."""
    url = new_sqlite(folder) if kind == "sqlite" else postgres().migrated_database()
    program = Path(__file__).with_name("bench_daemon.py")
    arguments = [sys.executable, str(program), url, "--runs", str(size.num_runs), "--seconds", str(size.seconds)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    yield from (f"daemon: {line}" for line in done.stdout.splitlines())


PARTS: Mapping[str, Callable[[str, Path, Size, str | None], Lines]] = {
    "ingest": bench_ingest,
    "memory": bench_memory,
    "bytes": bench_bytes,
    "questions": bench_questions,
    "incidents": bench_incidents,
    "daemon": bench_daemon,
}
"""Parts of the benchmark: database, a folder for files, sizes, and the interpreter with MLflow -> lines."""


if __name__ == "__main__":
    main()
