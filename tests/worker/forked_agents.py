"""Agents forked from a process that has imported torch once, instead of agents in interpreters of their own.

An agent spends two seconds of CPU time on its imports, and most toy runs less on everything else. From then on it
behaves like the program that a scheduler starts: own session, environment, folder and output. Other tests use agents in
interpreters of their own, on Slurm and through ``rlhf run``.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from fork_server import fork_server


class ForkedAgent:
    """The part of ``subprocess.Popen`` that tests use."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path) -> None:
        started = fork_server().Process(target=_run, args=(tuple(arguments), dict(environment), folder, output))
        started.start()
        assert started.pid is not None
        self.pid = started.pid
        self._process: ForkServerProcess = started

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that ended the agent; None before."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Exit code as in ``returncode``."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the agent to end.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the agent has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path) -> None:
    """Become the agent."""
    from rlhf_core.worker.__main__ import main

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    os.close(written)
    sys.exit(main(list(arguments)))
