"""Worker processes of a split vLLM engine; none of them is useful without the others."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlhf_core.errors import SamplingProcessKilled
from rlhf_core.machine.shared_names import SHARED_MEMORY, claim_names, naming_shared_memory
from rlhf_core.machine.variables import with_variables

_SOCKETS = "VLLM_RPC_BASE_PATH"
_EXIT_S = 1.0
"""Time that a process which has closed its connection takes at most to exit, in seconds."""


class EngineProcesses:
    """Processes that end together: once one has ended, the others are killed.

    vLLM asks the others to exit, but one that waits for the lost process in a collective does not react, and vLLM
    resorts to SIGKILL only after 9 s (vLLM 0.32).
    """

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        """Watch running processes; none if the engine computes in this process."""
        self._processes = processes
        self._first: BaseProcess | None = None
        self._is_closing = False
        self._watch = threading.Thread(target=self._end_together, name="engine-processes", daemon=True)
        if processes:
            self._watch.start()

    @property
    def pids(self) -> Sequence[int]:
        """Process ids, in the order of the GPUs."""
        return [one.pid for one in self._processes if one.pid is not None]

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process that ended first, negative for a signal; None while all are running."""
        if self._first is None and all(one.is_alive() for one in self._processes):
            return None
        self._watch.join()
        return None if self._first is None else self._first.exitcode

    def allow_exit(self) -> None:
        """Stop watching the processes, since vLLM now shuts them down."""
        self._is_closing = True

    def _end_together(self) -> None:
        ended = wait([one.sentinel for one in self._processes])
        self._first = next(one for one in self._processes if one.sentinel in ended)
        if not self._is_closing:
            for one in self._processes:
                one.kill()


@contextlib.contextmanager
def starting_in(scratch: Path, represent: Callable[[Sequence[int]], None] = lambda pids: None) -> Iterator[None]:
    """Start the processes of an engine without files that would stay in the folder for temporary files if it is killed
    (vLLM 0.32).

    The file through which they find each other is in ``scratch`` instead. The folder of their sockets is removed once
    they are connected. Their shared memory has its names until then, all with a prefix that is claimed in ``scratch``.

    Args:
        represent: called with the ids of the processes as soon as they exist: the start of one that stops never ends.

    Raises:
        SamplingProcessKilled: a signal ended one of them; the others are ended, too.
    """
    from vllm.v1.executor import multiproc_executor

    name = f"vllm_dist_{uuid4().hex}"  # the memory for collectives on CPU is named after this file, too
    multiproc_executor.get_file_store_init_method = lambda: f"file://{scratch}/{name}"
    claim_names(scratch, name)
    wait_for_ready = multiproc_executor.WorkerProc.wait_for_ready
    # Not in scratch as well: the path of a socket has at most 107 characters. There, the name is a claimed one.
    is_in_memory = _SOCKETS not in os.environ and scratch.is_relative_to(SHARED_MEMORY)
    prefix, place = (f"{name}-", SHARED_MEMORY) if is_in_memory else ("vllm-", os.environ.get(_SOCKETS))
    sockets = tempfile.TemporaryDirectory(prefix=prefix, dir=place)
    try:
        multiproc_executor.WorkerProc.wait_for_ready = partial(_wait_for_ready, wait_for_ready, represent)
        with sockets, naming_shared_memory(name), with_variables({_SOCKETS: sockets.name}):
            yield
    finally:
        multiproc_executor.WorkerProc.wait_for_ready = wait_for_ready


def _wait_for_ready(
    plain: Callable[[Sequence[Any]], list[Any]], represent: Callable[[Sequence[int]], None], handles: Sequence[Any]
) -> list[Any]:
    """Wait as vLLM does, whose error does not tell which process ended and by which signal."""
    represent([one.proc.pid for one in handles])
    try:
        return plain(handles)
    except Exception as error:
        processes: list[BaseProcess] = [one.proc for one in handles]
        ended = wait([one.sentinel for one in processes], _EXIT_S)
        for first in processes:
            if first.sentinel in ended:
                first.join()
                if first.exitcode is not None and first.exitcode < 0:
                    for one in processes:
                        one.kill()
                    raise SamplingProcessKilled(first.exitcode) from error
        raise
