"""Helpers to run the ``rlhf`` command, to wait for other processes and inspect them, and to find and kill a site's."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.training.rewards.process import MARK_VARIABLE


@dataclass
class Finished:
    """A completed command."""

    returncode: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """Its standard output, parsed."""
        return json.loads(self.stdout)


Rlhf = Callable[..., Finished]
"""The fixture ``rlhf``: the command in this process."""


ASKING_INTERVAL_S = 0.5
"""Pause between two questions to a server or a database: each costs it and its client far more than a look at a file,
and a wait has many."""


def until(condition: Callable[[], Any], what: str = "", timeout_s: float = 120.0, *, interval_s: float = 0.05) -> Any:
    """Wait for a condition to hold, and return its value; ``what`` describes it in the error after a timeout."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what or 'a condition'}"
        time.sleep(interval_s)
    return found


def run_rlhf(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the ``rlhf`` command in a folder, with ``home`` in it as its home folder, and Python's programs in PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "rlhf_core.cli.main", *words],
        cwd=folder,
        env={**os.environ, "RLHF_HOME": str(folder / "home"), "PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def modules_with(module: str) -> set[str]:
    """Names of all modules of a new process that has imported one."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def user_processes() -> list[str]:
    """Command lines of running processes with user code that this process has started, and of all that those did."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mark = process.environ().get(MARK_VARIABLE, "")
            if mark.startswith(f"{os.getpid()}-") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def is_alive(pid: int) -> bool:
    """True if a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(home: Path) -> list[psutil.Process]:
    """Every living process that carries the marker of a home folder, whether a service or not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RLHF_HOME") == str(home) and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def command_of(process: psutil.Process) -> list[str]:
    """Command line of a process; empty if it has ended since it was found."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to these processes and wait for their end."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def kill_all(home: Path) -> None:
    """Send SIGKILL to every process of a home folder until none is left, as the health check restarts supervisord."""
    while found := processes_of(home):
        kill(found)


def kill_tree(pid: int) -> int:
    """Send SIGKILL to a process and all descendants, even in sessions of their own; returns the number of all."""
    root = psutil.Process(pid)
    doomed = [root, *root.children(recursive=True)]
    kill(doomed)
    return len(doomed)


def python_stacks(pid: int) -> str:
    """State and stacks of a Python process that does not respond, as far as they can be had."""
    program = Path(sys.executable).with_name("py-spy")
    command = [str(program), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return f"{psutil.Process(pid).status()}\n{found.stdout}{found.stderr}"
    except (psutil.Error, subprocess.TimeoutExpired) as error:
        return f"no stacks: {error}"
