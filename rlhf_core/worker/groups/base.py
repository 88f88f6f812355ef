"""What the agent's two threads share about the workers that are running now.

The main thread starts workers and sees them end; the supervising thread reads their slots and may decide that they
hang.
"""

import threading
import time
from dataclasses import dataclass, field

from rlhf_core.diagnosis.liveness import LoopClock
from rlhf_core.diagnosis.verdict import Verdict
from rlhf_core.run_dir import RestartDir
from rlhf_core.schemas.reports import Phase, RankStatus
from rlhf_core.schemas.resources import Role
from rlhf_core.worker import processes
from rlhf_core.worker.heartbeat import SlotFile

PEER_TIMEOUT_S = 1.0
"""How long the peers of a worker that died may take to say what they saw, before they are killed."""


@dataclass(frozen=True)
class Started:
    """A worker that was started."""

    local_rank: int
    rank: int
    pid: int
    started_ns: int
    """When, on the node's monotonic clock, in nanoseconds."""


@dataclass(frozen=True)
class Exit:
    """How a worker's process ended."""

    code: int
    """Negative: the signal."""
    order: int
    """Which it was to end, from 0."""
    by_agent: bool
    """After the agent had begun to kill."""
    wall_s: float
    """When that was seen, in seconds since the epoch."""
    last: RankStatus
    """What it was last seen doing."""


@dataclass(frozen=True)
class Hang:
    """A hang that agent 0 has judged, with the workers of all nodes as they were before they were killed."""

    verdict: Verdict
    ranks: tuple[RankStatus, ...]
    silent_s: float
    """Longest silence of those to blame when the hang was found, in seconds."""


@dataclass
class WorkerGroup:
    """One start of the workers of one role on this node."""

    role: Role
    restart_dir: RestartDir
    num_workers: int
    slots: SlotFile
    clock: LoopClock
    node: str = ""
    workers: dict[int, Started] = field(default_factory=dict)
    """By local rank; filled once all are started."""
    exits: dict[int, Exit] = field(default_factory=dict)
    """By local rank."""
    hang: Hang | None = None
    oom_kills_before: int = field(default_factory=processes.oom_kills)
    """The node's count of processes killed for want of memory, before the workers were started."""
    killing: bool = False
    """The agent has begun to kill: whatever ends from now on says nothing by itself."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, started: dict[int, Started]) -> None:
        """All workers were started."""
        with self._lock:
            self.workers = started
            killed = self.killing
        # The order to end may have come while they were being started.
        if killed:
            self.kill()

    def kill(self) -> None:
        """End all workers and their process groups at once. Neither a stopped process nor a handler can delay this."""
        with self._lock:
            self.killing = True
            pids = [worker.pid for index, worker in self.workers.items() if index not in self.exits]
        for pid in pids:
            processes.kill_group(pid)

    def note_exits(self) -> list[tuple[Started, Exit]]:
        """Take note of workers that have ended since the last call, in the order in which that was seen."""
        with self._lock:
            killing = self.killing
            found = []
            for local_rank, worker in self.workers.items():
                code = None if local_rank in self.exits else processes.peek_exit(worker.pid)
                if code is not None:
                    by_agent = killing and code == -9
                    self.exits[local_rank] = Exit(code, len(self.exits), by_agent, time.time(), self.read(worker))
                    found.append((worker, self.exits[local_rank]))
            return found

    @property
    def failed(self) -> bool:
        """Whether a worker ended badly, or the agent ends them."""
        return self.killing or any(end.code != 0 for end in self.exits.values())

    @property
    def is_past_setup(self) -> bool:
        """True once every living worker has made its imports and loaded its model."""
        return bool(self.workers) and all(status.phase is not Phase.SETUP for status in self.living())

    @property
    def all_ended(self) -> bool:
        """Whether no worker runs any more."""
        return bool(self.workers) and len(self.exits) == len(self.workers)

    def living(self) -> list[RankStatus]:
        """The workers that have not ended, as their slots say just now; empty before they are started."""
        workers = list(self.workers.items())
        return [self.read(worker) for local_rank, worker in workers if local_rank not in self.exits]

    def read(self, worker: Started) -> RankStatus:
        """One worker as its slot says; until it has taken its slot it is in set-up since it was started."""
        slot = self.slots.read(worker.local_rank)
        known = slot.pid == worker.pid
        beat_ns = slot.beat_ns if known else worker.started_ns
        return RankStatus(
            role=self.role,
            node=self.node,
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            sequence=slot.sequence if known else 0,
            collectives=slot.entered if known else 0,
            in_collective=known and slot.entered > slot.left,
            step=slot.step if known else 0,
            phase=slot.phase if known else Phase.SETUP,
            age_s=round(self.clock.age_s(beat_ns / 1e9, time.monotonic()), 3),
            process_state=processes.process_state(worker.pid),
            warm=known and slot.warm,
        )
