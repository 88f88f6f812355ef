"""Process of the reward functions: imports and calls them, and returns the results. Does not itself import torch.

Messages go over a socket, each preceded by its length. Requests are pickled, since only the trainer can send them.
Responses are JSON, so that the trainer never executes anything that a reward function returns.
"""

import contextlib
import json
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rlhf_core.errors import BadConfig
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.training.rewards.functions import RewardArguments, RewardCall, RewardFunction, call_reward, load_reward

HEADER = struct.Struct("!Q")
"""Prefix of a message: its length in bytes."""

_FIRST_VICTIM = "1000"
_SEEDED = ("numpy", "torch")


@dataclass(frozen=True)
class CallRequest:
    """A request of the trainer: import a function, and call it if there are arguments."""

    path: str
    """``module:function``."""
    arguments: RewardArguments | None = None
    seed: int = 0
    """Seed of the global generators of Python, NumPy and torch."""


def serve(descriptor: int, parent: int) -> NoReturn:
    """Serve requests until the trainer closes the connection.

    Args:
        descriptor: socket to the trainer.
        parent: process id of the trainer; this process dies with it.
    """
    prepare(parent)
    functions: dict[str, RewardFunction] = {}
    serve_requests(socket.socket(fileno=descriptor), lambda request: _answer(request, functions))


def serve_requests(connection: socket.socket, answer: Callable[[Any], dict[str, Any]]) -> NoReturn:
    """Answer requests by user code until the trainer closes the connection.

    Args:
        answer: returns the answer to a request.
    """
    own = os.getpid()
    try:
        while request := receive(connection):
            found = answer(pickle.loads(request))
            if os.getpid() != own:
                break  # a child that user code forked, and that returned here
            with contextlib.suppress(OSError, ValueError):  # closed by user code
                sys.stdout.flush()
            send(connection, found)
    except OSError:  # closed by user code, or the trainer is gone
        os._exit(1)
    except Exception:  # noqa: BLE001 - a mistake of this code; the trainer sees that the process has ended
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)  # neither threads left over by user code nor the loop of the process it was forked from


def prepare(parent: int) -> None:
    """Make this process end with its trainer instead of the job, and be the first victim when memory runs out."""
    die_with_parent(parent=parent)
    # A scheduler may send SIGTERM to every process of a job, but the trainer decides when this one ends. A handler is
    # used because ignored signals stay ignored in programs that user code starts.
    signal.signal(signal.SIGTERM, _leave_it_to_the_trainer)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM)


def _leave_it_to_the_trainer(number: int, frame: FrameType | None) -> None:
    """Ignore the signal: the trainer ends this process."""


def send(connection: socket.socket, answer: dict[str, Any]) -> None:
    """Send an answer as JSON."""
    body = json.dumps(answer).encode()
    connection.sendall(HEADER.pack(len(body)) + body)


def receive(connection: socket.socket) -> bytes:
    """Receive the next message; empty once the trainer has closed the connection."""
    header = _receive_exactly(connection, HEADER.size)
    return _receive_exactly(connection, HEADER.unpack(header)[0]) if header else b""


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _answer(request: CallRequest, functions: dict[str, RewardFunction]) -> dict[str, Any]:
    try:
        if request.path not in functions:
            functions[request.path] = load_reward(request.path)
        if request.arguments is None:
            return {}
        called = _call(functions[request.path], request.arguments, request.seed)
    except BadConfig as error:
        return {"unloadable": str(error)}
    except BaseException as error:  # noqa: BLE001 - SystemExit of user code must not end a process that others need
        return {"failure": f"raised {type(error).__name__}: {error}"}
    trace = "".join(traceback.format_exception(called.error)) if called.error is not None else ""
    problems = {str(index): problem for index, problem in called.problems.items()}
    return {"values": called.values, "problems": problems, "failure": called.failure, "trace": trace}


def _call(function: RewardFunction, arguments: RewardArguments, seed: int) -> RewardCall:
    """Call the function with seeded generators. A call that is the first to import NumPy or torch is repeated, because
    its draws from their unseeded generators are not reproducible."""
    while True:
        seeded = seed_generators(seed)
        called = call_reward(function, arguments)
        if seeded == {name for name in _SEEDED if name in sys.modules}:
            return called


def seed_generators(seed: int) -> set[str]:
    """Seed the generators of all imported libraries; return their names."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % (1 << 32))
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    return {name for name in _SEEDED if name in sys.modules}
