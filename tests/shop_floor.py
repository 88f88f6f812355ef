"""A site for the tests of its services: a home folder, the ``rlhf`` command in it, and questions to its server."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import signing_in

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Wait for a condition to hold, and return its value."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def processes_of(home: Path) -> list[psutil.Process]:
    """Every living process that carries the marker of a home folder, services or not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RLHF_HOME") == str(home) and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_all_of(home: Path) -> None:
    """SIGKILL to every process of a home folder, until none is left: the health check brings supervisord back."""
    while found := processes_of(home):
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=10)


@dataclass
class Floor:
    """One site."""

    home: Path
    port: int
    host: str = "127.0.0.1"
    max_runs: int = 5
    auth: str = ""
    restart_s: float = 0.0
    """Restart delay of dead services; 0 leaves them dead, for tests of that."""
    settings: str = ""
    """Further lines under [prefect]."""
    variables: dict[str, str] = field(default_factory=dict)
    """Additional environment of all processes of this site."""

    def write_settings(self) -> None:
        lines = [
            "[prefect]",
            f'host = "{self.host}"',
            f"port = {self.port}",
            f"max_runs = {self.max_runs}",
            f"restart_s = {self.restart_s}",
            self.settings,
        ]
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "rlhf.toml").write_text("\n".join(lines))

    def environment(self, **more: str) -> dict[str, str]:
        """Environment of a user with nothing set but the home folder."""
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("RLHF_", "PREFECT_"))}
        return {
            **plain,
            "RLHF_HOME": str(self.home),
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            **self.variables,
            **more,
        }

    def start(self, *arguments: str, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "rlhf_core.cli.main", *arguments],
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def rlhf(self, *arguments: str, code: int = 0, **more: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments, **more)
        output, errors = process.communicate(timeout=250)
        assert process.returncode == code, f"{output}\n{errors}\n{self.logs()}"
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def python(self, code: str, **more: str) -> str:
        """Run a program of this site and return its output."""
        found = subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout.strip()

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()}" for path in (self.home / "logs").glob("*"))

    def status(self) -> dict[str, dict[str, Any]]:
        output, _ = self.start("up", "--status", "--json").communicate(timeout=250)
        return {one["name"]: one for one in json.loads(output)}

    def pids(self) -> dict[str, int]:
        return {name: one["pid"] for name, one in self.status().items() if one["pid"]}

    def processes(self) -> list[psutil.Process]:
        """Every living process that carries the marker of this home folder."""
        return processes_of(self.home)

    def kill_all(self) -> None:
        """SIGKILL to every process, until none is left."""
        kill_all_of(self.home)

    @property
    def password(self) -> str:
        """Password that its server asks for."""
        file = self.home / "prefect" / "auth"
        return self.auth or (file.read_text().strip() if file.is_file() else "")

    def ask(self, path: str, body: Any = None, *, auth: str | None = None, method: str = "") -> tuple[int, Any]:
        """Status and answer of the API, with this site's password unless another one (or none) is given."""
        password = self.password if auth is None else auth
        return signing_in.ask(f"http://127.0.0.1:{self.port}/api", path, body, password=password, method=method)

    def start_flow(self, folder: Path, name: str = "waits") -> str:
        """Have the worker run the sample flow. Returns the id of the flow run."""
        folder.mkdir()
        _, flow = self.ask("/flows/", {"name": name})
        deployment = {
            "name": name,
            "flow_id": flow["id"],
            "entrypoint": "sample_flow.py:waits",
            "path": str(ROOT / "tests" / "services"),
            "work_pool_name": "rlhf",
            "work_queue_name": "high",
            "parameter_openapi_schema": {},
            "enforce_parameter_schema": False,
        }
        status, made = self.ask("/deployments/", deployment)
        assert status in (200, 201), f"{status} {made}\n{self.logs()}"
        status, run = self.ask(f"/deployments/{made['id']}/create_flow_run", {"parameters": {"folder": str(folder)}})
        assert status in (200, 201), f"{status} {run}\n{self.logs()}"
        return str(run["id"])

    def cancel(self, flow_run: str) -> None:
        """Cancel as the button in the UI does."""
        asked = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
        status, said = self.ask(f"/flow_runs/{flow_run}/set_state", asked)
        assert status in (200, 201), said

    def state_of(self, flow_run: str) -> str:
        status, run = self.ask(f"/flow_runs/{flow_run}")
        return str(run["state"]["name"]) if status == 200 else str(status)
