"""A site as people have it, for the tests of the whole: `rlhf up`, a real Slurm, runs asked for with `rlhf submit`.

In most of them a job's agent is a small program that writes what a real one writes, and ends well once the test says
so: what is tested is everything around it, and it trains for as long as it is needed to.
"""

import json
import os
import signal
import sqlite3
import stat
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
from shop_floor import ROOT, Floor, until
from slurm_cluster import Cluster

from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.resources import JOB_VARIABLE

PYTHON = """\
    #!{python}
    # Python, but for the agent of a job.
    import os, sys, time
    from pathlib import Path
    if "agent" not in sys.argv:
        os.execv({python!r}, [{python!r}, *sys.argv[1:]])
    sys.path[:0] = [{root!r}, {tests!r}]
    from control_fakes import FakeAgent
    from rlhf_core.run_dir import RunDir
    from rlhf_core.schemas.resources import Role
    run = RunDir(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
    agent = FakeAgent(run, attempt=int(sys.argv[sys.argv.index("--attempt") + 1]))
    with (run.root / "starts").open("a") as starts:
        starts.write(f"{{agent.attempt}}\\n")
    agent.begin()
    agent.role(Role.TRAINER)
    sequence = 1
    while not (run.root / "go").exists():
        sequence += 1
        agent.status(sequence=sequence)
        time.sleep(0.2)
    agent.whole_run()
"""

SMALL = (
    "model.config.num_hidden_layers=1", "data.generator_args.num_train=64", "preflight.probe=false",
    "resources.num_nodes=1", "resources.ranks_per_node=1", "supervise.backoff_s=0",
)  # fmt: skip
"""Overrides of a preset that make a run as small as it can be."""


def small(*overrides: str) -> list[str]:
    """Options that make a run small, and what else is given."""
    return [word for override in (*SMALL, *overrides) for word in ("--set", override)]


def submitted(floor: Floor, preset: str, *overrides: str) -> RunDir:
    """A small run of a preset that was asked for in Prefect, and trains."""
    asked = json.loads(floor.rlhf("submit", preset, *small(*overrides), "--json").stdout)
    run_dir = RunDir.of(floor.home / "runs", asked["run_id"])
    until(lambda: read_record(run_dir).state is RunState.TRAINING)
    return run_dir


def prefect_says(floor: Floor, run_dir: RunDir) -> str:
    """Name of the state of its flow run."""
    (found,) = floor.ask("/flow_runs/filter", {"flow_runs": {"name": {"any_": [run_dir.run_id]}}})[1]
    return str(found["state"]["name"])


def stand_in(folder: Path) -> Path:
    """The compute interpreter whose agents only pretend."""
    path = folder / "python"
    path.write_text(textwrap.dedent(PYTHON).format(python=sys.executable, root=str(ROOT), tests=str(ROOT / "tests")))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@dataclass
