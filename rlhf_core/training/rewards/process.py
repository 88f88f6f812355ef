"""The trainer's side of the reward process: starting it once, enforcing time limits, replacing it.

A reward function is user code applied to model output. It may never return, kill its process, or leave processes
behind; in the trainer's own process each of these would take down the rank. Here it costs one result: a function that
exceeds its limit is killed with everything it started, and the next call uses a new process.
"""

import contextlib
import json
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil

from rlhf_core.errors import BadConfig
from rlhf_core.training.rewards.functions import RewardArguments, RewardCall
from rlhf_core.training.rewards.worker import HEADER, CallRequest

POLL_INTERVAL_S = 0.2
"""Heartbeat interval while a function runs, in seconds."""
LOAD_TIMEOUT_S = 600.0
"""Longest import of a reward function, in seconds: torch alone takes a minute from a cold file system."""
NO_RESPONSE = "did not respond within"
"""Start of the failure of a call that exceeded its time limit."""
KILL_TIMEOUT_S = 10.0
"""Longest wait for processes started by a function to end, in seconds."""
MARK_VARIABLE = "RLHF_REWARD_PROCESS"
"""Environment variable that identifies all descendants of such a process, even those that left its session."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhf_core.training.rewards.worker import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)


class _NoAnswer(Exception):
    """The process does not answer, and has been ended; the message is the reason, as the end of a sentence."""


class RewardProcess:
    """Calls reward functions in a separate process. Main thread only: the process dies with the thread that started
    it."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Start the process, which imports the functions while the caller continues.

        Args:
            paths: ``module:function`` of each function that may be called.
        """
        self._paths = tuple(dict.fromkeys(paths))
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._unread: list[str] = []
        self._start()

    @property
    def pid(self) -> int | None:
        """Id of the process; None after one was ended, until the next call."""
        return self._process.pid if self._process is not None else None

    def call(
        self,
        path: str,
        arguments: RewardArguments,
        seed: int,
        timeout_s: float,
        beat: Callable[[], None],
    ) -> RewardCall:
        """Call one function.

        Args:
            path: one of ``paths``.
            arguments: from :func:`rlhf_core.training.rewards.functions.reward_arguments`.
            seed: seed of the global generators of Python, NumPy and torch, so that a call is reproducible.
            timeout_s: longest wait for the answer, in seconds.
            beat: called at least every ``POLL_INTERVAL_S`` seconds.

        Raises:
            BadConfig: the function cannot be imported.
        """
        self.await_loaded(beat)
        try:
            answer = self._exchange(CallRequest(path, arguments, seed), timeout_s, beat)
        except _NoAnswer as failure:
            return RewardCall(failure=str(failure), returned=False)
        problems = {int(index): problem for index, problem in answer.get("problems", {}).items()}
        return RewardCall(answer.get("values", []), problems, answer.get("failure", ""), trace=answer.get("trace", ""))

    def await_loaded(self, beat: Callable[[], None]) -> None:
        """Wait until all functions are imported.

        Raises:
            BadConfig: one of them cannot be imported.
        """
        if self._process is None:
            self._start()
        while self._unread:
            path = self._unread[0]
            try:
                answer = self._receive(time.monotonic() + LOAD_TIMEOUT_S, LOAD_TIMEOUT_S, beat)
            except _NoAnswer as reason:
                text = f"reward function {path}: its import {reason}; check what its module does on import"
                raise BadConfig(text) from None
            if unloadable := answer.get("unloadable"):
                raise BadConfig(unloadable)
            if failure := answer.get("failure"):
                raise BadConfig(f"reward function {path}: its import {failure}")
            del self._unread[0]

    def close(self) -> None:
        """End the process with everything its functions started."""
        if self._process is not None:
            end_with_descendants(self._process, self._mark)
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _start(self) -> None:
        self._process, own, self._mark = start_marked(_START)
        own.setblocking(False)
        self._connection = own
        self._unread = list(self._paths)
        for path in self._paths:  # a few hundred bytes, which fit into any socket buffer
            own.sendall(packed(CallRequest(path)))

    def _exchange(self, request: CallRequest, timeout_s: float, beat: Callable[[], None]) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            _NoAnswer: there is none; as in the methods below.
        """
        assert self._connection is not None
        deadline, left = time.monotonic() + timeout_s, memoryview(packed(request))
        while left:
            self._wait(deadline, timeout_s, beat, for_writing=True)
            try:
                left = left[self._connection.send(left) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._died() from None
        return self._receive(deadline, timeout_s, beat)

    def _receive(self, deadline: float, timeout_s: float, beat: Callable[[], None]) -> dict[str, Any]:
        header = self._read(HEADER.size, deadline, timeout_s, beat)
        body = self._read(HEADER.unpack(header)[0], deadline, timeout_s, beat)
        try:
            answer: dict[str, Any] = json.loads(body)
        except ValueError:
            self.close()
            raise _NoAnswer("wrote to the connection of its process") from None
        return answer

    def _read(self, count: int, deadline: float, timeout_s: float, beat: Callable[[], None]) -> bytes:
        assert self._connection is not None
        found = bytearray()
        while len(found) < count:
            self._wait(deadline, timeout_s, beat)
            try:
                part = self._connection.recv(count - len(found))
            except BlockingIOError:
                continue
            except OSError:
                part = b""
            if not part:
                raise self._died()
            found += part
        return bytes(found)

    def _wait(self, deadline: float, timeout_s: float, beat: Callable[[], None], *, for_writing: bool = False) -> None:
        """Wait until the connection is ready."""
        assert self._connection is not None
        assert self._process is not None
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self._connection, select.POLLOUT if for_writing else select.POLLIN)
        while True:
            beat()
            left = deadline - time.monotonic()
            wait_s = max(0.0, min(POLL_INTERVAL_S, left))
            if poll.poll(1000 * wait_s):
                return
            # A process forked by it may keep the connection open after it has exited.
            if self._process.poll() is not None:
                raise self._died()
            if left <= 0:
                self.close()
                raise _NoAnswer(f"{NO_RESPONSE} {timeout_s:.3g} s")

    def _died(self) -> _NoAnswer:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closed its end, but is alive
            self._process.wait(POLL_INTERVAL_S)
        code = self._process.returncode
        self.close()
        if code is None:
            return _NoAnswer("closed the connection of its process")
        if code >= 0:
            return _NoAnswer(f"ended its process with exit code {code}")
        name = signal.Signals(-code).name
        likely = ", most likely for memory" if name == "SIGKILL" else ""
        return _NoAnswer(f"had its process ended by {name}{likely}")


