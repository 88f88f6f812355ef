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
        self._unread: list[str] = []
        self._process: UserProcess | None = self._started()

    @property
    def pid(self) -> int | None:
        """Id of the process; None after one was ended, until the next call."""
        return self._process.popen.pid if self._process is not None else None

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
            answer = self._answer(CallRequest(path, arguments, seed), timeout_s, beat)
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
            self._process = self._started()
        while self._unread:
            path = self._unread[0]
            try:
                answer = self._answer(None, LOAD_TIMEOUT_S, beat)
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
            self._process.end()
            self._process = None

    def _started(self) -> "UserProcess":
        process = UserProcess(_START)
        process.connection.setblocking(False)
        self._unread = list(self._paths)
        for path in self._paths:  # a few hundred bytes, which fit into any socket buffer
            process.connection.sendall(packed(CallRequest(path)))
        return process

    def _answer(self, request: CallRequest | None, timeout_s: float, beat: Callable[[], None]) -> dict[str, Any]:
        """Send a request, if there is one, and return the next answer.

        Raises:
            _NoAnswer: there is none.
        """
        process = self._process
        assert process is not None
        deadline, messages = time.monotonic() + timeout_s, process.messages
        if request is not None:
            messages.put(request)
        try:
            while (answer := messages.next()) is None:
                is_sent = messages.flush()
                self._wait(process, select.POLLIN if is_sent else select.POLLOUT, deadline, timeout_s, beat)
                if is_sent:
                    messages.fill()
        except EOFError:
            raise self._died(process) from None
        except ValueError:
            self.close()
            raise _NoAnswer("wrote to the connection of its process") from None
        return answer

    def _wait(
        self, process: "UserProcess", event: int, deadline: float, timeout_s: float, beat: Callable[[], None]
    ) -> None:
        """Wait until the connection is ready."""
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(process.connection, event)
        while True:
            beat()
            left = deadline - time.monotonic()
            if poll.poll(1000 * max(0.0, min(POLL_INTERVAL_S, left))):
                return
            # A process forked by it may keep the connection open after it has exited.
            if process.popen.poll() is not None:
                raise self._died(process)
            if left <= 0:
                self.close()
                raise _NoAnswer(f"{NO_RESPONSE} {timeout_s:.3g} s")

    def _died(self, process: "UserProcess") -> _NoAnswer:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closed its end, but is alive
            process.popen.wait(POLL_INTERVAL_S)
        code = process.popen.returncode
        self.close()
        if code is None:
            return _NoAnswer("closed the connection of its process")
        if code >= 0:
            return _NoAnswer(f"ended its process with exit code {code}")
        name = signal.Signals(-code).name
        likely = ", most likely for memory" if name == "SIGKILL" else ""
        return _NoAnswer(f"had its process ended by {name}{likely}")


class Messages:
    """Messages with a process that runs user code: pickled requests, and answers in JSON, as far as they have come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def put(self, request: object) -> None:
        """Make a request the next one to send."""
        self._unsent = memoryview(packed(request))

    def flush(self) -> bool:
        """Send what fits into the connection; True once nothing is left. A connection that is closed has nothing left:
        reading from it tells."""
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not self._unsent

    def fill(self) -> None:
        """Read what has arrived.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            part = self._connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            raise EOFError
        self._received += part

    def next(self) -> dict[str, Any] | None:
        """Take the next message; None if it is not whole yet.

        Raises:
            ValueError: it is not JSON.
        """
        if len(self._received) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        body = bytes(self._received[HEADER.size : end])
        del self._received[:end]
        message: dict[str, Any] = json.loads(body)
        return message


def packed(request: object) -> bytes:
    """A request as a message to a process that runs user code."""
    content = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(content)) + content


class UserProcess:
    """A process that runs user code, in a session of its own (``popen``), with this end of the connection to it, and
    the ``messages`` over that."""

    def __init__(self, code: str, *arguments: str, output: int | None = None) -> None:
        """Start it.

        Args:
            code: Python that serves the connection. Its arguments are this process's ``sys.path`` as JSON, the
                descriptor of the connection, the id of this process, and ``arguments``.
            output: descriptor of its standard output; by default that of this process.
        """
        self.connection, other = socket.socketpair()
        self.messages = Messages(self.connection)
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        with other:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(sys.path), str(other.fileno()), str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                pass_fds=[other.fileno()],
                start_new_session=True,
                env={**os.environ, MARK_VARIABLE: self._mark},
            )

    def end(self) -> None:
        """Kill it and everything that it ever started, and wait until all are gone."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGSTOP)
        kill_all(lambda: _descendants(self.popen.pid, self._mark))
        self.popen.kill()
        self.popen.wait()
        self.connection.close()


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
