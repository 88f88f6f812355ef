"""One start of the workers with torch elastic: it finds the peers, deals the ranks and starts the processes.

Everything else is ours. Elastic never restarts (``max_restarts`` is 0, and every start has a rendezvous of its own),
never ends a worker (its way waits 30 s for a stopped one) and never sees a worker die before we have (the order in
which they died is evidence). This is the only module of the agent that imports torch when it is loaded, which is late;
``board.py`` imports its store when several nodes meet.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from rlhf_core.worker.signals import SAVING, SignalInbox, held_back
from rlhf_core.worker.watch import PEER_PATIENCE_S, Exit, Started, Watch

JOIN_TIMEOUT_S = 60
"""How long nodes wait for each other at a start."""
MONITOR_INTERVAL_S = 0.1
KILL_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Start:
    """What elastic needs to know."""

    rendezvous_id: str
    endpoint: str
    """``host:port`` of the store that the agents meet in; port 0 for any, on a single node."""
    num_nodes: int
    is_host: bool
    """Whether this agent keeps the store."""
    address: str
    """Address of this node as its peers reach it."""
    command: tuple[str, ...]
    """Arguments after the interpreter; the same for every worker."""


class StartAbandoned(Exception):
    """The order to end came before the workers were started."""


def prepare_environment() -> None:
    """Settings that elastic takes from the environment; before the first start.

    With a shared store (the default) a second start reads the addresses of the first. The list of signals must name at
    least one; SIGQUIT is the one we can take back without a gap that matters.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # What it would say is in our events already, in other words; what goes wrong in it is raised.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def run_workers(
    start: Start,
    watch: Watch,
    inbox: SignalInbox,
    on_start: Callable[[list[Started]], None],
    on_exit: Callable[[Started, Exit], None],
    has_spoken: Callable[[Started], bool],
) -> None:
    """Start the workers of one restart and stay until none of them runs. To be called in the main thread.

    How they ended stands in ``watch.exits``.

    Args:
        start: Where to meet, what to run.
        watch: Filled as workers start and end.
        inbox: Takes back the signal that elastic takes.
        on_start: Called once, when all are started.
        on_exit: Called for every worker that ends.
        has_spoken: Whether a worker has written its outcome, so that there is nothing more to wait for.

    Raises:
        StartAbandoned: the workers were not started, because they were to end already.
        Exception: whatever elastic raises when the nodes do not find each other.
    """
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=start.endpoint,
        run_id=start.rendezvous_id,
        min_nodes=start.num_nodes,
        max_nodes=start.num_nodes,
        local_addr=start.address,
        is_host=str(start.is_host).lower(),
        join_timeout=JOIN_TIMEOUT_S,
    )
    handler = rendezvous_registry.get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role=watch.role,
        local_world_size=watch.num_workers,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=start.command,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=start.address,
    )
    try:
        _Workers(spec, watch, inbox, on_start, on_exit, has_spoken).run()
    finally:
        handler.shutdown()


class _Workers(LocalElasticAgent):
    """Elastic's agent with our way of starting, watching and ending."""

    def __init__(
        self,
        spec: WorkerSpec,
        watch: Watch,
        inbox: SignalInbox,
        on_start: Callable[[list[Started]], None],
        on_exit: Callable[[Started, Exit], None],
        has_spoken: Callable[[Started], bool],
    ) -> None:
        super().__init__(spec, _NoRedirects())
        self._watch = watch
        self._inbox = inbox
        self._on_start = on_start
        self._on_exit = on_exit
        self._has_spoken = has_spoken

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        if self._watch.killing:
            raise StartAbandoned
        started_ns = time.monotonic_ns()
        with held_back(SAVING):
            pids: dict[int, int] = super()._start_workers(worker_group)
        self._inbox.install()
        started = {
            worker.local_rank: Started(worker.local_rank, worker.global_rank, pids[worker.local_rank], started_ns)
            for worker in worker_group.workers
        }
        self._watch.begin(started)
        self._on_start(list(started.values()))
        return dict(pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._note_exits()
        if self._watch.failed:
            self._settle()
        elif not self._watch.all_ended:
            return RunResult(state=WorkerState.HEALTHY)
        # All have ended, so elastic finds nothing that it could end; it collects their exits.
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _settle(self) -> None:
        """Hear what the peers of the worker that died have to say, then end them, and see them gone."""
        self._wait_until(lambda: all(map(self._is_done, self._watch.workers.values())), PEER_PATIENCE_S)
        self._watch.kill()
        self._wait_until(lambda: self._watch.all_ended, KILL_PATIENCE_S)

    def _is_done(self, worker: Started) -> bool:
        return worker.local_rank in self._watch.exits or self._has_spoken(worker)

    def _wait_until(self, condition: Callable[[], bool], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
            self._note_exits()

    def _note_exits(self) -> None:
        for worker, end in self._watch.note_exits():
            self._on_exit(worker, end)

    def _exit_barrier(self) -> None:
        """Not to wait for the other nodes here: how a start has ended is talked over by the agents (``team.py``)."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 5) -> None:
        if not self._watch.all_ended:
            self._watch.kill()
        super()._shutdown(signal.SIGKILL, timeout)


class _NoRedirects(LogsSpecs):
    """Workers open their logs themselves, at the paths of the run directory."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        none = dict.fromkeys(envs, "")
        return LogsDest(stdouts=none, stderrs=none, error_files=none)

    @property
    def root_log_dir(self) -> str:
        return ""
