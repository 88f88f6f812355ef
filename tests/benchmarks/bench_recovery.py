"""How long is training away after `kill -9` of a rank? Compared with the cold start of the same run.

    python tests/benchmarks/bench_recovery.py [--repeats 3]

Runs a shortened quickstart through the command line, kills one trainer rank in the middle, and prints the seconds from
the kill to the next step that was not there before, those from the agent's start to the first step, and the ratio of
recovery to its target: 1.5 x cold start + 5 s. With warm spares and without, one after the other, in one run.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import psutil

from rlhf_core.run_dir import RestartDir, RunDir, read_models
from rlhf_core.schemas.reports import AgentEvent, MetricsLine

SHORT = (
    "loops.main.num_steps=40",
    "checkpoint.every_num_steps=10",
    "evaluate.num_prompts=64",
    "evaluate.every_num_steps=0",
)
KILL_AT_STEP = 45


def first_line_after(restart: RestartDir, step: int) -> datetime | None:
    """When the first step after ``step`` was written in a restart."""
    return next((line.time for line in read_models(restart.metrics, MetricsLine) if line.step > step), None)


def measure(home: Path, *, warm: bool) -> tuple[float, float]:
    """One disturbed run: seconds of its cold start, and of its recovery."""
    settings = (*SHORT, f"supervise.warm_workers={str(warm).lower()}")
    overrides = [word for override in settings for word in ("--set", override)]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_core.cli.main", "run", "quickstart", "--no-prefect", *overrides],
        env={**os.environ, "RLHF_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    restart = None
    while restart is None or first_line_after(restart, KILL_AT_STEP - 1) is None:
        time.sleep(0.02)
        runs = list((home / "runs").iterdir()) if (home / "runs").is_dir() else []
        restart = RunDir(runs[0]).attempt(1).restart(0) if runs else None
    children = psutil.Process(process.pid).children(recursive=True)
    victim = next(child for child in children if "trainer" in child.cmdline())
    killed_at = time.time()
    victim.send_signal(signal.SIGKILL)
    if process.wait() != 0:
        raise SystemExit("the run did not survive the kill")

    reached = max(line.step for line in read_models(restart.metrics, MetricsLine))
    back_at = first_line_after(RunDir(restart.root.parents[3]).attempt(1).restart(1), reached)
    (events_file,) = restart.root.glob("events-*.jsonl")
    started_at = read_models(events_file, AgentEvent)[0].time
    first_step_at = first_line_after(restart, 0)
    assert back_at is not None
    assert first_step_at is not None
    return (first_step_at - started_at).total_seconds(), back_at.timestamp() - killed_at


def main() -> None:
    """Repeat, print each and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    print(f"{'':>8} {'cold start':>12} {'recovery':>12} {'of target':>12}")
    for number in range(parser.parse_args().repeats):
        for warm, figures in found.items():
            with tempfile.TemporaryDirectory() as folder:
                figures.append(measure(Path(folder) / str(number), warm=warm))
            show(warm, *figures[-1])
    medians = {
        warm: tuple(statistics.median(values) for values in zip(*one, strict=True)) for warm, one in found.items()
    }
    for warm, (cold_s, back_s) in medians.items():
        show(warm, cold_s, back_s, "  median")
    print(f"recovery with spares / without: {medians[True][1] / medians[False][1]:.2f}")


def show(warm: bool, cold_s: float, back_s: float, label: str = "") -> None:
    """One line of the table."""
    kind = "warm" if warm else "cold"
    print(f"{kind:>8} {cold_s:10.1f} s {back_s:10.1f} s {back_s / (1.5 * cold_s + 5):12.2f}{label}", flush=True)


if __name__ == "__main__":
    main()
