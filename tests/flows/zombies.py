"""Shared parts of the tests of the reconciler with the real thing: server, worker, daemon, jobs on a real Slurm.

A job's agent is a small program that writes what a real one writes, and ends well once the test says so.
"""

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from control_fakes import make_run

from flows.server import answers
from rlhf_core.config import Site, load_site
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.attempts import RunState, StageName, StageState

ROOT = Path(__file__).parents[2]

AGENT = """\
    #!{python}
    import sys, time
    from pathlib import Path
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


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 100.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.2)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Services:
    """The services of a site, each of which may be killed and started again."""

    folder: Path
    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        home = self.folder / "home"
        home.mkdir(parents=True)
        (home / "rlhf.toml").write_text("[prefect]\nreconcile_s = 1.0\ningest_s = 0.5\n")
        agent = self.folder / "agent"
        agent.write_text(
            textwrap.dedent(AGENT).format(python=sys.executable, root=str(ROOT), tests=str(ROOT / "tests"))
        )
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        self.environment |= {
            "RLHF_HOME": str(home),
            "RLHF_COMPUTE_PYTHON": str(agent),
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(ROOT),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def site(self) -> Site:
        return load_site(self.environment)

    def start(self, *names: str) -> None:
        """Start services; the server is waited for."""
        commands = {
            "server": ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port), "--no-ui"],
            "worker": ["-m", "prefect", "worker", "start", "--pool", "rlhf", "--type", "process"],
            "daemon": [
                "-c",
                "import threading; from flows.daemon import keep; from rlhf_core.config import load_site; "
                "keep(load_site(), threading.Event())",
            ],
        }
        for name in names:
            with (self.folder / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, *commands[name]],
                    env={**os.environ, **self.environment},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            if name == "server":
                wait_for(lambda: answers(self.url), "the server answers", 180)

    def kill(self, *names: str, with_children: bool = True) -> None:
        """SIGKILL, the flow processes of a worker included."""
        for name in names:
            process = self.processes.pop(name, None)
            if process is None:
                continue
            doomed = [psutil.Process(process.pid)] if process.poll() is None else []
            if with_children:
                doomed += [child for one in doomed for child in one.children(recursive=True)]
            for one in doomed:
                try:
                    one.kill()
                except psutil.NoSuchProcess:
                    continue
            process.wait()

    def terminate(self, name: str) -> None:
        """SIGTERM, and wait."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(180)

    def checked_run(self) -> RunDir:
        """A run whose preflight is done: the next controller submits its first attempt."""
        run_dir = make_run(self.site.runs_dir)
        journal = Journal(run_dir, 0)
        journal.move_run(RunState.PREFLIGHT, "started")
        journal.end_stage(journal.begin_stage(StageName.PREFLIGHT, 0), StageState.COMPLETED)
        journal.move_run(RunState.QUEUED, "checked")
        journal.close()
        return run_dir


def state_of(run_dir: RunDir) -> RunState:
    return read_record(run_dir).state


def starts(run_dir: RunDir) -> list[str]:
    """Number of the attempt of each job that began to run."""
    return (run_dir.root / "starts").read_text().split()


def go(run_dir: RunDir) -> None:
    """Have the agent end well."""
    (run_dir.root / "go").touch()
