"""A group of workers on one node, as the agent's two threads share it.

The main thread starts workers and sees them end; the supervising thread reads their slots and may decide that they
hang.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlhf_core.diagnosis.hangs.verdict import Verdict
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.reports import Phase, RankStatus, SpokenFor
from rlhf_core.schemas.resources import GroupPlan, Role
from rlhf_core.worker import processes
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.liveness.pause_clock import PauseClock

ELASTIC_VARIABLES = {"TORCH_ELASTIC_WORKER_IDENTICAL": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}
"""Settings that torch elastic takes from the agent's environment. All nodes have as many workers, so that ranks need
not be told through a store. The list of signals must name at least one; SIGQUIT is the one we can take back without a
gap that matters."""

PEER_TIMEOUT_S = 1.0
"""Time in which the peers of a worker that died may say what they saw, before they are killed."""


class StartAbandoned(Exception):
    """The order to end came before the workers were started."""


@dataclass(frozen=True)
class Started:
    """A worker that was started."""

    local_rank: int
    rank: int
    pid: int
    started_ns: int
    """Time of the start on the node's monotonic clock, in nanoseconds."""


@dataclass(frozen=True)
class Exit:
    """The end of a worker's process."""

    code: int
    """Negative: the signal."""
    order: int
    """Place in the order in which they ended, from 0."""
    by_agent: bool
    """After the agent had begun to kill."""
    wall_s: float
    """Time at which that was seen, in seconds since the epoch."""
    last: RankStatus
    """Its last status."""


@dataclass(frozen=True)
class Hang:
    """A hang that agent 0 has judged, with the workers of all nodes as they were before they were killed."""

    verdict: Verdict
    ranks: tuple[RankStatus, ...]
    silent_s: float
    """Longest silence of those to blame when the hang was found, in seconds."""


@dataclass(frozen=True)
class GroupSeat:
    """The place of a group on one node."""

    node: str
    """Name of the node."""
    position: int
    """Place of the node among those of the group, from 0; -1 where it is none of them, and has no workers."""
    slots: SlotFile
    clock: PauseClock


class WorkerGroup(ABC):
    """The workers of one group on this node."""

    def __init__(self, plan: GroupPlan, generation: int, seat: GroupSeat) -> None:
        self.plan = plan
        self.generation = generation
        """Number of its newest start."""
        self.seat = seat
        self.num_workers = plan.workers_per_node if seat.position >= 0 else 0
        """Workers on this node."""
        self.workers: dict[int, Started] = {}
        """By local rank; filled once all are started."""
        self.exits: dict[int, Exit] = {}
        """By local rank."""
        self.started = False
        """True once all workers were started."""
        self.killing = False
        """The agent has begun to kill all of them: whatever ends from now on says nothing by itself."""
        self.hang: Hang | None = None
        """Judgement for which all of them were killed."""
        self.oom_kills_before = processes.oom_kills()
        """The node's count of processes killed for want of memory, before the workers were started."""
        self._ended: set[int] = set()
        self._num_exits = 0
        self._lock = threading.Lock()

    # -----------------------------------------------------------------------------------------------------------------
    # Starting and ending

    @abstractmethod
    def start(self) -> None:
        """Start the workers of this node.

        Raises:
            StartAbandoned: they were to end before they were started.
        """

    @abstractmethod
    def folder(self, local_rank: int) -> RestartDir:
        """Folder of the files of one worker."""

    def poll(self) -> Sequence[tuple[Started, Exit]]:
        """Take note of workers that have ended since the last call, in the order in which that was seen."""
        return self._note_exits()

    def living(self) -> Sequence[RankStatus]:
        """The workers that have not ended, as their slots say just now; empty before they are started."""
        workers = list(self.workers.items())
        return [self.read(worker) for local_rank, worker in workers if local_rank not in self.exits]

    def end(self, workers: Collection[int] | None = None) -> None:
        """End workers and their process groups at once. Neither a stopped process nor a handler can delay this.

        Args:
            workers: Their local ranks; None for all, also for those that are just being started.
        """
        with self._lock:
            self.killing = self.killing or workers is None
            self._ended |= set(self.workers if workers is None else workers)
            running = {index: worker for index, worker in self.workers.items() if index not in self.exits}
            pids = [worker.pid for index, worker in running.items() if workers is None or index in workers]
        for pid in pids:
            processes.kill_group(pid)

    def close(self) -> None:  # noqa: B027 - most groups have nothing left
        """Collect what is left of workers that have ended, or are given up."""

    def _begin(self, started: dict[int, Started]) -> None:
        """All workers were started."""
        with self._lock:
            self.workers = started
            self.started = True
        self._end_if_killed()

    def _end_if_killed(self) -> None:
        """The order to end may have come while workers were being started."""
        if self.killing:
            self.end()

    def _note_exits(self) -> list[tuple[Started, Exit]]:
        with self._lock:
            found = []
            for local_rank, worker in self.workers.items():
                code = None if local_rank in self.exits else processes.peek_exit(worker.pid)
                if code is not None:
                    by_agent = code == -9 and (self.killing or local_rank in self._ended)
                    one = Exit(code, self._num_exits, by_agent, time.time(), self.read(worker))
                    self._num_exits += 1
                    self.exits[local_rank] = one
                    found.append((worker, one))
            return found

    # -----------------------------------------------------------------------------------------------------------------
    # State

    @property
    def role(self) -> Role:
        """Its role, by which it is known."""
        return self.plan.role

    @property
    def is_alone(self) -> bool:
        """True if each of its workers is restarted alone."""
        return self.plan.restart == "alone"

    @property
    def failed(self) -> bool:
        """True if a worker ended badly, or the agent ends them."""
        return self.killing or any(end.code != 0 for end in self.exits.values())

    @property
    def all_ended(self) -> bool:
        """True if no worker runs any more."""
        return self.started and len(self.exits) == len(self.workers)

    @property
    def is_over(self) -> bool:
        """True if there is nothing more to wait for."""
        return self.all_ended

    def rank(self, local_rank: int) -> int:
        """Rank of a worker in its group."""
        return self.seat.position * self.plan.workers_per_node + local_rank

    def read(self, worker: Started) -> RankStatus:
        """One worker as its slot says; until it has taken its slot it is in set-up since it was started."""
        slot = self.seat.slots.read(worker.local_rank)
        known = slot.pid == worker.pid
        beat_ns = slot.beat_ns if known else worker.started_ns
        spoken_for = slot.speaks_for if known else ()
        return RankStatus(
            role=self.plan.role,
            node=self.seat.node,
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            sequence=slot.sequence if known else 0,
            collectives=slot.entered if known else 0,
            in_collective=known and slot.entered > slot.left,
            step=slot.step if known else 0,
            phase=slot.phase if known else Phase.SETUP,
            age_s=round(self.seat.clock.age_s(beat_ns / 1e9, time.monotonic()), 3),
            process_state=processes.process_state(worker.pid),
            speaks_for=tuple(SpokenFor(pid=pid, process_state=processes.process_state(pid)) for pid in spoken_for),
            warm=known and slot.warm,
        )
