"""Sites for tests: a home folder, the ``rlhf`` command, services, and queries about everything that belongs to it."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import signing_in
from history_template import give_history
from prefect_template import REGISTERED, give_prefect_database
from process_tools import (
    ASKING_INTERVAL_S,
    Finished,
    command_of,
    free_port,
    kill,
    kill_all,
    kill_tree,
    processes_of,
    python_stacks,
    until,
)
from site_files import GRADED, GRADER, ROOT, small, tiny_config, write_pretended_agent
from slurm_cluster import Cluster

from flows.server.settings import answers
from flows.services import SERVICES
from rlhf_core.files.appended import read_models
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.services.presence import service_status

TIMEOUT_S = 250.0
"""Longest time for a command, and for an effect that is not measured: the machine may be busy with other tests."""

START_TIMEOUT_S = 400.0
"""A server starts in 15 s alone and takes minutes beside other work; one that fails ends, and is seen at once."""

SILENT_S = 60.0
"""Time without an answer after which a server counts as lost."""


class LostServer(UserWarning):
    """A server that test files share has ended or does not respond."""


@dataclass
class Site:
    """A site; :meth:`running` starts it and removes everything at the end."""

    home: Path
    port: int = field(default_factory=free_port)
    cluster: Cluster | None = None
    """A Slurm for its jobs, started and ended with the site; without one they run on this machine."""
    pretended: bool = False
    """True for agents that only write what real ones write, and end well after :func:`go`."""
    team: bool = False
    """True for a working directory with the config ``sorting.toml`` and graders in it."""
    database_url: str = ""
    """A PostgreSQL for the history; SQLite if not given."""
    host: str = "127.0.0.1"
    max_runs: int = 5
    auth: str = ""
    restart_s: float = 0.0
    """Restart delay of dead services; 0 leaves them dead, for tests of that."""
    makes_database: bool = False
    """True to have both databases made as for a new user, which takes long; else its server and history get copies."""
    settings: str = ""
    """Further lines under [prefect]."""
    variables: dict[str, str] = field(default_factory=dict)
    """Additional environment of all processes of this site."""
    working_dir: Path | None = None
    """Folder that its commands are run in; its own if not given."""
    _started: list["subprocess.Popen[str]"] = field(default_factory=list, repr=False)
    _served: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict, repr=False)

    # -----------------------------------------------------------------------------------------------------------------
    # Start and end

    def write_settings(self) -> None:
        lines = {"host": self.host, "port": self.port, "max_runs": self.max_runs, "restart_s": self.restart_s}
        self.folder.mkdir(parents=True, exist_ok=True)
        written = [f"{name} = {json.dumps(value)}" for name, value in lines.items()]
        (self.home / "rlhf.toml").write_text("\n".join(["[prefect]", *written, self.settings]))
        if not self.makes_database:
            give_prefect_database(self.home / "prefect")
            give_history(self.home)
        if self.pretended:
            write_pretended_agent(self.home / "python")
        if self.team:
            (self.folder / "grader.py").write_text(GRADER.format(service=str(self.service_is_up)))
            (self.folder / "sorting.toml").write_text(tiny_config(GRADED))

    @contextmanager
    def running(self, *, services: bool = True) -> Iterator["Site"]:
        """Write the settings, and start cluster, database and services for the block."""
        self.write_settings()
        try:
            if self.cluster is not None:
                self.cluster.up()
            if self.database_url:
                self.rlhf("db", "upgrade")
            if services:
                self.rlhf("up")
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """End every remaining process."""
        for process in self._started:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        self.kill_all()
        if self.cluster is not None:
            self.cluster.down()

    @property
    def folder(self) -> Path:
        """Folder with the configs and graders of the users."""
        return self.home / "team" if self.team else self.home

    @property
    def service_is_up(self) -> Path:
        """File whose existence means that the grading service of ``grader:by_service`` is up."""
        return self.home / "service-is-up"

    # -----------------------------------------------------------------------------------------------------------------
    # Commands

    def environment(self, **more: str) -> dict[str, str]:
        """Environment of a user who has set only the home folder and the settings of this site."""
        foreign = ("RLHF_", "PREFECT_", "SLURM_")
        own = {
            "RLHF_HOME": str(self.home),
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "160",
            "OMP_NUM_THREADS": "1",
        }
        if not self.makes_database:
            own |= REGISTERED
        if self.cluster is not None:
            own |= {**self.cluster.environment, "RLHF_SCHEDULER": "slurm"}
        if self.pretended:
            own["RLHF_COMPUTE_PYTHON"] = str(self.home / "python")
        if self.database_url:
            own["RLHF_DATABASE_URL"] = self.database_url
        if self.auth:
            own["RLHF_PREFECT_AUTH"] = self.auth
        plain = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**plain, **own, **self.variables, **more}

    def command(self, *arguments: str) -> list[str]:
        """The ``rlhf`` command."""
        return [sys.executable, "-m", "rlhf_core.cli.main", *arguments]

    def spawn(self, command: list[str], *, log: Path | None = None, **more: str) -> "subprocess.Popen[str]":
        """Start a program in a session of its own; its output is kept for the caller or goes to a file."""
        output = subprocess.PIPE if log is None else log.open("a")
        process = subprocess.Popen(
            command,
            cwd=self.working_dir or self.folder,
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if not isinstance(output, int):
            output.close()
        self._started.append(process)
        return process

    def start(self, *arguments: str, **more: Any) -> "subprocess.Popen[str]":
        """Start the ``rlhf`` command without waiting for it."""
        return self.spawn(self.command(*arguments), **more)

    def rlhf(self, *arguments: str, code: int | None = 0, timeout_s: float = TIMEOUT_S, **more: str) -> Finished:
        """Run the ``rlhf`` command and wait for its end."""
        process = self.start(*arguments, **more)
        stdout, stderr = process.communicate(timeout=timeout_s)
        if code is not None:
            message = f"rlhf {arguments} -> {process.returncode}\n{stdout}\n{stderr}\n{self.logs()}"
            assert process.returncode == code, message
        return Finished(process.returncode, stdout, stderr)

    def python(self, code: str, **more: Any) -> str:
        """Run a program of this site and return its output."""
        process = self.spawn([sys.executable, "-c", code], **more)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, stderr
        return stdout.strip()

    def config(self, changes: Mapping[str, Any] | None = None) -> str:
        """Write a config of a tiny run (:func:`site_files.tiny_config`) and return its path."""
        path = self.folder / "tiny.toml"
        path.write_text(tiny_config(changes))
        return str(path)

    # -----------------------------------------------------------------------------------------------------------------
    # Services

    def serve(self, name: str, *program: str, **more: str) -> None:
        """Start a service without supervisord, or a Python program in its place; waits for a server to be ready."""
        (self.home / "logs").mkdir(exist_ok=True)
        command = [sys.executable, *program] if program else self.command("serve", name)
        process = self._served[name] = self.spawn(command, log=self.home / "logs" / f"{name}.log", **more)
        if name == "server":
            until(
                lambda: answers(self.api) or process.poll() is not None,
                "the server",
                START_TIMEOUT_S,
                interval_s=ASKING_INTERVAL_S,
            )
            assert process.poll() is None, self.logs()

    def require_server(self) -> None:
        """Start the server that this process has started again if it serves no more, with a warning that says why.

        A warning, as the test that lost it has failed already, and its rerun finds the loss here.
        """
        if (process := self._served.get("server")) is None:
            return
        with suppress(AssertionError):
            until(lambda: answers(self.api) or process.poll() is not None, "the server", SILENT_S)
        if process.poll() is None and answers(self.api):
            return
        ended = process.poll()
        found = f"does not respond:\n{python_stacks(process.pid)}" if ended is None else f"has ended with {ended}"
        warnings.warn(LostServer(f"the server of {self.home} {found}\n{self.logs()}"), stacklevel=2)
        if ended is None:
            kill_tree(process.pid)
            process.wait()
        self.serve("server")

    def status(self) -> dict[str, dict[str, Any]]:
        """State of each service, as ``rlhf up --status`` reports it."""
        return {one["name"]: one for one in json.loads(self.rlhf("up", "--status", "--json", code=None).stdout)}

    def pids(self) -> dict[str, int]:
        """Process ids of the running services: polled often, so read without starting a process."""
        return {name: found.pid for name in SERVICES if (found := service_status(self.home, name)).pid}

    def kill(self, *names: str) -> None:
        """Send SIGKILL to running services, and to all flow runs together with the worker."""
        pids = {name: one.pid for name, one in self._served.items() if one.poll() is None}
        if not self._served:
            pids = self.pids()
        doomed = [psutil.Process(pids[name]) for name in names if name in pids]
        if "worker" in names:
            doomed += [one for one in self.processes() if "prefect.engine" in command_of(one)]
        kill(doomed)
        until(lambda: not any(one.is_running() for one in doomed), f"the end of {names}")

    def terminate(self, name: str) -> None:
        """Send SIGTERM to a service and wait for its end."""
        process = self._served.get(name)
        pid = process.pid if process is not None else self.pids()[name]
        os.kill(pid, signal.SIGTERM)
        psutil.Process(pid).wait(180)

    def processes(self) -> list[psutil.Process]:
        """Every living process that carries the marker of this home folder."""
        return processes_of(self.home)

    def commands(self) -> list[str]:
        """Command lines of the processes of this site."""
        return [" ".join(words) for one in self.processes() if (words := command_of(one))]

    def kill_all(self) -> None:
        """Send SIGKILL to every process until none is left."""
        kill_all(self.home)

    def log(self, name: str) -> str:
        """Log of a service."""
        return (self.home / "logs" / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()}" for path in (self.home / "logs").glob("*"))

    # -----------------------------------------------------------------------------------------------------------------
    # Queries to its server

    @property
    def url(self) -> str:
        """Address of the UI."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> str:
        return f"{self.url}/api"

    @property
    def password(self) -> str:
        """Password of the site's server."""
        file = self.home / "prefect" / "auth"
        return self.auth or (file.read_text().strip() if file.is_file() else "")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make Prefect in this process, and programs started by it, use this server within the block."""
        from prefect.events.worker import EventsWorker
        from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

        self.require_server()
        settings = {PREFECT_API_URL: self.api, PREFECT_API_AUTH_STRING: self.password}
        with temporary_settings(settings), pytest.MonkeyPatch.context() as patch:
            for setting, value in settings.items():
                patch.setenv(setting.name, value)  # for code that looks up the server without importing Prefect
            EventsWorker.drain_all(timeout=5)  # it sends all events of a process to the server of the first one
            yield

    def ask(self, path: str, body: Any = None, *, auth: str | None = None, method: str = "") -> tuple[int, Any]:
        """Status and answer of the API, with this site's password unless another one (or none) is given."""
        password = self.password if auth is None else auth
        return signing_in.ask(self.api, path, body, password=password, method=method)

    def cancel(self, flow_run: str) -> None:
        """Cancel a flow run, as the button in the UI does."""
        asked = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
        status, message = self.ask(f"/flow_runs/{flow_run}/set_state", asked)
        assert status in (200, 201), message

    def flow_state(self, flow_run: str) -> str:
        """Name of the state of a flow run, or the HTTP status if the answer has no state."""
        status, run = self.ask(f"/flow_runs/{flow_run}")
        return str(run["state"]["name"]) if status == 200 else str(status)

    def flow_becomes(self, flow_run: str, *names: str) -> str:
        """Wait until a flow run is in one of these states in Prefect, and return the message of the state."""
        what = f"{flow_run} to be {names}"
        until(lambda: self.flow_state(flow_run) in names, what, TIMEOUT_S, interval_s=ASKING_INTERVAL_S)
        return str(self.ask(f"/flow_runs/{flow_run}")[1]["state"]["message"])

    def flow_runs_of(self, run_dir: RunDir) -> list[dict[str, Any]]:
        """The flow runs of a run, in order."""
        wanted = {"flow_runs": {"name": {"any_": [run_dir.run_id]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return list(self.ask("/flow_runs/filter", wanted)[1])

    def flow_runs(self, run_dir: RunDir) -> list[tuple[str, bool]]:
        """State of each flow run of a run, and True if the site daemon requested it; in order."""
        return [(str(one["state"]["name"]), "rlhf-adopted" in one["tags"]) for one in self.flow_runs_of(run_dir)]

    def flow_run(self, run_dir: RunDir) -> str:
        """Id of the only flow run of a run."""
        (found,) = self.flow_runs_of(run_dir)
        return str(found["id"])

    def deploy(self, config: str, *options: str) -> str:
        """Deploy a config and return the id of the deployment."""
        return str(self.rlhf("deploy", config, *options, "--json").json()["url"].rsplit("/", 1)[-1])

    def deployment(self, name: str) -> str:
        """Id of an existing deployment."""
        status, found = self.ask(f"/deployments/name/rlhf-run/{name}")
        assert status == 200, found
        return str(found["id"])

    def delete_deployments(self) -> None:
        """Delete every deployment and its flow runs that have not started."""
        for one in self.ask("/deployments/filter", {})[1]:
            self.ask(f"/deployments/{one['id']}", method="DELETE")

    # -----------------------------------------------------------------------------------------------------------------
    # Runs: requests, directories, database, queue

    def submit(self, preset: str, *overrides: str) -> RunDir:
        """Request a small run of a preset in Prefect, and wait until it trains."""
        return self.submit_at_once(1, preset, *overrides)[0]

    def submit_at_once(self, number: int, preset: str, *overrides: str) -> list[RunDir]:
        """Request several runs at the same time."""
        processes = [self.start("submit", preset, *small(*overrides), "--json") for _ in range(number)]
        message = [process.communicate(timeout=TIMEOUT_S) for process in processes]
        assert all(process.returncode == 0 for process in processes), f"{message}\n{self.logs()}"
        found = [RunDir.of(self.home / "runs", json.loads(answer)["run_id"]) for answer, _ in message]
        for run_dir in found:
            until(lambda one=run_dir: state_of(one) is RunState.TRAINING or read_record(one).ended, "training")
            assert state_of(run_dir) is RunState.TRAINING, f"{read_record(run_dir)}\n{self.logs()}"
        return found

    def runs(self) -> list[RunDir]:
        """The directories of all runs."""
        folder = Path(self.variables.get("RLHF_RUNS", self.home / "runs"))
        return [RunDir(path) for path in folder.glob("[!.]*")]

    def only_run(self) -> RunDir:
        """The directory of the only run."""
        (run,) = self.runs()
        return run

    def rows(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        """Query the SQLite database directly, bypassing our own code."""
        with closing(sqlite3.connect(self.home / "history.db")) as connection:
            return connection.execute(question, values).fetchall()

    def recorded(self, run_id: str) -> str:
        """State of a run in the database; empty if the run is missing."""
        return str(next(iter(self.rows("SELECT state FROM runs WHERE run_id = ?", run_id)), [""])[0])

    def becomes(self, run_id: str, state: str) -> None:
        """Wait until a run has a state in the database; any other final state fails."""

        def now() -> bool:
            found = self.recorded(run_id)
            if found in {"completed", "failed", "cancelled"} - {state}:
                events = self.rows("SELECT kind, state, message FROM events WHERE run_id = ?", run_id)
                pytest.fail(f"{run_id} is {found}\n{events}\n{self.logs()}")
            return found == state

        until(now, f"{run_id} to be {state}", TIMEOUT_S)

    def run_of(self, flow_run: str) -> str:
        """The run driven by a flow run, once it is in the database."""
        question = "SELECT DISTINCT run_id FROM controllers WHERE flow_run_id = ?"
        ((run_id,),) = until(lambda: self.rows(question, flow_run), f"the run of {flow_run}", TIMEOUT_S)
        return str(run_id)

    def step(self, run_id: str) -> int:
        """The last step of a run in the database."""
        ((step,),) = self.rows("SELECT coalesce(max(step), 0) FROM metrics WHERE run_id = ?", run_id)
        return int(step)

    def jobs(self, run_id: str) -> list[tuple[str, str]]:
        """Job id and comment of each living job of a run, as squeue lists them."""
        assert self.cluster is not None
        lines = self.cluster.command("squeue", "--noheader", "--format=%i|%k").splitlines()
        pairs = [line.split("|", 1) for line in lines if run_id in line]
        return [(job, comment) for job, comment in pairs]


def state_of(run_dir: RunDir) -> RunState:
    return read_record(run_dir).state


def starts(run_dir: RunDir) -> list[str]:
    """Attempt number of each job whose stand-in agent started."""
    return (run_dir.root / "starts").read_text().split()


def go(run_dir: RunDir) -> None:
    """Let the stand-in agent of a run finish successfully."""
    (run_dir.root / "go").touch()


def last_step(run: RunDir | None) -> int:
    """The highest step in any metrics file of a run."""
    restarts = run.restarts() if run is not None else []
    return max((line.step for one in restarts for line in read_models(one.metrics, MetricsLine)), default=0)
