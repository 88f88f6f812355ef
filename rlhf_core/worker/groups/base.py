"""A group of workers on one node, shared by the agent's two threads.

The main thread starts workers and reaps them; the supervising thread reads their slots and may kill them for a hang.
"""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.diagnosis.hangs.verdict import HangVerdict
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import Phase, RankStatus, RepresentedProcess
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker import processes
from rlhf_core.worker.groups.fork_server import ForkServer, start_new
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.liveness.pause_clock import PauseClock
from rlhf_core.worker.worker_process import SLOTS_VARIABLE, spare_outcome

PEER_TIMEOUT_S = 1.0
"""Time that a dead worker's peers have to report what they saw before they are killed, in seconds."""


class StartAbandoned(Exception):
    """Raised if the order to kill arrived before the workers were started."""


@dataclass(frozen=True)
class Started:
    """A started worker."""

    local_rank: int
    rank: int
    pid: int
    started_ns: int
    """Time of the start on the node's monotonic clock, in nanoseconds."""
    oom_kills_before: int
    """The node's OOM kill count before the start."""


@dataclass(frozen=True)
class Exit:
    """The exit of a worker's process."""

    code: int
    """Exit code; negative for a signal."""
    by_agent: bool
    """True if the agent had already begun to kill."""
    wall_s: float
    """Time at which the exit was observed, in seconds since the epoch."""
    last: RankStatus
    """The worker's last status."""


@dataclass(frozen=True)
class Hang:
    """A hang found by agent 0, with the status of the workers on all nodes before they were killed."""

    verdict: HangVerdict
    ranks: tuple[RankStatus, ...]
    silent_s: float
    """Longest silence among the workers to blame when the hang was found, in seconds."""


@dataclass(frozen=True)
class GroupSeat:
    """A group's place on one node."""

    node: str
    """Name of the node."""
    position: int
    """Position of the node among the group's nodes, from 0; -1 if it is not one of them and has no workers."""
    slots: SlotFile
    clock: PauseClock
    num_gpus: int = 0
    """Number of GPUs allocated on the node."""


