"""Worker processes of a split vLLM engine; none of them is useful without the others."""

import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess


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
