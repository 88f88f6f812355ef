"""The fork server of a node: a process that preloads the workers' imports and forks workers.

Most of a start is spent on imports: torch, transformers and DeepSpeed take 5 s of CPU time per rank, and longer from a
cold file system. The fork server imports them once per node. Forking a worker from it takes a tenth of a second, at the
first start and in restarts in place alike, and the worker shares its memory.

A worker is forked only if the result equals a new process: not from a server that is dead, stopped or unresponsive, or
that was started with another environment or other code. Such a server is replaced; if the new one cannot import the
modules either, workers are started as new processes and report the problem themselves.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import rlhf_core
from rlhf_core.machine.main_memory import memory_bytes
from rlhf_core.worker import processes
from rlhf_core.worker.processes import Child, ForkedWorker
from rlhf_core.worker.roles import WARM
from rlhf_core.worker.signals import SAVING, held_back

PACKAGE = "rlhf_core.worker"
"""Module that a worker's command line runs; the worker's arguments follow it."""
READY = b"ready\n"
"""Answer of a fork server to each order of imports, sent once they are done."""

IMPORT_TIMEOUT_S = 300.0
"""Longest time for imports, in seconds; then workers start as new processes, within ``supervise.setup_floor_s``."""

ANSWER_TIMEOUT_S = 10.0
"""Time a server has to confirm a fork, in seconds: it takes 0.1 s, longer on a busy node."""

KILL_TIMEOUT_S = 5.0
"""Longest wait for a killed server to exit, in seconds."""

SERVER_BYTES = 1 << 30
"""Generous estimate of a server's memory: 0.45 GiB measured with CPU-only torch; CUDA builds are larger."""

SHORT_OF_MEMORY = 0.1
"""Share of memory kept free for the run. Below it, the server is killed and no new one is started."""

CHECK_INTERVAL_S = 1.0
"""Interval of memory checks, in seconds."""

COMMAND_BYTES = 2048
"""Space reserved in the server's command line for a worker's, as shown by ``ps``."""


