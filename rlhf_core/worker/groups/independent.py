"""Independent workers: one process each, restarted individually while all others keep running."""

import math
import time
import traceback
from collections.abc import Callable, Sequence

from rlhf_core.run_dir.attempt import AttemptDir, RestartDir
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.groups.base import Exit, GroupSeat, StartAbandoned, Started, WorkerGroup
from rlhf_core.worker.groups.fork_server import ForkServer
from rlhf_core.worker.groups.gpus import visible_gpus
from rlhf_core.worker.processes import GROUP_VARIABLE

REAP_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 60.0
"""Time that a killed worker has to end, in seconds, as the kernel may take long to free pinned memory. Then it counts
as blocked."""


class IndependentGroup(WorkerGroup):
    """The workers of one group on this node, across all their starts in a phase. Each start has its own generation."""

    def __init__(
        self,
        plan: GroupPlan,
        generation: int,
        seat: GroupSeat,
        attempt: AttemptDir,
        command: Callable[[int], Sequence[str]],
        fork_server: ForkServer | None = None,
    ) -> None:
        """Args:
        generation: Number of the first start.
        attempt: Folder of the attempt.
        command: Returns the interpreter arguments for a generation.
        fork_server: Forks the workers, if given.
        """
        super().__init__(plan, generation, seat, fork_server)
        self.generations = dict.fromkeys(range(self.num_workers), generation)
        """Current generation of each worker, by local rank."""
        self.unstarted: dict[int, str] = {}
        """Workers whose newest start failed, by local rank, with the traceback; their reporter removes them."""
        self._attempt = attempt
        self._command = command

    def folder(self, local_rank: int) -> RestartDir:
        """Folder of a worker's current start."""
        return self.folder_of(self.generations[local_rank])

    def folder_of(self, generation: int) -> RestartDir:
        """Folder of one start."""
        return self._attempt.group(self.role, generation)

    def marker(self, local_rank: int) -> str:
        """Value of ``GROUP_VARIABLE`` for a worker and all its descendants."""
        return f"{self.role}/{local_rank}"

    def start(self) -> None:
        """Start this node's workers; those that cannot be started are in :attr:`unstarted`.

        Raises:
            StartAbandoned: the order to kill arrived before they were started.
        """
        if self.killing:
            raise StartAbandoned
        self.seat.slots.clear()
        for local_rank in range(self.num_workers):
            self._try_to_start(local_rank)
        self.started = True
        self._end_if_killed()

    def restart(self, local_rank: int, generation: int) -> Started | None:
        """Restart one worker that has exited.

        Returns:
            The worker; None if all workers are being killed, or if it cannot be started (:attr:`unstarted`).
        """
        with self._lock:
            if self.killing:
                return None
            self._killed_at_s.pop(local_rank, None)
            self.generation = max(self.generation, generation)
            self.generations[local_rank] = generation
            self.seat.slots.clear_worker(local_rank)
        if self._fork_server is not None:
            self._fork_server.prepare()
        started = self._try_to_start(local_rank)
        self._end_if_killed()
        return started

    def _try_to_start(self, local_rank: int) -> Started | None:
        try:
            started = self._start_worker(local_rank)
        except OSError:
            self.unstarted[local_rank] = traceback.format_exc()
            return None
        with self._lock:
            self.workers[local_rank] = started
            self.exits.pop(local_rank, None)
        return started

    @property
    def blocked(self) -> Sequence[Started]:
        """Workers that were killed but do not end."""
        since_s = time.monotonic() - KILL_TIMEOUT_S
        with self._lock:
            running = [worker for index, worker in self.workers.items() if index not in self.exits]
            return [worker for worker in running if self._killed_at_s.get(worker.local_rank, math.inf) < since_s]

    def poll(self) -> Sequence[tuple[Started, Exit]]:
        """Record exited workers and reap them."""
        found = super().poll()
        for worker, _ in found:
            # The exit code is known already; this only reaps the process.
            self._processes[worker.local_rank].wait(REAP_TIMEOUT_S)
        return found

    def _start_worker(self, local_rank: int) -> Started:
        gpus = visible_gpus(self.plan, self.seat.num_gpus, local_rank)
        command = self._command(self.generations[local_rank])
        return self._launch(local_rank, command, {GROUP_VARIABLE: self.marker(local_rank), **gpus})
