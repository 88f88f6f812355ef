"""One start of the workers with torch elastic, which assigns the ranks and starts the processes.

Everything else is done here. The allocation gives the number and order of the nodes, so no rendezvous is needed, and
elastic's own would unpickle the content of a store that any program can write to. Elastic never restarts workers
(``max_restarts`` is 0, and every start has its own rendezvous), never kills one (it would wait 30 s for a stopped one)
and never reaps one before we have seen its exit (the order of exits is evidence). This is the agent's only module that
imports torch at load time, and it is loaded late; ``channel/store.py`` imports torch's store for several nodes.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerGroup as TorchGroup
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from rlhf_core.machine.variables import with_variables
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.channel.store import LOOPBACK
from rlhf_core.worker.groups.base import (
    ELASTIC_VARIABLES,
    PEER_TIMEOUT_S,
    Exit,
    GroupSeat,
    StartAbandoned,
    Started,
    WorkerGroup,
)
from rlhf_core.worker.groups.fork_server import ForkServer, arguments_of
from rlhf_core.worker.groups.gpus import visible_gpus
from rlhf_core.worker.nodes.membership import unused_port
from rlhf_core.worker.processes import GROUP_VARIABLE, kill_and_reap
from rlhf_core.worker.signals import SAVING, SignalInbox, held_back
from rlhf_core.worker.worker_process import SLOTS_VARIABLE

KILL_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5


@dataclass(frozen=True)
class ElasticStart:
    """Parameters of one elastic start."""

    name: str
    """Unique name of this start."""
    store: str
    """``host:port`` of agent 0's store for this start's workers; empty on a single node, which needs none."""
    command: tuple[str, ...]
    """Interpreter arguments; the same for every worker."""
    folder: RestartDir
    """Folder of the workers' files."""


def prepare_environment() -> None:
    """Set the environment variables that elastic reads; call before the first start."""
    os.environ.update(ELASTIC_VARIABLES)
    # Our events already cover what elastic would log, and it raises its errors.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


