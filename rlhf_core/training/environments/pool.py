"""The trainer's side of tools and environments: processes that are asked side by side within a time limit.

A process has one environment at a time, from ``reset`` until the rollouts of a step are over, or answers one call of
tools after another; then it is used again. Once one was lost, all are ended with everything that they started, and new
ones are forked.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.environments.server import TurnRequest
from rlhf_core.training.rewards.process import (
    LOAD_TIMEOUT_S,
    POLL_INTERVAL_S,
    end_with_descendants,
    packed,
    start_marked,
)
from rlhf_core.training.rewards.worker import HEADER

SIDE_BY_SIDE = 64
"""Maximum number of rollouts that are answered at the same time."""
FORK_TIMEOUT_S = 60.0
"""Longest wait for the process of a rollout, in seconds: a busy node, or one out of memory."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhf_core.training.environments.server import serve; serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)

Reply = dict[str, Any]
"""Answer to a request; of one that failed, ``failure`` has the reason, as the end of a sentence, and of one whose
process is gone, ``lost`` is true."""


@dataclass
class _Process:
    """Connection to a forked process."""

    connection: socket.socket
    pid: int = 0
    deadline: float = 0.0
    received: bytearray = field(default_factory=bytearray)


class EnvironmentPool:
    """Processes of the rollouts of one rank. Main thread only: they die with the thread that started them."""

    def __init__(self, spec: TurnsSpec, output: int | None = None) -> None:
        """Start the first process, which imports the functions while the caller continues; none for a run without
        them.

        Args:
            output: descriptor of their standard output; by default that of this process.
        """
        self.tools: Sequence[Mapping[str, Any]] = ()
        """Descriptions of the tools for the chat template."""
        self.has_reward = False
        """True if the environment returns the reward of a rollout."""
        self._spec, self._output = spec, output
        self._idle: list[_Process] = []
        self._environments: dict[int, _Process] = {}
        self._has_lost = False
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._mark = ""
        self._is_loaded = False
        if spec.are_used:
            self._start()

    @property
    def pid(self) -> int | None:
        """Id of the first process; None once it has been ended."""
        return self._server.pid if self._server is not None else None

    def await_loaded(self, beat: Callable[[], None]) -> None:
        """Wait until the functions are imported.

        Raises:
            BadConfig: one of them cannot be imported.
        """
        if self._server is None or self._server.poll() is not None:
            self.close()
            self._start()
        if not self._is_loaded:
            answer = self._served(LOAD_TIMEOUT_S, beat)
            if problem := answer.get("unloadable"):
                raise BadConfig(problem)
            if problem := answer.get("failure"):
                raise BadConfig(f"rollout.turns: the import of {', '.join(self._spec.functions)} {problem}")
            self._is_loaded = True

    def describe(self, beat: Callable[[], None]) -> None:
        """Find out :attr:`tools` and :attr:`has_reward`.

        Raises:
            BadConfig: that fails.
        """
        if not self._spec.are_used:
            return
        found = self.ask({0: TurnRequest("describe")}, beat, LOAD_TIMEOUT_S)[0]
        self.release(beat)
        if problem := found.get("failure"):
            raise BadConfig(str(problem).removeprefix("raised BadConfig: "))
        self.tools, self.has_reward = found["tools"], found["has_reward"]

    def ask(
        self, requests: Mapping[int, TurnRequest], beat: Callable[[], None], timeout_s: float | None = None
    ) -> dict[int, Reply]:
        """Send requests of some rollouts to their processes, and wait for all answers.

        Args:
            requests: by number of the rollout.
            beat: called at least every ``POLL_INTERVAL_S`` seconds.
            timeout_s: time limit of each; by default ``rollout.turns.timeout_s``.
        """
        limit_s = self._spec.timeout_s if timeout_s is None else timeout_s
        waiting, active, replies = deque(requests.items()), dict[int, _Process](), dict[int, Reply]()
        with selectors.DefaultSelector() as selector:

            def end(number: int, reply: Reply) -> None:
                process = active.pop(number)
                selector.unregister(process.connection)
                replies[number] = reply
                if reply.get("lost"):
                    self._lose(number, process)
                elif number not in self._environments:
                    self._idle.append(process)

            while waiting or active:
                beat()
                while waiting and len(active) < SIDE_BY_SIDE:
                    number, request = waiting.popleft()
                    active[number] = process = self._process(number, beat)
                    selector.register(process.connection, selectors.EVENT_READ, number)
                    process.deadline = time.monotonic() + limit_s
                    if not _sent(process, request, limit_s):
                        end(number, _lost("ended its process"))
                for key, _ in selector.select(POLL_INTERVAL_S):
                    if (reply := _received(active[key.data])) is not None:
                        end(key.data, reply)
                now = time.monotonic()
                for number in [number for number, process in active.items() if process.deadline < now]:
                    end(number, _lost(f"did not respond within {limit_s:.3g} s"))
        return replies

    def release(self, beat: Callable[[], None]) -> None:
        """Free the processes of all rollouts for others; if one was lost, end all."""
        self._idle += self._environments.values()
        self._environments.clear()
        if not self._has_lost:
            return
        self._forget()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(b"e")
            if self._served(FORK_TIMEOUT_S, beat).get("failure"):
                self.close()

    def close(self) -> None:
        """End all processes with everything that they started."""
        self._forget()
        if self._server is not None:
            end_with_descendants(self._server, self._mark)
            self._server = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._is_loaded = False

    def _start(self) -> None:
        self._server, self._connection, self._mark = start_marked(
            _START, self._spec.model_dump_json(), output=self._output
        )

    def _process(self, number: int, beat: Callable[[], None]) -> _Process:
        """The process with the environment of a rollout, or one that is idle or new."""
        if number in self._environments:
            return self._environments[number]
        process = self._idle.pop() if self._idle else self._forked(beat)
        if self._spec.environment:
            self._environments[number] = process
        return process

    def _forked(self, beat: Callable[[], None]) -> _Process:
        self.await_loaded(beat)
        assert self._connection is not None
        own, other = socket.socketpair()
        with other, contextlib.suppress(OSError):  # without its process, the request is lost
            socket.send_fds(self._connection, [b"b"], [other.fileno()])
        return _Process(own)

    def _forget(self) -> None:
        """Close the connections to all forked processes, which end at that."""
        for process in (*self._idle, *self._environments.values()):
            process.connection.close()
        self._idle.clear()
        self._environments.clear()
        self._has_lost = False

    def _lose(self, number: int, process: _Process) -> None:
        self._environments.pop(number, None)
        self._has_lost = True
        process.connection.close()
        if process.pid and self._server is not None and self._server.poll() is None:  # only reaped once all are ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _served(self, timeout_s: float, beat: Callable[[], None]) -> Reply:
        """Next message of the first process."""
        assert self._connection is not None
        process = _Process(self._connection, pid=-1)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                beat()
                if selector.select(POLL_INTERVAL_S) and (reply := _received(process)) is not None:
                    return reply
        return _lost(f"did not respond within {timeout_s:.3g} s")


def _sent(process: _Process, request: TurnRequest, timeout_s: float) -> bool:
    process.connection.settimeout(timeout_s)
    try:
        process.connection.sendall(packed(request))
    except OSError:
        return False
    return True


def _received(process: _Process) -> Reply | None:
    """Read what has arrived; returns the next message once it is whole, after the id of the process."""
    try:
        part = process.connection.recv(1 << 20)
    except OSError:
        part = b""
    if not part:
        return _lost("ended its process")
    process.received += part
    while len(process.received) >= HEADER.size:
        end = HEADER.size + HEADER.unpack_from(process.received)[0]
        if len(process.received) < end:
            return None
        body = bytes(process.received[HEADER.size : end])
        del process.received[:end]
        try:
            message: Reply = json.loads(body)
        except ValueError:
            return _lost("wrote to the connection of its process")
        if process.pid:
            return message
        process.pid = int(message["pid"])
    return None


def _lost(reason: str) -> Reply:
    return {"failure": reason, "lost": True}
