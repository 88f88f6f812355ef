"""One start of the workers with torch elastic: it deals the ranks and starts the processes.

Everything else is ours. Number and order of the nodes are known from the allocation, so that there is nothing for the
nodes to find out: elastic's own rendezvous unpickles what it finds in a store that anybody who reaches it can write to.
Elastic never restarts (``max_restarts`` is 0, and every start has a rendezvous of its own),
never ends a worker (its way waits 30 s for a stopped one) and never sees a worker die before we have (the order in
which they died is evidence). This is the only module of the agent that imports torch when it is loaded, which is late;
``agent_store.py`` imports its store when several nodes meet.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import WorkerGroup as ElasticGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from rlhf_core.schemas.resources import Role
from rlhf_core.worker.groups.base import PEER_TIMEOUT_S, Exit, Started, WorkerGroup
from rlhf_core.worker.signals import SAVING, SignalInbox, held_back
from rlhf_core.worker.warm_workers import WarmWorkers

MONITOR_INTERVAL_S = 0.1
KILL_TIMEOUT_S = 10.0
PACKAGE = "rlhf_core.worker"
"""Module that a worker's command line runs; its arguments follow."""


@dataclass(frozen=True)
class Start:
    """What elastic needs to know."""

    name: str
    """Of this start; no other one has it."""
    node_index: int
    """Place of this node in the allocation."""
    num_nodes: int
    store: str
    """``host:port`` of agent 0's store for the workers of this start; empty on a single node, which needs none."""
    command: tuple[str, ...]
    """Arguments after the interpreter; the same for every worker."""


class StartAbandoned(Exception):
    """The order to end came before the workers were started."""


