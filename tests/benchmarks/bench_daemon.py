"""Delay of the history when one process reads many growing run directories: ``python tests/benchmarks/...``.

Writes steps into synthetic runs as fast as real ones make them, while one ingester of the daemon reads them; prints the
percentiles of the time from the writing of a line to the presence of its row, and the memory of the process.

Usage: bench_daemon.py [URL of a database without runs] [--runs 200] [--seconds 60] [--step-s 1.0]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench_ingest import require_empty  # noqa: E402
from history_tools import RunFiles, run_sql  # noqa: E402

from rlhf_core.config.site import load_site  # noqa: E402
from rlhf_core.control.ingester import Ingester  # noqa: E402
from rlhf_core.history.store import HistoryStore  # noqa: E402
from rlhf_core.schemas.attempts import RunState  # noqa: E402

NUM_KEYS = 30
"""Metrics per step, as in a GRPO run of this project."""


def new_run(runs: Path, number: int) -> RunFiles:
    """A new run that is training."""
    run = RunFiles(runs, tail=f"{number:06x}").created()
    run.moved(RunState.PREFLIGHT, 1)
    run.moved(RunState.QUEUED, 2)
    run.planned(1, 3)
    run.moved(RunState.TRAINING, 4)
    return run


def write(folder: Path, num_runs: int, seconds: float, step_s: float) -> None:
    """Write what the nodes would write: a step of every run each ``step_s`` seconds, and the status of its agent every
    2 s. Runs in a separate process."""
    runs = [new_run(folder, number) for number in range(num_runs)]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    step = 0
    while time.monotonic() - began < seconds:
        step += 1
        for number, run in enumerate(runs):
            due = began + (step - 1 + number / num_runs) * step_s
            time.sleep(max(due - time.monotonic(), 0.0))
            values = {f"group/key_{key}": 0.5 for key in range(NUM_KEYS - 3)}
            run.metrics(1, 0, step, step, **values, written=time.time())
            if (step * step_s) % 2 < step_s:
                run.status(1, 0, step)


def measure(store: HistoryStore, ingester: Ingester, seconds: float, pause_s: float) -> tuple[list[float], list[float]]:
    """Lag of every step at the end of the turn that read it, and the duration of each turn."""
    lags: list[float] = []
    turns: list[float] = []
    seen = dict.fromkeys(store.run_ids(), 0)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        turn = time.monotonic()
        ingester.ingest()
        now = time.time()
        turns.append(time.monotonic() - turn)
        question = (
            "SELECT m.run_id, m.step, m.value FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id "
            f"WHERE k.name = 'written' AND m.step > {min(seen.values())} ORDER BY m.step"
        )
        for run_id, step, written in run_sql(store, question).rows:
            if step > seen[run_id]:
                seen[run_id] = step
                lags.append(now - written)
        time.sleep(max(pause_s - (time.monotonic() - turn), 0.0))
    return lags, turns


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default="")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--write", type=Path, default=None)
    options = parser.parse_args()
    if options.write is not None:
        write(options.write, options.runs, options.seconds, options.step_s)
        return
    with tempfile.TemporaryDirectory() as folder:
        url = options.url or f"sqlite:///{folder}/history.db"
        site = replace(load_site({"RLHF_HOME": folder}), database_url=url, runs_dir=Path(folder) / "runs")
        with HistoryStore(url) as store:
            require_empty(store)
        words = ["--write", str(site.runs_dir), "--runs", str(options.runs)]
        words += ["--seconds", str(options.seconds), "--step-s", str(options.step_s)]
        command = [sys.executable, __file__, *words]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        with HistoryStore(url) as store:
            ingester = Ingester(site, store)
            while ingester.ingest():
                pass
            process = psutil.Process(os.getpid())
            before, cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
            writer.stdin.write("go\n")
            writer.stdin.flush()
            lags, turns = measure(store, ingester, options.seconds, site.prefect.ingest_s)
            used = sum(process.cpu_times()[:2]) - cpu
            after = process.memory_info().rss
            writer.wait()
            while ingester.ingest():
                pass
            idle = time.monotonic()
            ingester.ingest()
            idle = time.monotonic() - idle
            backend = store.url.get_backend_name()
        lags.sort()
        at = {name: lags[min(int(len(lags) * share), len(lags) - 1)] for name, share in _SHARES.items()}
        print(f"{backend}: {options.runs} runs, a step of {NUM_KEYS} metrics each {options.step_s:g} s")
        print("lag, s:  " + "  ".join(f"{name} {value:.2f}" for name, value in at.items()) + f"  ({len(lags)} steps)")
        print(f"a turn: median {statistics.median(turns):.2f} s, longest {max(turns):.2f} s; idle {idle * 1e3:.0f} ms")
        print(f"memory: {before / 2**20:.0f} MiB, then {after / 2**20:.0f} MiB; processor {used:.1f} s")


_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

if __name__ == "__main__":
    main()