class ElasticGroup(WorkerGroup):
    """Workers started together, once: a group that restarts as a whole gets a new instance for each generation.

    Call ``start`` and ``poll`` only in the main thread.
    """

    def __init__(
        self,
        plan: GroupPlan,
        generation: int,
        seat: GroupSeat,
        start: ElasticStart,
        inbox: SignalInbox,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Args:
        start: Rendezvous and command of the start.
        inbox: Reclaims the signal handler that elastic installs.
        fork_server: Forks the workers, if given.
        """
        super().__init__(plan, generation, seat)
        self._fork_server = fork_server
        self._start = start
        self._inbox = inbox
        self._elastic: _Elastic | None = None
        self._failed_at_s: float | None = None
        self._ended_at_s: float | None = None

    def folder(self, local_rank: int) -> RestartDir:
        """Folder of this start, shared by all workers."""
        return self._start.folder

    def start(self) -> None:
        """Start this node's workers.

        Raises:
            StartAbandoned: the order to kill arrived before they were started.
            Exception: whatever elastic raises if processes cannot be started.
        """
        if self.num_workers == 0:
            self._begin({})
            return
        prepare_environment()
        self.seat.slots.clear()
        spec = WorkerSpec(
            role=self.role,
            local_world_size=self.num_workers,
            rdzv_handler=_KnownNodes(self._start, self.seat.position, len(self.plan.nodes)),
            entrypoint=sys.executable,
            args=self._start.command,
            max_restarts=0,
        )
        self._elastic = _Elastic(spec, lambda: self.killing)
        started_ns = time.monotonic_ns()
        # Workers inherit this process's environment through elastic, and only this thread starts workers.
        own = {SLOTS_VARIABLE: str(self.seat.slots.path), GROUP_VARIABLE: self.role.value}
        environment = {**own, **visible_gpus(self.plan, self.seat.num_gpus)}
        with with_variables(environment), _forked_by(self._fork_server):
            started = self._elastic.launch()
        self._inbox.install()
        self._begin({local: Started(local, rank, pid, started_ns) for local, (rank, pid) in started.items()})

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
        """Kill whatever is left and reap it."""
        if self._elastic is not None:
            if not self.all_ended:
                self.end()
            self._elastic.close()


class _KnownNodes(RendezvousHandler):
    """A rendezvous of nodes that are already known: it sends nothing, reads nothing and opens no port."""

    def __init__(self, start: ElasticStart, node_index: int, num_nodes: int) -> None:
        self._start = start
        self._node_index = node_index
        self._num_nodes = num_nodes

    def get_backend(self) -> str:
        return "known"

    @property
    def use_agent_store(self) -> bool:
        """True for several nodes: their workers use agent 0's store, and rank 0 opens none."""
        return self._start.store != ""

    def next_rendezvous(self) -> RendezvousInfo:
        start = self._start
        host, _, port = start.store.rpartition(":")
        # Without a store no native worker listens on MASTER_PORT, but a user's target may; DeepSpeed also puts the port
        # into the names of its shared memory.
        endpoint = (host, int(port)) if start.store else (LOOPBACK, unused_port(LOOPBACK))
        addresses = RendezvousStoreInfo(*endpoint)
        return RendezvousInfo(HashStore(), self._node_index, self._num_nodes, addresses)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is only one start."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._start.name

    def shutdown(self) -> bool:
        return True


class _Elastic(LocalElasticAgent):
    """Elastic's agent with our own start and shutdown; its loop never runs."""

    def __init__(self, spec: WorkerSpec, is_ending: Callable[[], bool]) -> None:
        super().__init__(spec, _NoRedirects())
        self._is_ending = is_ending

    def launch(self) -> dict[int, tuple[int, int]]:
        """Assign ranks and start the processes; returns rank and process id by local rank."""
        self._initialize_workers(self._worker_group)
        return {worker.local_rank: (worker.global_rank, worker.id) for worker in self._worker_group.workers}

    def close(self) -> None:
        """Reap the processes, killing those still running. Those that are blocked in the kernel are left behind."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        left = kill_and_reap([handler.proc for handler in handlers.values()], CLOSE_TIMEOUT_S)
        for local_rank, handler in list(handlers.items()):
            if handler.proc.pid in left:
                del handlers[local_rank]  # elastic would wait for it, before torch 2.13 without a limit
        self._shutdown(signal.SIGKILL)

    def _start_workers(self, worker_group: TorchGroup) -> dict[int, object]:
        if self._is_ending():
            raise StartAbandoned
        with held_back(SAVING):
            return dict(super()._start_workers(worker_group))


@contextlib.contextmanager
def _forked_by(server: ForkServer | None) -> Iterator[None]:
    """Make elastic take workers from a fork server, if it can supply them, for the duration of the block."""
    if server is None:
        yield
        return
    original = elastic_processes.get_subprocess_handler  # type: ignore[attr-defined]

    def handler(*arguments: Any, **keywords: Any) -> SubprocessHandler:
        return _Forked(server, *arguments, **keywords)

    elastic_processes.get_subprocess_handler = handler  # type: ignore[attr-defined]
    try:
        yield
    finally:
        elastic_processes.get_subprocess_handler = original  # type: ignore[attr-defined]


class _Forked(SubprocessHandler):
    """Elastic's handle of one worker, whose process may come from the fork server."""

    def __init__(self, server: ForkServer, *arguments: Any, **keywords: Any) -> None:
        self._server = server
        super().__init__(*arguments, **keywords)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        forked = self._server.fork(arguments_of(args), env)
        # Elastic only reads the pid, polls and waits, all of which a forked worker supports.
        return super()._popen(args, env) if forked is None else cast("subprocess.Popen[bytes]", forked)


class _NoRedirects(LogsSpecs):
    """No redirects: workers open their own logs in the run directory."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        none = dict.fromkeys(envs, "")
        return LogsDest(stdouts=none, stderrs=none, error_files=none)

    @property
    def root_log_dir(self) -> str:
        return ""
