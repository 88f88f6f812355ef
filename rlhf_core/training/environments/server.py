"""Processes of tools and environments, forked from one that has imported them: one for each rollout at a time.

A rollout that hangs, crashes or runs out of memory takes no other with it, and all of a rank are answered side by side.
A fork costs milliseconds, an import seconds. Does not itself import torch or pydantic.

The first process serves the trainer's connection: a message with a descriptor forks a process that serves rollouts over
it; any other ends all of them with everything that they started. Requests are pickled and answers are
JSON, as in ``rewards/worker.py``.
"""

import contextlib
import dataclasses
import json
import os
import socket
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import psutil

from rlhf_core.errors import BadConfig
from rlhf_core.machine.parent_death import adopt_orphans, die_with_parent
from rlhf_core.survival import Survived
from rlhf_core.training.environments.functions import RolloutTools, Toolbox
from rlhf_core.training.rewards.process import kill_all
from rlhf_core.training.rewards.worker import prepare, seed_generators, send, serve_requests


@dataclass(frozen=True)
class TurnRequest:
    """A request of one rollout."""

    kind: Literal["describe", "reset", "answer", "reward"]
    """Method of ``RolloutTools`` to call, or ``describe`` of ``Toolbox``."""
    seed: int = 0
    """Seed of the global generators of Python, NumPy and torch during the call."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the method."""


def serve(descriptor: int, parent: int, functions: str) -> NoReturn:
    """Import the functions, and serve the trainer until it closes the connection.

    Args:
        descriptor: socket to the trainer.
        parent: process id of the trainer; this process dies with it.
        functions: arguments of ``Toolbox`` as JSON.
    """
    prepare(parent)
    adopt_orphans()
    connection, own = socket.socket(fileno=descriptor), os.getpid()
    try:
        toolbox = Toolbox(**json.loads(functions))
    except BadConfig as error:
        send(connection, {"unloadable": str(error)})
        os._exit(0)
    send(connection, {})
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not message:
            os._exit(0)
        if descriptors:
            if os.fork() == 0:
                connection.close()
                die_with_parent(parent=own)
                _serve_rollouts(toolbox, socket.socket(fileno=descriptors[0]))
            os.close(descriptors[0])
        else:
            kill_all(lambda: psutil.Process().children(recursive=True))
            _reap()
            send(connection, {})


def _serve_rollouts(toolbox: Toolbox, connection: socket.socket) -> NoReturn:
    tools: RolloutTools | None = None

    def answer(asked: TurnRequest) -> dict[str, Any]:
        nonlocal tools
        seed_generators(asked.seed)
        with Survived(also=(SystemExit, KeyboardInterrupt)) as failed:  # of user code: a failed call like any other
            if asked.kind == "describe":
                return toolbox.describe()
            if tools is None or asked.kind == "reset":
                tools = RolloutTools(toolbox)
            return _answer(tools, asked)
        return {"failure": f"raised {failed.problem}"}

    with contextlib.suppress(OSError):  # the trainer is gone
        send(connection, {"pid": os.getpid()})
    serve_requests(connection, answer)


def _answer(tools: RolloutTools, asked: TurnRequest) -> dict[str, Any]:
    if asked.kind == "reset":
        return {"text": tools.reset(**asked.arguments)}
    if asked.kind == "reward":
        return {"reward": tools.reward()}
    return dataclasses.asdict(tools.answer(**asked.arguments))


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
