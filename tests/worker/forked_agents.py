"""Agents forked from a process that has imported torch once, instead of agents in interpreters of their own.

An agent spends two seconds of CPU time on its imports, its fork server four, a worker in an interpreter of its own a
third of one, and most toy runs less on everything else. From then on each behaves like the program that a scheduler or
an agent starts: own session, environment, folder and output. Other tests use processes in interpreters of their own, on
Slurm and through ``rlhf run``.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from fork_server import fork_server

from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.groups.fork_server import ForkServer, _Server
from rlhf_core.worker.processes import ForkedWorker


class ForkedAgent:
    """The part of ``subprocess.Popen`` that tests use."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path, change: str = ""
    ) -> None:
        """Args:
        change: Code that it executes first.
        """
        started = fork_server().Process(target=_run, args=(tuple(arguments), dict(environment), folder, output, change))
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


def _run(arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path, change: str) -> None:
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
    _fork_workers(main)
    exec(change, {})
    sys.exit(main(list(arguments)))


def _fork_workers(become: Callable[[list[str]], int]) -> None:
    """Give the agent of this process a fork server that is forked from it, and has all imports.

    It also forks what stands in for the native roles, and what follows another program, unless ``warm_workers`` is off.
    A replacement of this server is a new process, as always.
    """
    from rlhf_core.worker.agent.phases import Agent
    from rlhf_core.worker.groups.fork_server_process import serve

    order_out, order_in = os.pipe()
    answer_out, answer_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(order_in)
        os.close(answer_out)
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as its option -u does
        os._exit(serve(order_out, answer_in, become))
    os.close(order_out)
    os.close(answer_in)
    start = ForkServer._start

    def take(server: ForkServer, mark: str) -> _Server:
        ForkServer._start = start  # type: ignore[method-assign]
        server.started.add(pid)
        return _Server(ForkedWorker(pid), order_in, answer_out, mark)

    def is_forked(agent: Agent, plan: GroupPlan) -> bool:
        return agent._job.spec.supervise.warm_workers

    ForkServer._start = take  # type: ignore[method-assign]
    Agent._is_forked = is_forked  # type: ignore[method-assign]
