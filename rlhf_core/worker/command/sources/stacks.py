"""Liveness from the Python stacks of a rank, sampled with py-spy.

Detects ranks whose Python stacks do not change at all. Misses endless loops of more than one line, and is misled by
service threads that wake up now and then: a change in any thread counts as progress.

py-spy reads the process's memory without stopping it (``--nonblocking``), so training is not disturbed and a stopped
process can be read too. Reading a running process may give inconsistent stacks, but then they have changed anyway.
"""

import json
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.observation import Reading, Watched
from rlhf_core.worker.evidence.collection import find_py_spy

SAMPLE_S = 5.0
"""Minimum time between the starts of two samples, in seconds."""
TIMEOUT_S = 20.0
"""Longest duration of a sample, in seconds."""
MAX_PROCESSES = 4
"""Maximum number of the rank's processes to sample."""

Stack = tuple[tuple[str, str, int], ...]
"""Function, file and line of each frame, innermost first."""


class _NoStack(Exception):
    """Raised if py-spy gave no stacks; the message says why."""


class Stacks:
    """Python stacks of all threads of the rank's processes, compared with the previous sample."""

    kind = ProgressSource.STACKS

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._program = find_py_spy()
        # Its threads do not hold the worker, which exits without waiting for any.
        self._pool = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="py-spy")
        self._samples: dict[int, Future[dict[int, Stack]]] = {}
        self._began_at_s = float("-inf")
        self._before: dict[int, dict[int, Stack]] = {}

    def poll(self, now_s: float) -> Reading:
        """Collect finished samples and start the next ones, without waiting."""
        if self._program is None:
            return Reading(problem=_MISSING)
        moved, problem = False, ""
        for pid in [pid for pid, sample in self._samples.items() if sample.done()]:
            try:
                stacks = self._samples.pop(pid).result()
            except _NoStack as error:
                self._before.pop(pid, None)
                if Path(f"/proc/{pid}").exists():
                    problem = f"no stack of process {pid} from py-spy: {error}"
            else:
                moved |= pid in self._before and self._before[pid] != stacks
                self._before[pid] = stacks
        if now_s - self._began_at_s >= SAMPLE_S:
            self._begin(self._program, now_s)
        return Reading(moved, problem=problem)

    def _begin(self, program: str, now_s: float) -> None:
        """Start a sample of each process, except those whose last one has not ended: py-spy may hang in the kernel."""
        self._began_at_s = now_s
        pids = list(self._watched.pids())[:MAX_PROCESSES]
        self._before = {pid: stacks for pid, stacks in self._before.items() if pid in pids}
        for pid in pids:
            if pid not in self._samples:
                self._samples[pid] = self._pool.submit(_sample, program, pid)


_MISSING = "stacks are unavailable: py-spy is not installed; it comes with rlhf-flows[training]"


def _sample(program: str, pid: int) -> dict[int, Stack]:
    """Stacks of one process by thread id.

    Raises:
        _NoStack: py-spy cannot be started, fails, or does not answer in time.
    """
    command = (program, "dump", "--nonblocking", "--json", "--pid", str(pid))
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _NoStack(f"no answer within {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise _NoStack(f"it could not be started ({error})") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise _NoStack(reason or f"exit code {done.returncode}")
    try:
        return stacks_of(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError) as error:
        raise _NoStack(f"its response could not be read ({error!r})") from error


def stacks_of(threads: list[dict[str, Any]]) -> dict[int, Stack]:
    """Stacks by thread id, from py-spy's JSON. Thread states are ignored: they change even in waiting threads.

    Raises:
        KeyError, TypeError: the JSON has an unexpected form.
    """
    return {
        thread["thread_id"]: tuple((frame["name"], frame["filename"], frame["line"]) for frame in thread["frames"])
        for thread in threads
    }
