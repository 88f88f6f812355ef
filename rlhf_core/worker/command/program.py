"""The processes of an external trainer on one node: its launcher, which one worker starts, and one rank."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.errors import BadInput
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.worker.command.launch import LaunchPlace
from rlhf_core.worker.command.launcher_report import await_exit_code
from rlhf_core.worker.command.rank_process import RankProcess, RankSearch
from rlhf_core.worker.in_rank import rlhf_rank_file as words
from rlhf_core.worker.liveness.heartbeat import Beat
from rlhf_core.worker.liveness.inspection import descendants_of

POLL_INTERVAL_S = 0.1
REPORT_TIMEOUT_S = 5.0
"""Time that a launcher has to log the exit code of a rank that it reaped, in seconds: it first ends the other ranks."""
LAUNCHER_TIMEOUT_S = 0.5
"""Time that the launcher of a failed rank has to exit and print what it saw, in seconds."""
_SHELL_SIGNALS = 128
"""Exit code of a shell whose program was ended by a signal, without the number of the signal."""
BLAME_TIMEOUT_S = 1.0
"""Time that the worker of a launcher waits, in seconds, for the worker of the rank that the launcher blames to end."""


class TrainerProgram:
    """One start of the program, as seen by the worker of one rank."""

    def __init__(self, place: LaunchPlace, status: words.RankFile, prefix: str, beat: Beat) -> None:
        """Args:
        status: Status file of the rank.
        prefix: Path of the status files of this node's ranks, without the local rank.
        beat: Heartbeats of the worker, which represent the rank once it is found.
        """
        self.rank: RankProcess | None = None
        """The rank's process, once it is found."""
        self._place = place
        self._local_rank = place.context.local_rank
        self._is_per_node = place.trainer.launch == "per_node"
        self._status = status
        self._prefix = prefix
        self._beat = beat
        self._search = RankSearch(status, prefix, self._local_rank)
        self._child: subprocess.Popen[bytes] | None = None
        self._failed_at_s: float | None = None

    @property
    def launcher(self) -> int | None:
        """Process id of the launcher if this worker has started it."""
        return self._child.pid if self._child is not None else None

    def pids(self) -> list[int]:
        """The rank and its descendants; without a rank, the launcher of this node with all that it has started."""
        pid = self.rank.pid if self.rank is not None else self._status.get(words.LAUNCHER)
        if pid <= 0:
            return []
        with contextlib.suppress(OSError):
            return [pid, *descendants_of(pid)]
        return [pid]

    # -----------------------------------------------------------------------------------------------------------------
    # Start

    @contextlib.contextmanager
    def launched(self) -> Iterator[None]:
        """Start the program if this worker is the one that does, and leave no process of it behind.

        Raises:
            BadInput: there is no such program.
        """
        if not self._is_per_node or self._local_rank == 0:
            self._start()
        try:
            yield
        finally:
            if self._child is not None and self._child.poll() is None:
                self._child.kill()

    def _start(self) -> None:
        expected = range(self._place.ranks_per_node) if self._is_per_node else [self._local_rank]
        while not all(Path(words.rank_path(self._prefix, index)).exists() for index in expected):
            time.sleep(POLL_INTERVAL_S)
        place, arguments = self._place, self._place.arguments()
        folder = Path(place.trainer.environment) if place.trainer.environment else None
        environment = place.environment(self._prefix, os.environ, folder)
        program = place.program(environment.get("PATH"))
        if program is None:
            where = place.working_dir if "/" in arguments[0] else environment.get("PATH")
            raise BadInput(f"found no program {arguments[0]} in {where}; set trainer.environment or its path")
        place.rank_output.mkdir(parents=True, exist_ok=True)
        print(f"starting: {shlex.join(arguments)}", flush=True)
        self._child = subprocess.Popen(
            [program, *arguments[1:]],
            env=environment,
            cwd=place.working_dir,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        self._show_launcher(self._child.pid)

    def _show_launcher(self, pid: int) -> None:
        """Show the launcher to the workers of this node's ranks."""
        if self._is_per_node:
            for index in range(self._place.ranks_per_node):
                words.RankFile(words.rank_path(self._prefix, index)).set(words.LAUNCHER, pid)

    # -----------------------------------------------------------------------------------------------------------------
    # End

    def has_ended(self) -> bool:
        """Wait briefly; True once the program, or this worker's rank of it, has exited."""
        if self.rank is None:
            self._find_rank()
        if self._child is not None:
            if self.rank is not None and not self.rank.has_ended:
                self.rank.poll(POLL_INTERVAL_S)
            else:
                time.sleep(POLL_INTERVAL_S)
            if self._child.poll() is not None:
                self._show_launcher(words.LAUNCHER_ENDED)
                return True
            return self._has_failed()
        if self.rank is None:
            time.sleep(POLL_INTERVAL_S)
            return self._status.get(words.LAUNCHER) == words.LAUNCHER_ENDED
        return self.rank.poll(POLL_INTERVAL_S)

    def _has_failed(self) -> bool:
        """True once the rank has failed and its launcher had a moment to report it: some take seconds to exit."""
        if self.rank is None or not self.rank.has_failed:
            return False
        self._failed_at_s = self._failed_at_s or time.monotonic()
        return time.monotonic() - self._failed_at_s > LAUNCHER_TIMEOUT_S

    def _find_rank(self) -> None:
        pid = self._search.find(time.monotonic())
        if pid is None and not self._is_per_node:
            pid = self.launcher
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.rank = RankProcess(pid)
            self.rank.watch()
            self._beat.represent([pid])

    def exit_code(self) -> int:
        """Exit code of the rank or, if that says more, of its launcher; negative for a signal."""
        self._read_reported_code()
        launcher = self._child.poll() if self._child is not None else None
        of_rank = self.rank.code if self.rank is not None else None
        # The launcher's own exit code, if it has exited, says less than the signal that killed its rank.
        if launcher == 0 or (self._child is not None and (self.rank is None or not self.rank.has_failed)):
            if launcher and of_rank == -signal.SIGTERM:
                time.sleep(BLAME_TIMEOUT_S)  # the agent ends this worker as soon as that of the failed rank has ended
            return _as_signal(launcher or 0)
        return _as_signal(of_rank or 0)

    def _read_reported_code(self) -> None:
        """Read the rank's exit code from the launcher's log if the launcher reaped the rank first."""
        rank, context = self.rank, self._place.context
        if rank is not None and rank.has_ended and rank.code is None and self._is_per_node:
            log = context.restart_dir.log(context.role, context.node, 0)
            rank.code = await_exit_code(log, rank.pid, REPORT_TIMEOUT_S, self._has_launcher_exited)

    def _has_launcher_exited(self) -> bool:
        has_child_exited = self._child is not None and self._child.poll() is not None
        return has_child_exited or (self.rank is not None and self.rank.has_launcher_exited)


def _as_signal(code: int) -> int:
    """Exit code of a process; negative for the signal that ended the program of a shell, which it reports like this."""
    return _SHELL_SIGNALS - code if code - _SHELL_SIGNALS in signal.valid_signals() else code