class WorkerGroup(ABC):
    """The workers of one group on this node."""

    def __init__(
        self, plan: GroupPlan, generation: int, seat: GroupSeat, fork_server: ForkServer | None = None
    ) -> None:
        self.plan = plan
        self.generation = generation
        """Number of the newest start."""
        self.seat = seat
        self.num_workers = plan.workers_per_node if seat.position >= 0 else 0
        """Number of workers on this node."""
        self.workers: dict[int, Started] = {}
        """Started workers by local rank; filled once all are started."""
        self.exits: dict[int, Exit] = {}
        """Exits by local rank."""
        self.started = False
        """True once all workers are started."""
        self.killing = False
        """True once the agent has begun to kill all workers: later exits say nothing about the cause."""
        self.hang: Hang | None = None
        """The hang for which all workers were killed."""
        self._fork_server = fork_server
        self._processes: dict[int, processes.Child] = {}
        self._killed_at_s: dict[int, float] = {}
        self._lock = threading.Lock()

    # -----------------------------------------------------------------------------------------------------------------
    # Starting and ending

    def start(self) -> None:
        """Start this node's workers.

        Raises:
            StartAbandoned: the order to kill arrived before they were started.
            OSError: a process cannot be started.
        """
        if self.killing:
            raise StartAbandoned
        self.seat.slots.clear()
        started = {local_rank: self._start_worker(local_rank) for local_rank in range(self.num_workers)}
        with self._lock:
            self.workers = started
            self.started = True
        self._end_if_killed()

    @abstractmethod
    def _start_worker(self, local_rank: int) -> Started:
        """Start one worker with :meth:`_launch`.

        Raises:
            OSError: the process cannot be started.
        """

    @abstractmethod
    def folder(self, local_rank: int) -> RestartDir:
        """Folder of one worker's files."""

    def poll(self) -> Sequence[tuple[Started, Exit]]:
        """Record workers that exited since the last call, in the order observed."""
        with self._lock:
            found = []
            for local_rank, worker in self.workers.items():
                code = None if local_rank in self.exits else processes.peek_exit(worker.pid)
                if code is not None:
                    by_agent = code == -9 and (self.killing or local_rank in self._killed_at_s)
                    one = Exit(code, by_agent, time.time(), self.read(worker))
                    self.exits[local_rank] = one
                    found.append((worker, one))
            return found

    def living(self) -> Sequence[RankStatus]:
        """Current statuses of the running workers, read from their slots; empty before they are started."""
        workers = list(self.workers.items())
        return [self.read(worker) for local_rank, worker in workers if local_rank not in self.exits]

    def end(self, workers: Collection[int] | None = None) -> None:
        """Kill workers and their process groups at once. Neither a stopped process nor a signal handler can delay this.

        Args:
            workers: Their local ranks; None for all, including those being started.
        """
        with self._lock:
            self.killing = self.killing or workers is None
            for index in self.workers if workers is None else workers:
                self._killed_at_s.setdefault(index, time.monotonic())
            running = {index: worker for index, worker in self.workers.items() if index not in self.exits}
            pids = [worker.pid for index, worker in running.items() if workers is None or index in workers]
        for pid in pids:
            processes.kill_group(pid)

    def close(self) -> None:  # noqa: B027 - most groups have nothing to release
        """Release what remains of workers that have exited or are given up."""

    def _launch(self, local_rank: int, command: Sequence[str], variables: Mapping[str, str]) -> Started:
        """Start one worker: forked if the group has a fork server, otherwise as a new process.

        Args:
            local_rank: Its local rank.
            command: Interpreter arguments.
            variables: Environment variables beside those of its rank and slot.

        Raises:
            OSError: the process cannot be started.
        """
        rank = self.rank(local_rank)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.plan.num_workers),
            SLOTS_VARIABLE: str(self.seat.slots.path),
            **variables,
        }
        oom_kills, started_ns = processes.oom_kills(), time.monotonic_ns()
        start = start_new if self._fork_server is None else self._fork_server.start
        process = start(command, environment)
        self._processes[local_rank] = process
        return Started(local_rank, rank, process.pid, started_ns, oom_kills)

    def _end_if_killed(self) -> None:
        """Kill the workers again if the order arrived while they were being started."""
        if self.killing:
            self.end()

    # -----------------------------------------------------------------------------------------------------------------
    # State

    @property
    def role(self) -> Role:
        """The group's role, which identifies it."""
        return self.plan.role

    @property
    def is_alone(self) -> bool:
        """True if its workers restart individually."""
        return self.plan.restart == "alone"

    @property
    def failed(self) -> bool:
        """True if a worker failed, or the agent is killing them."""
        return self.killing or any(end.code != 0 for end in self.exits.values())

    @property
    def all_ended(self) -> bool:
        """True if no worker is running."""
        return self.started and len(self.exits) == len(self.workers)

    @property
    def is_over(self) -> bool:
        """True if there is nothing left to wait for."""
        return self.all_ended

    def outcome_path(self, local_rank: int) -> Path:
        """File with a worker's own outcome."""
        return self.folder(local_rank).worker_outcome(self.role, self.seat.node, local_rank)

    def has_reported(self, local_rank: int) -> bool:
        """True if a worker has written its outcome."""
        spare = spare_outcome(self.seat.slots.path, local_rank)
        return self.outcome_path(local_rank).exists() or spare.exists()

    def rank(self, local_rank: int) -> int:
        """Rank of a worker in its group."""
        return self.seat.position * self.plan.workers_per_node + local_rank

    def read(self, worker: Started) -> RankStatus:
        """A worker's status from its slot; until it takes its slot, it counts as in setup since its start."""
        slot = self.seat.slots.read(worker.local_rank)
        has_slot = slot.pid == worker.pid
        beat_ns = slot.beat_ns if has_slot else worker.started_ns
        represented = slot.represents if has_slot else ()
        return RankStatus(
            role=self.plan.role,
            node=self.seat.node,
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            sequence=slot.sequence if has_slot else 0,
            collectives=slot.entered if has_slot else 0,
            in_collective=has_slot and slot.entered > slot.left,
            step=slot.step if has_slot else 0,
            phase=slot.phase if has_slot else Phase.SETUP,
            age_s=round(self.seat.clock.age_s(beat_ns / 1e9, time.monotonic()), 3),
            process_state=processes.process_state(worker.pid),
            speaks_for=tuple(
                RepresentedProcess(pid=pid, process_state=processes.process_state(pid)) for pid in represented
            ),
            warm=has_slot and slot.warm,
        )