@dataclass
class _Server:
    """A server process that has done its imports or is doing them."""

    process: Child
    orders: int
    """File descriptor for writing orders, one line of JSON each."""
    answers: int
    """File descriptor for reading answers."""
    fingerprint: str
    """Hash of the environment and code it was started with."""
    imports: set[str] = field(default_factory=set)
    """Imports ordered so far, as ``module:function``."""
    num_unanswered: int = 0
    """Orders of imports that it has not answered yet."""
    ordered_s: float = 0.0
    """Time of the last of them."""

    def order(self, **content: object) -> None:
        """Send an order.

        Raises:
            OSError: it no longer reads.
        """
        with os.fdopen(os.dup(self.orders), "wb") as pipe:
            pipe.write(json.dumps(content).encode() + b"\n")

    def order_imports(self, imports: str) -> None:
        """Order imports unless they were ordered before. A server that has ended is noticed when it is used."""
        if imports in self.imports:
            return
        self.imports.add(imports)
        self.num_unanswered += 1
        self.ordered_s = time.monotonic()
        with contextlib.suppress(OSError):
            self.order(imports=imports)

    def has_imported(self) -> bool:
        """True once it has made all the imports it was ordered to make."""
        if self.num_unanswered > 0:
            self.num_unanswered -= self.read(0.0).count(READY)
        return self.num_unanswered == 0

    def read(self, timeout_s: float) -> bytes:
        """The next answer; empty if none comes in time or the server has exited."""
        poll = select.poll()  # unlike select(), it takes any number of open files
        poll.register(self.answers, select.POLLIN)
        return os.read(self.answers, 256) if poll.poll(1000 * timeout_s) else b""

    def end(self) -> None:
        """Kill and reap it."""
        processes.kill_and_reap([self.process], KILL_TIMEOUT_S)
        for descriptor in (self.orders, self.answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class ForkServer:
    """The fork server of one node. Use it only from the agent's main thread: a server dies with the thread that started
    it."""

    def __init__(self, log: Callable[[str], None], memory: Callable[[], tuple[int, int]] = memory_bytes) -> None:
        """Create the handle without starting a server.

        Args:
            log: Receives sentences for the agent's log.
            memory: Returns the free and the total bytes available to this node's processes.
        """
        self._log = log
        self._memory = memory
        self._server: _Server | None = None
        self._checked_s = -CHECK_INTERVAL_S
        self._is_off = False
        self.started: set[int] = set()
        """Process ids of all servers and forked workers so far: their owners reap them."""

    @property
    def pids(self) -> frozenset[int]:
        """Process id of the server, if there is one."""
        return frozenset() if self._server is None else frozenset([self._server.process.pid])

    @property
    def is_importing(self) -> bool:
        """True while a server is importing, which is worth waiting for."""
        server = self._server
        if server is None or server.has_imported():
            return False
        if server.process.poll() is not None:
            self._disable(f"it ended with exit code {server.process.returncode} during its imports")
        elif time.monotonic() - server.ordered_s > IMPORT_TIMEOUT_S:
            self._disable(f"it did not finish its imports within {IMPORT_TIMEOUT_S:g} s")
        return self._server is not None

    def prepare(self, imports: str = WARM) -> None:
        """Ensure that a usable server has made these imports or is making them; start one if necessary.

        Args:
            imports: Function that imports what the processes to fork need, as ``module:function``.
        """
        if self._is_off:
            return
        present = fingerprint()
        if self._server is not None:
            problem = self._problem(self._server)
            if not problem and self._server.fingerprint != present:
                problem = "environment or code has changed since it started"
            if problem:
                self._log(f"fork server {self._server.process.pid} is not used: {problem}")
                self.close()
        if self._server is None:
            free, total = self._memory()
            if free - SERVER_BYTES < SHORT_OF_MEMORY * total:
                return
            self._server = self._start(present)
        self._server.order_imports(imports)

    def watch_memory(self) -> None:
        """Kill the server if memory is short. Cheap, and called often."""
        now_s = time.monotonic()
        if self._server is None or now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        free, total = self._memory()
        if free < SHORT_OF_MEMORY * total:
            self._disable(f"memory is low ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free)")

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedWorker | None:
        """Fork a worker. Call :meth:`prepare` before the first fork of a start.

        Args:
            arguments: Arguments of the worker after ``python -m rlhf_core.worker``.
            environment: The worker's complete environment.

        Returns:
            Its process; None if no server is usable or it is still importing.
        """
        server = self._server
        if server is None:
            return None
        problem = self._problem(server)
        if not problem:
            if not server.has_imported():
                return None
            response = self._response(server, arguments=list(arguments), environment=dict(environment))
            if response.isdigit():
                self.started.add(int(response))
                return ForkedWorker(int(response))
            problem = response or f"it did not respond within {ANSWER_TIMEOUT_S:g} s"
        self._log(f"fork server {server.process.pid} is not used: {problem}")
        self.close()
        return None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Fork a process, or start a new one if no server is usable.

        Args:
            command: Interpreter arguments that run this package.
            environment: The complete environment of the process.

        Raises:
            OSError: the process cannot be started.
        """
        return self.fork(arguments_of(command), environment) or start_new(command, environment)

    def close(self) -> None:
        """Kill the server; workers keep running."""
        if self._server is not None:
            self._server.end()
            self._server = None

    @staticmethod
    def _problem(server: _Server) -> str:
        if server.process.poll() is not None:
            return f"it ended with exit code {server.process.returncode}"
        state = processes.process_state(server.process.pid)
        return f"it is in state {state}" if state in ("T", "t") else ""

    @staticmethod
    def _response(server: _Server, **order: object) -> str:
        try:
            server.order(**order)
        except OSError as error:
            return f"failed to send its order: {error}"
        return server.read(ANSWER_TIMEOUT_S).decode(errors="replace").strip()

    def _start(self, mark: str) -> _Server:
        order_out, order_in = os.pipe()
        answer_out, answer_in = os.pipe()
        command = [sys.executable, "-u", "-P", "-m", "rlhf_core.worker", "fork-server", str(order_out), str(answer_in)]
        with held_back(SAVING):
            process = subprocess.Popen(
                [*command, " " * COMMAND_BYTES],
                pass_fds=(order_out, answer_in),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        os.close(order_out)
        os.close(answer_in)
        self.started.add(process.pid)
        return _Server(process, order_in, answer_out, mark)

    def _disable(self, reason: str) -> None:
        self._is_off = True
        self.close()
        self._log(f"workers on this node start as new processes, without a fork server: {reason}")


def start_new(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a new interpreter as the leader of a session of its own.

    Raises:
        OSError: it cannot be started.
    """
    with held_back(SAVING):
        return subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True)


def arguments_of(command: Sequence[str]) -> Sequence[str]:
    """Arguments of a worker: its command line without the interpreter's options and the package."""
    return command[command.index(PACKAGE) + 1 :]


def fingerprint() -> str:
    """Hash of this process's environment and this package's files, as a new process would find them."""
    digest = blake2b(digest_size=16)
    for name, value in sorted(os.environ.items()):
        digest.update(f"{name}={value}\0".encode(errors="surrogateescape"))
    for path in sorted(Path(rlhf_core.__file__).parent.rglob("*.py")):
        with contextlib.suppress(OSError):
            status = path.stat()
            digest.update(f"{path}:{status.st_mtime_ns}:{status.st_size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
