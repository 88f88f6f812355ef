"""Warm spares: processes of a node that have imported what a worker needs, and wait to become one.

Most of a restart in place is imports: torch, transformers and DeepSpeed take 5 s of processor time a rank, and longer
from a cold file system. A spare has made them and has touched neither CUDA nor a process group. A start of workers
hands it the command line and the environment of a worker; what is left of the recovery is rendezvous, model and
checkpoint.

A spare is used only where a new process would do the same: not one that is dead or stopped, that does not answer, or
that was started with another environment or from other code. Where memory becomes short, spares are ended first.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import rlhf_core
from rlhf_core.main_memory import memory_bytes
from rlhf_core.worker import processes
from rlhf_core.worker.groups.gpus import VISIBLE_VARIABLE
from rlhf_core.worker.signals import SAVING, held_back
from rlhf_core.worker.worker_process import SLOTS_VARIABLE

READY, TAKEN = b"ready\n", b"taken\n"
"""Answers of a spare: its imports are made; it has become a worker."""

ANSWER_TIMEOUT_S = 2.0
"""Time for a spare to answer that it has become a worker: it has nothing to do but to read a line."""

SPARE_BYTES = 1 << 30
"""Memory of one spare, generously: 0.45 GiB were measured with torch for CPU, its CUDA builds are larger."""

SHORT_OF_MEMORY = 0.1
"""Share of the memory that stays free for the run. Below it spares are ended; none is started that would reach it."""

OF_A_START = frozenset({SLOTS_VARIABLE, processes.GROUP_VARIABLE, VISIBLE_VARIABLE})
"""Variables that each start of workers sets anew. A spare takes them over with its order, before they are read."""

CHECK_INTERVAL_S = 1.0
"""Time between two looks at the spares and at the memory."""


@dataclass
class WarmSpare:
    """One process that waits to become a worker."""

    process: "subprocess.Popen[bytes]"
    orders: int
    """File descriptor to which its order is written."""
    answers: int
    """File descriptor from which its answers are read."""
    fingerprint: str
    """Environment and code that it was started with."""
    is_ready: bool = False

    def read(self, timeout_s: float) -> bytes:
        """Its next answer; empty where none comes in time, or where it has ended."""
        readable, _, _ = select.select([self.answers], [], [], timeout_s)
        return os.read(self.answers, 64) if readable else b""

    def end(self) -> None:
        """End it and collect its exit."""
        processes.kill_group(self.process.pid)
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Let go of the pipes."""
        for descriptor in (self.orders, self.answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class WarmWorkers:
    """The spares of one node. For the main thread of the agent alone: a spare dies with the thread that started it."""

    def __init__(
        self,
        wanted: int,
        say: Callable[[str], None],
        memory: Callable[[], tuple[int, int]] = memory_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start none yet.

        Args:
            wanted: number of spares to keep.
            say: receives sentences for the log of the agent.
            memory: free bytes and all bytes that the processes of this node may use.
        """
        self._wanted = wanted
        self._say = say
        self._memory = memory
        self._clock = clock
        self._spares: list[WarmSpare] = []
        self._checked_s = -CHECK_INTERVAL_S
        self._is_off = False
        self._present = ""
        self.started: set[int] = set()
        """Processes of all spares that were ever started: their exits are read by what started or took them."""

    @property
    def pids(self) -> frozenset[int]:
        """Processes that wait."""
        return frozenset(spare.process.pid for spare in self._spares)

    @property
    def num_ready(self) -> int:
        """Spares that have made their imports."""
        return sum(spare.is_ready for spare in self._spares)

    def keep(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Start what is missing, drop what has ended, and end all where memory is short. Cheap, and called often.

        Args:
            is_wanted: asked once an interval; spares are left as they are while it says no.
        """
        now_s = self._clock()
        if self._is_off or now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        if not is_wanted():
            return
        for spare in list(self._spares):
            self._has_imported(spare)
            if spare.process.poll() is not None:
                self._spares.remove(spare)
                spare.close()
                if not spare.is_ready:  # it would fail again
                    self._turn_off(f"a spare ended with exit code {spare.process.returncode} before it was ready")
                    return
        free, total = self._memory()
        missing = self._wanted - len(self._spares)
        reserve = SHORT_OF_MEMORY * total
        if free < reserve and self._spares:
            self._turn_off(f"memory is short ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free)")
        elif missing and free - missing * SPARE_BYTES >= reserve:
            # Before they start: what changes in between makes them outdated, never current.
            mark = fingerprint()
            self._spares += [self._start(mark) for _ in range(missing)]

    def take(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
        """Turn a spare into a worker.

        Args:
            arguments: of the worker, after ``python -m rlhf_core.worker``.
            environment: its whole environment.

        Returns:
            Its process; None where no spare can be used.
        """
        order = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode() + b"\n"
        while self._spares:
            spare = self._spares.pop(0)
            problem = self._problem(spare) or self._hand_over(spare, order)
            if not problem:
                spare.close()
                return spare.process
            self._say(f"spare {spare.process.pid} is not used: {problem}")
            spare.end()
        return None

    def prepare_start(self) -> None:
        """Prepare a start: workers need the processors, so spares that are still importing are ended."""
        for spare in [one for one in self._spares if not self._has_imported(one)]:
            self._spares.remove(spare)
            spare.end()
        self._present = fingerprint() if self._spares else ""

    def close(self) -> None:
        """End all."""
        while self._spares:
            self._spares.pop().end()

    @staticmethod
    def _has_imported(spare: WarmSpare) -> bool:
        spare.is_ready = spare.is_ready or spare.read(0.0).startswith(READY)
        return spare.is_ready

    def _problem(self, spare: WarmSpare) -> str:
        if spare.process.poll() is not None:
            return f"it ended with exit code {spare.process.returncode}"
        if not self._has_imported(spare):
            return "it is still importing"
        if spare.fingerprint != self._present:
            return "environment or code have changed since it was started"
        state = processes.process_state(spare.process.pid)
        return f"it is in state {state}" if state not in ("S", "R") else ""

    def _hand_over(self, spare: WarmSpare, order: bytes) -> str:
        try:
            with os.fdopen(os.dup(spare.orders), "wb") as pipe:
                pipe.write(order)
        except OSError as error:
            return f"its order could not be written: {error}"
        return "" if spare.read(ANSWER_TIMEOUT_S) == TAKEN else f"it did not answer within {ANSWER_TIMEOUT_S:g} s"

    def _start(self, mark: str) -> WarmSpare:
        order_out, order_in = os.pipe()
        answer_out, answer_in = os.pipe()
        command = [sys.executable, "-u", "-P", "-m", "rlhf_core.worker", "spare", str(order_out), str(answer_in)]
        with held_back(SAVING):
            process = subprocess.Popen(
                command, pass_fds=(order_out, answer_in), stdin=subprocess.DEVNULL, start_new_session=True
            )
        os.close(order_out)
        os.close(answer_in)
        self.started.add(process.pid)
        return WarmSpare(process, order_in, answer_out, mark)

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        self.close()
        self._say(f"no warm spares are kept on this node: {why}")


def fingerprint() -> str:
    """A hash of the environment of this process and of the files of this package, as a new process would find them."""
    digest = blake2b(digest_size=16)
    for name, value in sorted(os.environ.items()):
        if name in OF_A_START:
            continue
        digest.update(f"{name}={value}\0".encode(errors="surrogateescape"))
    for path in sorted(Path(rlhf_core.__file__).parent.rglob("*.py")):
        with contextlib.suppress(OSError):
            status = path.stat()
            digest.update(f"{path}:{status.st_mtime_ns}:{status.st_size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
