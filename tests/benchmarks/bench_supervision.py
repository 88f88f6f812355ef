"""Cost of supervision: ``python tests/benchmarks/bench_supervision.py [--rounds 2] [--steps 80]``.

Trains the same shortened quickstart (two ranks, no evaluation in between) under an agent, and with ranks started by
hand, whose beats are discarded and which are not watched; alternately, in the order with, without, without, with, so
that a machine that becomes slower or faster meanwhile favours neither. Everything is measured over the main algorithm's
steps, from the second one on. Prints these figures, with their ratio to the limit if there is one:

* the reading of a node's telemetry, and one look at a silent worker (``bench_heartbeat.py`` measures a beat);
* the agent's own processor time (psutil), as a share of one core (limit: 1 %);
* the time of a step with the agent, relative to that without (wall time, and processor time of the ranks, which other
  work on the machine disturbs less).

Exits with 1 if the limit is broken.
"""

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import psutil

from rlhf_core.config import loading as config
from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import write_model
from rlhf_core.launch.prepare import prepare
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.health import HealthRule
from rlhf_core.schemas.reports import MetricsLine, Phase, RankStatus
from rlhf_core.schemas.resources import GroupPlan, Placement, in_order
from rlhf_core.worker.liveness.inspection import inspect_workers
from rlhf_core.worker.telemetry.node import Telemetry

NUM_RANKS = 2
WARM_UP = 5
AGENT_LIMIT_PERCENT = 1.0
MIN_WINDOW_S = 30.0
TIMEOUT_S = 900.0
MANY_THREADS = """
import threading
for _ in range(30):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True)
class Measured:
    """One training run."""

    window_s: float
    """Time from the first measured step to the last."""
    step_s: float
    """Median time from one step to the next, in seconds."""
    rank_cpu_s: float
    """Processor time of all ranks per step, in seconds."""
    agent_percent: float
    """The agent's processor time, as a percentage of one core."""


def make_run(runs: Path, steps: int) -> RunDir:
    """A shortened quickstart with nothing but steps in the measured part."""
    short = (f"loops.main.num_steps={steps}", f"loops.warm_start.num_steps={WARM_UP}", "evaluate.every_num_steps=0")
    # Such a short warm-up solves nothing, which the rules of RL health would rightly end.
    unjudged = [f'health.off.{rule}="the speed is measured, not the learning"' for rule in get_args(HealthRule)]
    sparse = ("evaluate.num_prompts=8", f"checkpoint.every_num_steps={10 * steps}")
    spec = config.load("quickstart", [*short, *sparse, *unjudged])
    run_dir = prepare(spec, runs, config_source="quickstart")
    phases = in_order(GroupPlan.on_all_nodes(Role.TRAINER, NUM_RANKS, 1))
    write_model(run_dir.attempt(1).placement, Placement(attempt=1, num_nodes=1, phases=phases))
    return run_dir


