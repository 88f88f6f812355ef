"""The same SIGSTOP without this project: plain `torchrun --max-restarts=3` with its default timeouts.

    python tests/faults/torchrun_baseline.py [--seconds 120]

Four ranks reduce a vector ten times a second; one of them is stopped by SIGSTOP, and the outcome is observed. The
result is printed and written into docs/benchmarks.md.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from fault_table import write_between

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
NUM_RANKS = 4

TRAINER = """
import sys, time, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
steps = pathlib.Path(sys.argv[1], f"rank-{dist.get_rank()}")
vector = torch.ones(1_000_000)
for step in range(1_000_000):
    dist.all_reduce(vector)
    vector.fill_(1.0)
    steps.write_text(str(step))
    time.sleep(0.1)
"""


def steps_of(folder: Path) -> list[int]:
    """Number of steps that each rank has made."""
    return [int(path.read_text() or 0) for path in sorted(folder.glob("rank-*"))]


def watch(seconds: float) -> str:
    """Start torchrun, stop one rank and watch the others; return a row for the table."""
    folder = Path(tempfile.mkdtemp(prefix="torchrun-baseline-"))
    (folder / "trainer.py").write_text(TRAINER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            [*command, "--max-restarts=3", str(folder / "trainer.py"), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while len(steps_of(folder)) < NUM_RANKS or min(steps_of(folder)) < 20:
            if job.poll() is not None:
                raise SystemExit(f"torchrun ended by itself; see {folder}/log")
            time.sleep(0.1)
        ranks = psutil.Process(job.pid).children()
        ranks[-1].send_signal(signal.SIGSTOP)
        time.sleep(1)
        at_stop = max(steps_of(folder))
        time.sleep(seconds - 1)
        made = max(steps_of(folder)) - at_stop
        same = {child.pid for child in psutil.Process(job.pid).children()} == {rank.pid for rank in ranks}
        log_text = (folder / "log").read_text()
        num_errors = log_text.count("Traceback") + log_text.count("Error")
        return (
            f"| `torchrun --max-restarts=3`, default time-outs, SIGSTOP of a rank | watched {seconds:.0f} s: "
            f"{'no restart' if same else 'restarted'}, {made} further steps, {num_errors} errors in the log, "
            f"job {'still running' if job.poll() is None else 'ended'} |"
        )
    finally:
        for child in psutil.Process(job.pid).children(recursive=True):
            child.kill()
        job.kill()
        job.wait()


def main() -> None:
    """Watch, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    row = watch(parser.parse_args().seconds)
    print(row)
    PAGE.write_text(write_between(PAGE.read_text(), "torchrun baseline", f"| what | seen |\n|---|---|\n{row}"))


if __name__ == "__main__":
    main()