def prepare_environment() -> None:
    """Settings that elastic takes from the environment; before the first start.

    All nodes have as many workers, so that ranks need not be told through a store. The list of signals must name at
    least one; SIGQUIT is the one we can take back without a gap that matters.
    """
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # What it would say is in our events already, in other words; what goes wrong in it is raised.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def run_workers(
    start: Start,
    group: WorkerGroup,
    inbox: SignalInbox,
    on_start: Callable[[list[Started]], None],
    on_exit: Callable[[Started, Exit], None],
    has_spoken: Callable[[Started], bool],
    warm: WarmWorkers | None = None,
) -> None:
    """Start the workers of one restart and stay until none of them runs. To be called in the main thread.

    How they ended stands in ``group.exits``.

    Args:
        start: Where to meet, what to run.
        group: Filled as workers start and end.
        inbox: Takes back the signal that elastic takes.
        on_start: Called once, when all are started.
        on_exit: Called for every worker that ends.
        has_spoken: Whether a worker has written its outcome, so that there is nothing more to wait for.
        warm: Spares that workers are made of, where there are any; kept while workers run.

    Raises:
        StartAbandoned: the workers were not started, because they were to end already.
        Exception: whatever elastic raises when processes cannot be started.
    """
    spec = WorkerSpec(
        role=group.role,
        local_world_size=group.num_workers,
        rdzv_handler=_KnownNodes(start),
        entrypoint=sys.executable,
        args=start.command,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    _Workers(spec, group, inbox, on_start, on_exit, has_spoken, warm).run()


class _KnownNodes(RendezvousHandler):
    """A rendezvous of nodes that have met before: nothing is sent, nothing is read, no port is opened."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def get_backend(self) -> str:
        return "known"

    @property
    def use_agent_store(self) -> bool:
        """Workers of several nodes meet in the store of agent 0; rank 0 opens none."""
        return self._start.store != ""

    def next_rendezvous(self) -> RendezvousInfo:
        start = self._start
        host, _, port = start.store.rpartition(":")
        place = RendezvousStoreInfo(host, int(port)) if start.store else RendezvousStoreInfo("127.0.0.1", _unused())
        return RendezvousInfo(HashStore(), start.node_index, start.num_nodes, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is only one start."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._start.name

    def shutdown(self) -> bool:
        return True


def _unused() -> int:
    """A number for MASTER_PORT that nobody else on this machine has just now. Native workers do not listen there, but
    it is part of the names that DeepSpeed gives to shared memory; a target of the user may."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Workers(LocalElasticAgent):
    """Elastic's agent with our way of starting, watching and ending."""

    def __init__(
        self,
        spec: WorkerSpec,
        group: WorkerGroup,
        inbox: SignalInbox,
        on_start: Callable[[list[Started]], None],
        on_exit: Callable[[Started, Exit], None],
        has_spoken: Callable[[Started], bool],
        warm: WarmWorkers | None,
    ) -> None:
        super().__init__(spec, _NoRedirects())
        self._warm = warm
        self._group = group
        self._inbox = inbox
        self._on_start = on_start
        self._on_exit = on_exit
        self._has_spoken = has_spoken

    def _start_workers(self, worker_group: ElasticGroup) -> dict[int, object]:
        if self._group.killing:
            raise StartAbandoned
        started_ns = time.monotonic_ns()
        with held_back(SAVING), _from_spares(self._warm):
            pids: dict[int, int] = super()._start_workers(worker_group)
        self._inbox.install()
        started = {
            worker.local_rank: Started(worker.local_rank, worker.global_rank, pids[worker.local_rank], started_ns)
            for worker in worker_group.workers
        }
        self._group.begin(started)
        self._on_start(list(started.values()))
        return dict(pids)

    def _monitor_workers(self, worker_group: ElasticGroup) -> RunResult:
        self._note_exits()
        if self._group.failed:
            self._settle()
        elif not self._group.all_ended:
            self._keep_spares()
            return RunResult(state=WorkerState.HEALTHY)
        # All have ended, so elastic finds nothing that it could end; it collects their exits.
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _keep_spares(self) -> None:
        # Not while workers import, which need the processors; nor for evaluators, which take what the trainers left.
        if self._warm is not None and self._group.role is Role.TRAINER and self._group.is_past_setup:
            self._warm.keep()

    def _settle(self) -> None:
        """Hear what the peers of the worker that died have to say, then end them, and see them gone."""
        self._wait_until(lambda: all(map(self._is_done, self._group.workers.values())), PEER_TIMEOUT_S)
        self._group.kill()
        self._wait_until(lambda: self._group.all_ended, KILL_TIMEOUT_S)

    def _is_done(self, worker: Started) -> bool:
        return worker.local_rank in self._group.exits or self._has_spoken(worker)

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
            self._note_exits()

    def _note_exits(self) -> None:
        for worker, end in self._group.note_exits():
            self._on_exit(worker, end)

    def _exit_barrier(self) -> None:
        """Do not wait for the other nodes: the agents agree on how a start has ended (``agent_channel.py``)."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 5) -> None:
        if not self._group.all_ended:
            self._group.kill()
        super()._shutdown(signal.SIGKILL, timeout)


@contextlib.contextmanager
def _from_spares(warm: WarmWorkers | None) -> Iterator[None]:
    """Have elastic make workers of warm spares, as far as there are any, for as long as the block lasts."""
    if warm is None:
        yield
        return
    warm.prepare_start()
    before = elastic_processes.get_subprocess_handler  # type: ignore[attr-defined]

    def handler(*arguments: Any, **named: Any) -> SubprocessHandler:
        return _FromSpare(warm, *arguments, **named)

    elastic_processes.get_subprocess_handler = handler  # type: ignore[attr-defined]
    try:
        yield
    finally:
        elastic_processes.get_subprocess_handler = before  # type: ignore[attr-defined]


class _FromSpare(SubprocessHandler):
    """Elastic's handle of one worker, whose process may be a spare."""

    def __init__(self, warm: WarmWorkers, *arguments: Any, **named: Any) -> None:
        self._warm = warm
        super().__init__(*arguments, **named)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        taken = self._warm.take(args[args.index(PACKAGE) + 1 :], env) if PACKAGE in args else None
        return taken if taken is not None else super()._popen(args, env)


class _NoRedirects(LogsSpecs):
    """Workers open their logs themselves, at the paths of the run directory."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        none = dict.fromkeys(envs, "")
        return LogsDest(stdouts=none, stderrs=none, error_files=none)

    @property
    def root_log_dir(self) -> str:
        return ""