def start(run_dir: RunDir, *, supervised: bool) -> list["subprocess.Popen[bytes]"]:
    """Start the agent, or the ranks by hand."""
    where = ["--run-dir", str(run_dir.root), "--attempt", "1"]
    plain = {**os.environ, "OMP_NUM_THREADS": "1"}
    if supervised:
        return [spawn(["agent", *where], plain)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)}
    standalone = ["role", "trainer", *where, "--restart", "0", "--node", "by-hand"]
    return [
        spawn(standalone, {**plain, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(NUM_RANKS)
    ]


def spawn(arguments: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start one process of the worker package, without output here."""
    command = [sys.executable, "-m", "rlhf_core.worker", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ranks_of(parents: Sequence["subprocess.Popen[bytes]"], *, supervised: bool) -> list[psutil.Process]:
    """Processes of the ranks."""
    if not supervised:
        return [psutil.Process(parent.pid) for parent in parents]
    children = psutil.Process(parents[0].pid).children(recursive=True)
    return [child for child in children if "trainer" in child.cmdline()]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time of the processes themselves so far, in seconds."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def train(folder: Path, steps: int, *, supervised: bool) -> Measured:
    """Make one run, from its start to its successful end."""
    run_dir = make_run(folder, steps)
    metrics = run_dir.attempt(1).restart(0).metrics
    first, last = WARM_UP + 2, WARM_UP + steps - 2

    def lines() -> list[MetricsLine]:
        return list(read_models(metrics, MetricsLine))

    with ExitStack() as stack:
        parents = start(run_dir, supervised=supervised)
        for parent in parents:
            stack.callback(end, parent)
        wait_for_step(lines, parents, first)
        ranks, agents = ranks_of(parents, supervised=supervised), [psutil.Process(parents[0].pid)]
        began_s, ranks_before_s, agent_before_s = time.monotonic(), cpu_s(ranks), cpu_s(agents)
        begun_at = lines()[-1].step
        wait_for_step(lines, parents, last)
        window_s, ended_at = time.monotonic() - began_s, lines()[-1].step
        rank_cpu_s = (cpu_s(ranks) - ranks_before_s) / (ended_at - begun_at)
        agent_percent = 100 * (cpu_s(agents) - agent_before_s) / window_s if supervised else 0.0
        for parent in parents:
            if parent.wait(TIMEOUT_S) != 0:
                raise SystemExit(f"training did not end well; see {run_dir.root}")
    times = [line.time for line in lines() if first <= line.step <= last]
    gaps = [(after - before).total_seconds() for before, after in itertools.pairwise(times)]
    return Measured(window_s, statistics.median(gaps), rank_cpu_s, agent_percent)


def wait_for_step(
    lines: Callable[[], list[MetricsLine]], parents: Sequence["subprocess.Popen[bytes]"], step: int
) -> None:
    """Wait until a step is in the metrics."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not any(line.step >= step for line in lines()):
        if time.monotonic() > deadline_s or any(parent.poll() for parent in parents):
            raise SystemExit(f"training did not reach step {step}")
        time.sleep(0.2)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Stop the process; an agent takes its ranks with it. Nothing is left when a measurement is broken off."""
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def measure_readings() -> list[float]:
    """Cost of readings of telemetry, in nanoseconds of processor time."""
    telemetry = Telemetry(print, Path("/"))
    try:
        return [processor_ns(lambda: telemetry.read([os.getpid()])) for _ in range(20)]
    finally:
        telemetry.stop()


def measure_inspections() -> list[float]:
    """Cost of looks at a process with as many threads as a rank has, in nanoseconds of processor time."""
    with subprocess.Popen([sys.executable, "-c", MANY_THREADS], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        status = RankStatus(
            role=Role.TRAINER,
            rank=0,
            local_rank=0,
            pid=worker.pid,
            sequence=1,
            collectives=1,
            in_collective=False,
            step=1,
            phase=Phase.TRAIN,
            age_s=11.0,
            process_state="S",
        )
        costs = [processor_ns(lambda: inspect_workers([status], {})) for _ in range(20)]
        worker.kill()
    return costs


def processor_ns(call: Callable[[], object]) -> float:
    """Processor time of a call, in nanoseconds."""
    began = time.process_time_ns()
    call()
    return float(time.process_time_ns() - began)


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    reading, inspection = (statistics.median(costs) / 1e6 for costs in (measure_readings(), measure_inspections()))
    print(f"a reading of telemetry         {reading:8.2f} ms   every 2 s")
    print(f"a look at a silent worker      {inspection:8.2f} ms   only while one is suspect")
    found: dict[bool, list[Measured]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number, supervised in enumerate([True, False, False, True] * options.rounds):
            one = train(Path(folder) / str(number), options.steps, supervised=supervised)
            found[supervised].append(one)
            who = f"agent {one.agent_percent:.2f} % of a core" if supervised else "by hand"
            print(
                f"{'with' if supervised else 'without':8} {one.window_s:6.1f} s, step {one.step_s * 1e3:7.1f} ms, "
                f"ranks {one.rank_cpu_s * 1e3:7.1f} ms of processor time a step, {who}",
                flush=True,
            )
    agent = statistics.median(one.agent_percent for one in found[True])
    wall, cpu = (
        statistics.median(getattr(one, name) for one in found[True])
        / statistics.median(getattr(one, name) for one in found[False])
        for name in ("step_s", "rank_cpu_s")
    )
    print(
        f"the agent                      {agent:8.2f} % of a core   "
        f"{agent / AGENT_LIMIT_PERCENT:5.2f} of the limit (1 %)"
    )
    print(f"step time with / without       {wall:8.3f}   (processor time of the ranks: {cpu:.3f})")
    if min(one.window_s for one in found[True]) < MIN_WINDOW_S:
        print(f"the window is shorter than {MIN_WINDOW_S:.0f} s: give more --steps")
        return 1
    return 0 if agent <= AGENT_LIMIT_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
