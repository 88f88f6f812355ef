"""Interruption of training after `kill -9` of a rank, compared with the cold start of the same run.

    python tests/benchmarks/bench_recovery.py [--repeats 3] [--nodes 4] [--kill-at 200]

Runs a shortened quickstart through the command line, on this machine or on the nodes of a throw-away Slurm, kills one
trainer rank in the middle, and prints the seconds from the kill to the next new step, those from the agent's start to
the first step, and the ratio of recovery to its target: 1.5 x cold start + 5 s. It measures workers that are forked and
workers that are not, one after the other, in one run.
"""

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

import psutil
from bench_quickstart import running

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import AgentEvent, MetricsLine

sys.path.insert(0, str(Path(__file__).parents[1]))

from slurm_cluster import WHY_NOT, Cluster, missing_programs

SHORT = ("checkpoint.every_num_steps=10", "evaluate.num_prompts=64", "evaluate.every_num_steps=0")


def first_line_after(restart: RestartDir, step: int) -> datetime | None:
    """Time at which the first step after ``step`` was written in a restart."""
    return next((line.time for line in read_models(restart.metrics, MetricsLine) if line.step > step), None)


@contextlib.contextmanager
def nodes(number: int, folder: Path) -> Iterator[Mapping[str, str]]:
    """Provide the nodes for the block; yields the environment in which runs find them."""
    if number == 1:
        yield {}
        return
    if missing_programs():
        raise SystemExit(WHY_NOT)
    with Cluster(folder, nodes=number).running() as cluster:
        yield {**cluster.environment, "RLHF_SCHEDULER": "slurm"}


def a_trainer(home: Path) -> psutil.Process:
    """A trainer rank of the only run in a home folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "trainer" in words and any(word.startswith(str(home)) for word in words):
                return process
    raise SystemExit("no rank of the run is at work")


def measure(
    home: Path, preset: str, environment: Mapping[str, str], kill_at: int, *, forked: bool
) -> tuple[float, float]:
    """Disturb one run; return the seconds of its cold start and of its recovery."""
    settings = (*SHORT, f"loops.main.num_steps={kill_at}", f"supervise.warm_workers={str(forked).lower()}")
    overrides = [word for override in settings for word in ("--set", override)]
    restart, killed_at = None, 0.0
    with running(home, environment, preset, *overrides) as process:
        while not killed_at and process.poll() is None:
            time.sleep(0.02)
            runs = list((home / "runs").iterdir()) if (home / "runs").is_dir() else []
            restart = RunDir(runs[0]).attempt(1).restart(0) if runs else None
            if restart is not None and first_line_after(restart, kill_at - 1) is not None:
                victim = a_trainer(home)
                killed_at = time.time()
                victim.send_signal(signal.SIGKILL)
    if restart is None or not killed_at:
        raise SystemExit(f"the run ended before step {kill_at}")

    reached = max(line.step for line in read_models(restart.metrics, MetricsLine))
    back_at = first_line_after(RunDir(restart.root.parents[3]).attempt(1).restart(1), reached)
    started_at = min(read_models(path, AgentEvent)[0].time for path in restart.root.glob("events-*.jsonl"))
    first_step_at = first_line_after(restart, 0)
    assert back_at is not None
    assert first_step_at is not None
    return (first_step_at - started_at).total_seconds(), back_at.timestamp() - killed_at


def main() -> None:
    """Repeat the measurement; print each result and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--kill-at", type=int, default=45, help="step at which a rank is killed")
    chosen = parser.parse_args()
    preset = "quickstart" if chosen.nodes == 1 else "slurm-quickstart"
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    print(f"{'':>8} {'cold start':>12} {'recovery':>12} {'of target':>12}")
    with tempfile.TemporaryDirectory() as folder, nodes(chosen.nodes, Path(folder) / "slurm") as environment:
        for number in range(chosen.repeats):
            for forked, figures in found.items():
                home = Path(folder) / f"{number}-{'forked' if forked else 'new'}"
                figures.append(measure(home, preset, environment, chosen.kill_at, forked=forked))
                show(forked, *figures[-1])
    medians = {
        forked: tuple(statistics.median(values) for values in zip(*one, strict=True)) for forked, one in found.items()
    }
    for forked, (cold_s, back_s) in medians.items():
        show(forked, cold_s, back_s, "  median")
    print(f"cold start forked / not: {medians[True][0] / medians[False][0]:.2f}")
    print(f"recovery forked / not: {medians[True][1] / medians[False][1]:.2f}")


def show(forked: bool, cold_s: float, back_s: float, label: str = "") -> None:
    """Print one line of the table."""
    kind = "forked" if forked else "new"
    print(f"{kind:>8} {cold_s:10.1f} s {back_s:10.1f} s {back_s / (1.5 * cold_s + 5):12.2f}{label}", flush=True)


if __name__ == "__main__":
    main()
