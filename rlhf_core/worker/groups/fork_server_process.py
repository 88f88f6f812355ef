"""The fork server's process: makes imports in advance and forks workers and processes of the probe."""

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable

from rlhf_core.errors import WorkerError
from rlhf_core.garbage import uncollected
from rlhf_core.machine.process_identity import stat_fields
from rlhf_core.worker.groups.fork_server import PACKAGE, READY
from rlhf_core.worker.roles import load
from rlhf_core.worker.worker_process import prepare_signals

COMMAND = ("python", "-P", "-m", PACKAGE)
"""Command line that a worker shows."""
ADOPTION_INTERVAL_S = 0.001


def serve(orders: int, answers: int, become: Callable[[list[str]], int]) -> int:
    """Make the imports and fork the workers that are ordered, until the agent is gone.

    Args:
        orders: File descriptor for reading orders, one line of JSON each.
        answers: File descriptor to which the workers' process ids are written.
        become: Runs the worker's command line, in the worker.

    Raises:
        WorkerError: the imports have started threads, which would not survive the fork.
    """
    prepare_signals()
    show_command(["fork-server"])
    while line := _next_line(orders):
        order = json.loads(line)
        if "imports" in order:
            _import(order["imports"])
            os.write(answers, READY)
            continue
        try:
            pid = _fork()
        except OSError as error:
            os.write(answers, f"it cannot fork: {error}\n".encode())
            continue
        if pid == 0:
            os.close(orders)
            os.close(answers)
            _prepare(order["arguments"], order["environment"])
            return become(order["arguments"])
        os.write(answers, f"{pid}\n".encode())
    return 0


def _import(imports: str) -> None:
    with uncollected():
        load(imports)()
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise WorkerError(f"imports started threads ({names}), which a forked worker would lack")


def show_command(arguments: list[str]) -> None:
    """Make ``ps`` show this command line. The kernel reads it from its location at process start."""
    start, end = (int(field) for field in stat_fields(os.getpid())[45:47])
    room = end - start
    shown = b"\0".join(word.encode() for word in (*COMMAND, *arguments))[: room - 1]
    ctypes.memmove(start, shown.ljust(room, b"\0"), room)


def _next_line(orders: int) -> bytes:
    """The next order; empty once no more will come. Read unbuffered: a worker must not inherit a buffer."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(orders, 1 << 16)
        if not part:
            return b""
        line += part
    return line


def _fork() -> int:
    """Double-fork a child of the agent: the intermediate process exits at once, and the agent adopts its child.

    Returns:
        Its process id; 0 in the new process itself.

    Raises:
        OSError: the process cannot be created.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        os.waitpid(child, 0)
        pid = os.read(reader, 64)
        os.close(reader)
        if not pid:
            raise OSError("the forked process ended immediately")
        return int(pid)
    os.close(reader)
    intermediate = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == intermediate:
        time.sleep(ADOPTION_INTERVAL_S)
    os.setsid()
    os.write(writer, str(os.getpid()).encode())  # from now on the agent can kill it through its process group
    os.close(writer)
    return 0


def _prepare(arguments: list[str], environment: dict[str, str]) -> None:
    """Bring a forked process into the state of a newly started one."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    show_command(arguments)
    if "numpy.random" in sys.modules:  # Python reseeds its own generator after a fork
        sys.modules["numpy.random"].seed()
