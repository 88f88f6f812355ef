"""Load that watching puts on the scheduler: Slurm commands per minute, with 1, 10 and 1,000 live jobs, each polled once
a second by one of four controllers, and the seconds of one answer. A real cluster of 4 nodes; most jobs wait.

    python tests/benchmarks/bench_poller.py [SECONDS]        default: 12 per row
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "infra" / "slurm"))

from cluster import Cluster

from rlhf_core.scheduler.slurm import queue

ROOT = Path(__file__).parents[2]
NUM_CONTROLLERS = 4
COUNTED = ("squeue", "scontrol", "sacct")

CONTROLLER = """
import sys, time
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.resources import Submission
seconds, jobs = float(sys.argv[1]), sys.argv[2].split(",")
mine = [Submission(attempt=1, scheduler="slurm", job_id=job, command=()) for job in jobs if job]
end = time.monotonic() + seconds
while time.monotonic() < end:
    for submission in mine:
        SlurmScheduler().status([submission])
    time.sleep(1.0)
"""


def count_commands(folder: Path) -> Path:
    """Put shims before the Slurm commands that record each call; return the file of the record."""
    calls, shims = folder / "calls", folder / "bin"
    shims.mkdir()
    for name in COUNTED:
        real = subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, text=True).stdout.strip()
        shim = shims / name
        shim.write_text(f'#!/bin/sh\necho {name} >> {calls}\nexec {real or "false"} "$@"\n')
        shim.chmod(0o755)
    os.environ["PATH"] = f"{shims}:{os.environ['PATH']}"
    return calls


def measure(jobs: list[str], seconds: float, calls: Path) -> float:
    """Commands per minute while the controllers watch all these jobs, each its share."""
    calls.write_text("")
    start = time.monotonic()
    controllers = [
        subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(seconds), ",".join(jobs[index::NUM_CONTROLLERS])], cwd=ROOT
        )
        for index in range(NUM_CONTROLLERS)
    ]
    for controller in controllers:
        controller.wait()
    return len(calls.read_text().split()) / (time.monotonic() - start) * 60


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 12.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Cluster(folder / "slurm").running() as cluster:
            os.environ.update(cluster.environment, XDG_CACHE_HOME=str(folder / "cache"))
            submit = ("sbatch", "--parsable", "--output=/dev/null", "--time=60", "--wrap=sleep 3600")
            jobs: list[str] = []
            calls = count_commands(folder)
            print(f"{NUM_CONTROLLERS} controllers, every job asked about once a second")
            for number in (1, 10, 1000):
                while len(jobs) < number:
                    jobs.append(cluster.command(*submit))
                per_minute = measure(jobs, seconds, calls)
                print(f"{number:5d} jobs: {per_minute:6.1f} commands of Slurm per minute", flush=True)
            start = time.monotonic()
            rows = queue.listing(max_age_s=0.0).rows
            print(f"one question about {len(rows)} jobs: {time.monotonic() - start:.3f} s")


if __name__ == "__main__":
    main()
