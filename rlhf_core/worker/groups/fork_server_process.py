"""The process of a fork server: it makes the imports of a worker, and forks one for each order that comes."""

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_core.errors import WorkerError
from rlhf_core.garbage import uncollected
from rlhf_core.worker.groups.fork_server import PACKAGE, READY
from rlhf_core.worker.roles import WARM, load
from rlhf_core.worker.worker_process import prepare_signals

COMMAND = ("python", "-P", "-m", PACKAGE)
"""Command line under which a worker shows itself."""
ADOPTION_INTERVAL_S = 0.001


def serve(orders: int, answers: int, become: Callable[[list[str]], int]) -> int:
    """Make the imports, and fork a worker for each order. An agent that is gone sends none: this process ends.

    Args:
        orders: file descriptor from which orders are read, each a line of JSON.
        answers: file descriptor to which the process ids of the workers are written.
        become: runs the command line of the worker, in the worker.

    Raises:
        WorkerError: the imports have started threads, which a worker would be without.
    """
    prepare_signals()
    show_command(["fork-server"])
    with uncollected():
        load(WARM)()
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise WorkerError(f"imports have started threads ({names}), which a forked worker would be without")
    os.write(answers, READY)
    while line := _next_line(orders):
        order = json.loads(line)
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


def show_command(arguments: list[str]) -> None:
    """Have ``ps`` show this command line. The kernel reads it from where it lay when the process was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(field) for field in fields[45:47])
    room = end - start
    shown = b"\0".join(word.encode() for word in (*COMMAND, *arguments))[: room - 1]
    ctypes.memmove(start, shown.ljust(room, b"\0"), room)


def _next_line(orders: int) -> bytes:
    """The next order; empty once there is none to come. Read by hand: a worker must not inherit a buffer."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(orders, 1 << 16)
        if not part:
            return b""
        line += part
    return line


def _fork() -> int:
    """Fork a process that is a child of the agent: the one between ends at once, and the agent adopts what it leaves.

    Returns:
        Its process id; 0 in the process itself.

    Raises:
        OSError: there is no room for it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        os.waitpid(child, 0)
        told = os.read(reader, 64)
        os.close(reader)
        if not told:
            raise OSError("the process that was forked has ended at once")
        return int(told)
    os.close(reader)
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(ADOPTION_INTERVAL_S)
    os.setsid()
    os.write(writer, str(os.getpid()).encode())  # from now on the agent can end it, as the leader of its group
    os.close(writer)
    return 0


def _prepare(arguments: list[str], environment: dict[str, str]) -> None:
    """Make a forked process what a new one would be."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    show_command(arguments)
    if "numpy.random" in sys.modules:  # Python does it with its own generator
        sys.modules["numpy.random"].seed()
