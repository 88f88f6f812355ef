"""The trainer's side of tools and environments: processes that answer side by side, each within a time limit.

A caller submits the requests of single rollouts and collects their replies, without waiting in between if it likes.

A process has one environment at a time, from ``reset`` until the rollouts of a step are over, or answers one call of
tools after another; then it is used again. Once one was lost, all are ended with everything that they started, and new
ones are forked.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.environments.server import TurnRequest
from rlhf_core.training.rewards.process import LOAD_TIMEOUT_S, POLL_INTERVAL_S, Messages, UserProcess

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
    messages: Messages
    server: UserProcess
    """The first process that forked it."""
    pid: int = 0
    """Its first message; 0 before that."""
    deadline: float = 0.0
    limit_s: float = 0.0


class EnvironmentPool:
    """Processes of the rollouts of one rank, for one thread at a time."""

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
        self._waiting: deque[tuple[int, TurnRequest, float]] = deque()
        self._active: dict[int, _Process] = {}
        self._selector = selectors.EpollSelector()
        self._idle: list[_Process] = []
        self._environments: dict[int, _Process] = {}
        self._has_lost = False
        self._others: list[EnvironmentPool] = []
        # A process dies with the thread that started it, and a rollout ahead of training has a short-lived thread.
        self._starter = ThreadPoolExecutor(1, "environments")
        self._server: UserProcess | None = None
        self._is_loaded = False
        if spec.are_used:
            self._start()

    @property
    def pid(self) -> int | None:
        """Id of the first process; None once it has been ended."""
        return self._server.popen.pid if self._server is not None else None

    def await_loaded(self, beat: Callable[[], None]) -> None:
        """Wait until the functions are imported.

        Raises:
            BadConfig: one of them cannot be imported.
        """
        if self._server is None or self._server.popen.poll() is not None:
            # The processes of rollouts ended with it. Their connections tell that to those that wait for an answer, and
            # to those whose environments they had: another process would begin these without a reset.
            self._has_lost = True
            self._end_server()
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
        for number, request in requests.items():
            self.submit(number, request, timeout_s)
        replies: dict[int, Reply] = {}
        while len(replies) < len(requests):
            beat()
            replies |= self.collect(POLL_INTERVAL_S, beat)
        return replies

    def submit(self, number: int, request: TurnRequest, timeout_s: float | None = None) -> None:
        """Have the process of a rollout answer a request, once fewer than ``SIDE_BY_SIDE`` others are answering.

        Args:
            number: number of the rollout, which has no other request.
            timeout_s: time limit of the answer, in seconds; by default ``rollout.turns.timeout_s``.
        """
        self._waiting.append((number, request, self._spec.timeout_s if timeout_s is None else timeout_s))

    def collect(self, wait_s: float, beat: Callable[[], None]) -> dict[int, Reply]:
        """Return the replies that have arrived, by number of the rollout.

        Args:
            wait_s: longest wait for the first of them, in seconds. Only the start of a first process takes longer, if
                the one before has died.
            beat: called during such a start.
        """
        replies: dict[int, Reply] = {}
        while self._waiting and len(self._active) < SIDE_BY_SIDE:
            self._send_next(beat)
        for key, events in self._selector.select(wait_s):
            process = self._active[key.data]
            if events & selectors.EVENT_WRITE and process.messages.flush():
                self._selector.modify(process.connection, selectors.EVENT_READ, key.data)
            if events & selectors.EVENT_READ and (reply := _received(process)) is not None:
                replies[key.data] = self._finish(key.data, reply)
        now = time.monotonic()
        for number, process in list(self._active.items()):
            if process.deadline < now:
                replies[number] = self._finish(number, _lost(f"did not respond within {process.limit_s:.3g} s"))
        return replies

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable once :meth:`collect` has something to return."""
        return self._selector.fileno()

    def release(self, beat: Callable[[], None]) -> None:
        """Free the processes of all rollouts for others; if one was lost, or has not answered yet, end all."""
        self._waiting.clear()
        for number in list(self._active):
            self._finish(number, _lost("was given up"))
        self._idle += self._environments.values()
        self._environments.clear()
        if not self._has_lost:
            return
        self._forget()
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.connection.sendall(b"e")
            if self._served(FORK_TIMEOUT_S, beat).get("failure"):
                self._end()

    def another(self) -> "EnvironmentPool":
        """Start a pool with the same tools for another thread. It is closed with this one."""
        other = EnvironmentPool(self._spec, self._output)
        other.tools, other.has_reward = self.tools, self.has_reward
        self._others.append(other)
        return other

    def close(self) -> None:
        """End all processes with everything that they started."""
        for other in self._others:
            other.close()
        self._end()
        self._starter.shutdown()
        self._selector.close()

    def _end(self) -> None:
        for number in list(self._active):
            self._finish(number, _lost("was given up"))
        self._forget()
        self._end_server()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None
        self._is_loaded = False

    def _start(self) -> None:
        functions = self._spec.model_dump_json(include={"tools", "environment", "parser"})
        self._server = self._starter.submit(UserProcess, _START, functions, output=self._output).result()

    def _send_next(self, beat: Callable[[], None]) -> None:
        number, request, limit_s = self._waiting.popleft()
        self._active[number] = process = self._process(number, beat)
        process.limit_s, process.deadline = limit_s, time.monotonic() + limit_s
        process.messages.put(request)
        events = selectors.EVENT_READ if process.messages.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.register(process.connection, events, number)

    def _finish(self, number: int, reply: Reply) -> Reply:
        process = self._active.pop(number)
        self._selector.unregister(process.connection)
        if reply.get("lost"):
            self._lose(number, process)
        elif number not in self._environments:
            self._idle.append(process)
        return reply

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
        assert self._server is not None
        own, other = socket.socketpair()
        own.setblocking(False)
        with other, contextlib.suppress(OSError):  # without its process, the request is lost
            socket.send_fds(self._server.connection, [b"b"], [other.fileno()])
        return _Process(own, Messages(own), self._server)

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
        # The first process only reaps once all are ended.
        if process.pid and process.server.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _served(self, timeout_s: float, beat: Callable[[], None]) -> Reply:
        """Next message of the first process."""
        assert self._server is not None
        process = _Process(self._server.connection, self._server.messages, self._server, self._server.popen.pid)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.connection, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                beat()
                if selector.select(POLL_INTERVAL_S) and (reply := _received(process)) is not None:
                    return reply
        return _lost(f"did not respond within {timeout_s:.3g} s")


def _received(process: _Process) -> Reply | None:
    """Read what has arrived; returns the next message once it is whole, after the id of the process."""
    try:
        process.messages.fill()
        while (message := process.messages.next()) is not None:
            if process.pid:
                return message
            process.pid = int(message["pid"])
    except EOFError:
        return _lost("ended its process")
    except ValueError:
        return _lost("wrote to the connection of its process")
    return None


def _lost(reason: str) -> Reply:
    return {"failure": reason, "lost": True}