def packed(request: object) -> bytes:
    """A request as a message to a process that runs user code."""
    content = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(content)) + content


def start_marked(
    code: str, *arguments: str, output: int | None = None
) -> "tuple[subprocess.Popen[bytes], socket.socket, str]":
    """Start a process that runs user code, in a session of its own.

    Args:
        code: Python that serves a connection. Its arguments are this process's ``sys.path`` as JSON, the descriptor of
            the connection, the id of this process, and ``arguments``.
        output: descriptor of its standard output; by default that of this process.

    Returns:
        The process, this end of the connection, and the mark of its descendants (:data:`MARK_VARIABLE`).
    """
    own, other = socket.socketpair()
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    with other:
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path), str(other.fileno()), str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            pass_fds=[other.fileno()],
            start_new_session=True,
            env={**os.environ, MARK_VARIABLE: mark},
        )
    return process, own, mark


def end_with_descendants(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kill a process and everything it ever started, and wait until all are gone."""
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
    kill_all(lambda: _descendants(process.pid, mark))
    process.kill()
    process.wait()


def kill_all(found: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill processes until none is found any more.

    They are frozen before they are killed: otherwise a process that keeps forking would be chased forever.

    Args:
        found: returns the processes, some of which may have ended; called repeatedly.
    """
    frozen: set[int] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (living := [one for one in found() if _is_alive(one)]) and time.monotonic() < deadline:
        is_whole = {one.pid for one in living} <= frozen
        for one in living:
            with contextlib.suppress(psutil.Error):
                one.kill() if is_whole else one.suspend()
        frozen |= {one.pid for one in living}


def _descendants(pid: int, mark: str) -> list[psutil.Process]:
    """Processes that carry the mark or are children of such: not the process itself."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        found = {child.pid: child for child in psutil.Process(pid).children(recursive=True)}
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.pid not in found and one.environ().get(MARK_VARIABLE) == mark:
                found |= {child.pid: child for child in (one, *one.children(recursive=True))}
    found.pop(pid, None)
    return list(found.values())


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