class Site:
    """A site, its cluster, and what is asked of both."""

    floor: Floor
    cluster: Cluster

    def submit(self, num_runs: int = 1) -> list[RunDir]:
        """Ask for runs in Prefect, all at once, and wait until they train."""
        words = small()
        asking = [self.floor.start("submit", "slurm-quickstart", *words, "--json") for _ in range(num_runs)]
        answers = [process.communicate(timeout=250) for process in asking]
        assert all(process.returncode == 0 for process in asking), f"{answers}\n{self.floor.logs()}"
        found = [RunDir.of(self.floor.home / "runs", json.loads(answer)["run_id"]) for answer, _ in answers]
        for run_dir in found:
            until(lambda one=run_dir: state_of(one) is RunState.TRAINING or read_record(one).ended)
            assert state_of(run_dir) is RunState.TRAINING, f"{read_record(run_dir)}\n{self.floor.logs()}"
        return found

    def flow_runs(self, run_dir: RunDir) -> list[tuple[str, bool]]:
        """State of each flow run of a run, and whether the site daemon asked for it; in their order."""
        wanted = {"flow_runs": {"name": {"any_": [run_dir.run_id]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found = self.floor.ask("/flow_runs/filter", wanted)[1]
        return [(str(one["state"]["name"]), "rlhf-adopted" in one["tags"]) for one in found]

    def recorded(self, run_dir: RunDir) -> str:
        """State of a run as the history has it."""
        with sqlite3.connect(self.floor.home / "history.db") as history:
            rows = history.execute("SELECT state FROM runs WHERE run_id = ?", (run_dir.run_id,)).fetchall()
        history.close()
        return str(rows[0][0]) if rows else ""

    def agrees(self, run_dir: RunDir, state: str, *, jobs: list[str], flow_runs: list[tuple[str, bool]]) -> None:
        """All books say the same in the end: journal, history, Prefect, the queue; and each attempt had one job."""
        until(lambda: state_of(run_dir).value == state)
        until(lambda: self.flow_runs(run_dir) == flow_runs)
        until(lambda: self.recorded(run_dir) == state)
        until(lambda: self.queue(run_dir) == [])
        assert starts(run_dir) == jobs

    def queue(self, run_dir: RunDir) -> list[str]:
        """Ids of the jobs of a run that are in the queue."""
        rows = [line.split() for line in self.cluster.command("squeue", "--noheader", "--format=%i %k").splitlines()]
        return [job_id for job_id, comment in rows if run_dir.run_id in comment]

    def log(self, name: str) -> str:
        """Log of a service."""
        return (self.floor.home / "logs" / f"{name}.log").read_text()

    def kill(self, *names: str) -> None:
        """SIGKILL services, and with the worker all flow runs."""
        pids = self.floor.pids()
        doomed = [psutil.Process(pids[name]) for name in names]
        if "worker" in names:
            doomed += [one for one in self.floor.processes() if "prefect.engine" in one.cmdline()]
        for one in doomed:
            one.kill()
        until(lambda: not any(psutil.pid_exists(one.pid) for one in doomed))

    def terminate(self, name: str) -> None:
        """SIGTERM a service, and wait."""
        pid = self.floor.pids()[name]
        os.kill(pid, signal.SIGTERM)
        until(lambda: not psutil.pid_exists(pid))


def state_of(run_dir: RunDir) -> RunState:
    return read_record(run_dir).state


def starts(run_dir: RunDir) -> list[str]:
    """Number of the attempt of each job that began to run."""
    return (run_dir.root / "starts").read_text().split()


def go(run_dir: RunDir) -> None:
    """Have its agent end well."""
    (run_dir.root / "go").touch()


def events(site: Site, run_dir: RunDir) -> list[str]:
    """Names of the events about a run that Prefect has, in the order of time."""
    wanted: dict[str, Any] = {"filter": {"resource": {"id": [f"rlhf.run.{run_dir.run_id}"]}, "order": "ASC"}}
    return [one["event"] for one in site.floor.ask("/events/filter", wanted)[1]["events"]]


# ---------------------------------------------------------------------------------------------------------------------
# Where secrets would be


def environments(run_dir: RunDir) -> list[str]:
    """The variables of every process of the job of a run, as text."""
    found = []
    for process in psutil.process_iter():
        try:
            around = process.environ()
        except psutil.Error:
            continue
        if around.get(JOB_VARIABLE, "").startswith(run_dir.run_id) or run_dir.run_id in around.get(
            "SLURM_JOB_NAME", ""
        ):
            found.append("\n".join(f"{name}={value}" for name, value in around.items()))
    return found


def files_with(secret: str, folder: Path) -> list[Path]:
    """Files in which it stands."""
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def tables_with(secret: str, database: str) -> list[str]:
    """Tables of a PostgreSQL with a row in which it stands."""
    plain = database.replace("+psycopg", "").replace("+asyncpg", "")
    with psycopg.connect(plain) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        return [
            name
            for (name,) in tables
            if connection.execute(
                f'SELECT 1 FROM "{name}" AS one WHERE one::text LIKE %s LIMIT 1', (f"%{secret}%",)
            ).fetchone()
        ]
