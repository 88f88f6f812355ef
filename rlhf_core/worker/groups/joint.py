"""Workers that are started together, once: as soon as one of them fails, all end, and a restart makes a new group.

They find their ranks and each other as under torchrun, by the same environment variables.
"""

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.channel.store import LOOPBACK
from rlhf_core.worker.groups.base import PEER_TIMEOUT_S, Exit, GroupSeat, Started, WorkerGroup
from rlhf_core.worker.groups.fork_server import ForkServer
from rlhf_core.worker.groups.gpus import visible_gpus
from rlhf_core.worker.nodes.membership import unused_port
from rlhf_core.worker.processes import GROUP_VARIABLE, kill_and_reap

KILL_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class JointStart:
    """Parameters of one start."""

    name: str
    """Unique name of this start."""
    store: str
    """``host:port`` of agent 0's store for this start's workers; empty on a single node, which needs none."""
    command: tuple[str, ...]
    """Interpreter arguments; the same for every worker."""
    folder: RestartDir
    """Folder of the workers' files."""


class JointGroup(WorkerGroup):
    """Workers started together, once: a group that restarts as a whole gets a new instance for each generation."""

    def __init__(
        self,
        plan: GroupPlan,
        generation: int,
        seat: GroupSeat,
        start: JointStart,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Args:
        start: Rendezvous and command of the start.
        fork_server: Forks the workers, if given.
        """
        super().__init__(plan, generation, seat, fork_server)
        self._start = start
        self._failed_at_s: float | None = None
        self._ended_at_s: float | None = None

    def folder(self, local_rank: int) -> RestartDir:
        """Folder of this start, shared by all workers."""
        return self._start.folder

    def poll(self) -> Sequence[tuple[Started, Exit]]:
        """Record exited workers. Once one has failed, its peers are killed too, after ``PEER_TIMEOUT_S`` to report what
        they saw."""
        found = super().poll()
        if self._fork_server is not None:
            self._fork_server.watch_memory()
        now_s = time.monotonic()
        if self.failed and not self.all_ended:
            self._failed_at_s = now_s if self._failed_at_s is None else self._failed_at_s
            reported = all(local_rank in self.exits or self.has_reported(local_rank) for local_rank in self.workers)
            if self._ended_at_s is None and (reported or now_s - self._failed_at_s > PEER_TIMEOUT_S):
                self._ended_at_s = now_s
                self.end()
        return found

    @property
    def is_over(self) -> bool:
        """True if no worker is running, or killed ones do not exit."""
        given_up = self._ended_at_s is not None and time.monotonic() - self._ended_at_s > KILL_TIMEOUT_S
        return self.all_ended or given_up

    def close(self) -> None:
        """Kill whatever is left and reap it. Processes that are blocked in the kernel are left behind."""
        if not self.all_ended:
            self.end()
        kill_and_reap(self._processes.values(), CLOSE_TIMEOUT_S)

    def _start_worker(self, local_rank: int) -> Started:
        variables = {**self._shared_variables, "ROLE_RANK": str(self.rank(local_rank))}
        return self._launch(local_rank, self._start.command, variables)

    @functools.cached_property
    def _shared_variables(self) -> Mapping[str, str]:
        """Environment variables of all workers of this node: torchrun's, beside those that limit their GPUs."""
        # Without a store no native worker listens on MASTER_PORT, but a user's target may; DeepSpeed also puts the port
        # into the names of its shared memory.
        host, _, port = (self._start.store or f"{LOOPBACK}:{unused_port(LOOPBACK)}").rpartition(":")
        return {
            GROUP_VARIABLE: self.role.value,
            **visible_gpus(self.plan, self.seat.num_gpus),
            "LOCAL_WORLD_SIZE": str(self.num_workers),
            "GROUP_RANK": str(self.seat.position),
            "GROUP_WORLD_SIZE": str(len(self.plan.nodes)),
            "ROLE_NAME": self.role.value,
            "ROLE_WORLD_SIZE": str(self.plan.num_workers),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": self._start.name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # On several nodes, rank 0 opens no store at MASTER_PORT: that of agent 0 is there.
            "TORCHELASTIC_USE_AGENT_STORE": str(self._start.store != ""),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
