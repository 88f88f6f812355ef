"""Liveness from the Python stacks of a rank, sampled with py-spy.

Detects ranks whose Python stacks do not change at all. Misses endless loops of more than one line, and is misled by
service threads that wake up now and then: a change in any thread counts as progress.

py-spy reads the process's memory without stopping it (``--nonblocking``), so training is not disturbed and a stopped
process can be read too. Reading a running process may give inconsistent stacks, but then they have changed anyway.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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


class Stacks:
    """Python stacks of all threads of the rank's processes, compared with the previous sample."""

    kind = ProgressSource.STACKS

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._program = find_py_spy()
        self._dumps: list[_Dump] = []
        self._began_at_s = float("-inf")
        self._before: dict[int, dict[int, Stack]] = {}

    def poll(self, now_s: float) -> Reading:
        """Collect finished samples and start the next ones, without waiting."""
        if self._program is None:
            return Reading(problem=_MISSING)
        moved, problem, waiting = False, "", []
        for dump in self._dumps:
            if dump.is_running:
                waiting.append(dump)
                if now_s - self._began_at_s > TIMEOUT_S:
                    dump.kill()
                continue
            stacks, reason = dump.result()
            if stacks is None:
                self._before.pop(dump.pid, None)
                problem = f"no stack of process {dump.pid} from py-spy: {reason}" if dump.is_wanted else problem
            else:
                moved |= dump.pid in self._before and self._before[dump.pid] != stacks
                self._before[dump.pid] = stacks
        self._dumps = waiting
        if not waiting and now_s - self._began_at_s >= SAMPLE_S:
            problem = self._begin(now_s) or problem
        return Reading(moved, problem=problem)

    def _begin(self, now_s: float) -> str:
        """Start a sample of each process; returns a sentence if that fails."""
        self._began_at_s = now_s
        pids = list(self._watched.pids())[:MAX_PROCESSES]
        self._before = {pid: stacks for pid, stacks in self._before.items() if pid in pids}
        try:
            self._dumps = [_Dump(str(self._program), pid) for pid in pids]
        except OSError as error:
            return f"stacks are unavailable: py-spy could not be started ({error})"
        return ""


_MISSING = "stacks are unavailable: py-spy is not installed; it comes with rlhf-flows[training]"


class _Dump:
    """One run of py-spy."""

    def __init__(self, program: str, pid: int) -> None:
        """Start it.

        Raises:
            OSError: py-spy cannot be started.
        """
        self.pid = pid
        self._is_late = False
        self._files = ExitStack()
        # Write to in-memory files: a full pipe would block py-spy until it is read.
        self._output = self._files.enter_context(os.fdopen(os.memfd_create("py-spy"), "w+b"))
        self._errors = self._files.enter_context(os.fdopen(os.memfd_create("py-spy"), "w+b"))
        command: Sequence[str] = (program, "dump", "--nonblocking", "--json", "--pid", str(pid))
        try:
            self._process = subprocess.Popen(command, stdout=self._output, stderr=self._errors)
        except OSError:
            self._files.close()
            raise

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_wanted(self) -> bool:
        """True if the sampled process is still alive."""
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """Kill py-spy; a later poll reaps it like any other."""
        self._is_late = True
        with suppress(ProcessLookupError):
            self._process.kill()

    def result(self) -> tuple[dict[int, Stack] | None, str]:
        """Stacks by thread id, or None with the reason."""
        with self._files:
            self._output.seek(0)
            self._errors.seek(0)
            text, reason = self._output.read(), self._errors.read(2_000).decode(errors="replace").strip()
        if self._is_late:
            return None, f"no answer within {TIMEOUT_S:.0f} s"
        if self._process.returncode != 0:
            return None, reason.partition("\n")[0] or f"exit code {self._process.returncode}"
        try:
            return stacks_of(json.loads(text)), ""
        except (ValueError, KeyError, TypeError) as error:
            return None, f"its response could not be read ({error!r})"


def stacks_of(threads: list[dict[str, Any]]) -> dict[int, Stack]:
    """Stacks by thread id, from py-spy's JSON. Thread states are ignored: they change even in waiting threads.

    Raises:
        KeyError, TypeError: the JSON has an unexpected form.
    """
    return {
        thread["thread_id"]: tuple((frame["name"], frame["filename"], frame["line"]) for frame in thread["frames"])
        for thread in threads
    }
