"""Looks at a silent worker from outside: what its threads wait for, and counters that grow only while it is at work."""

from enum import StrEnum

from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.reports import RankStatus


class Wait(StrEnum):
    """The reason why a thread does not run."""

    RUNNING = "running"
    """None: it runs, or is ready to."""
    STOPPED = "stopped"
    """A signal stopped it (state T)."""
    TRACED = "traced"
    """A debugger holds it (state t) and may let it go on at any moment."""
    LOCK = "lock"
    """A lock of its own process, without a time-out: only another thread of that process can end this."""
    CONNECTION = "connection"
    """Data from a TCP connection, without a time-out; the other end decides."""
    COLLECTIVE = "collective"
    """A collective that this thread carries out for the main thread."""
    TIME = "time"
    """A sleep, or a lock with a time-out."""
    KERNEL = "kernel"
    """The kernel, without interruption (state D): usually a file system or a device."""
    OUTSIDE = "outside"
    """Anything else that another process may end: a file, a pipe, a child, several sockets at once, a shared lock."""


class Inspection(Schema):
    """One look at one worker."""

    status: RankStatus
    """The worker at that moment, as its beats say."""
    at_s: float
    """Time of it, by the monotonic clock of its node."""
    problem: str = ""
    """Parts that could not be read, in a sentence; empty when the look is complete."""
    main: Wait = Wait.OUTSIDE
    """Wait of the main thread, the only one that beats."""
    detail: str = ""
    """The same in words, with the call or the address."""
    others: dict[Wait, int] = {}
    """Number of its other threads by what they wait for, without those of the communication libraries."""
    switches: int = 0
    """Context switches of all these threads so far, the main thread among them."""
    cpu_ticks: int = 0
    """Processor time of all these threads so far, in ticks of the kernel."""
    child_cpu_ticks: int = 0
    """The same of its child processes, living and ended."""
    num_children: int = 0
    """Its living child processes, with theirs."""
    io: int = 0
    """Bytes and calls of reading and writing so far, of all threads and child processes."""
    unsent_bytes: int = 0
    """Bytes that its TCP connections have not got rid of."""
    awaited: tuple[str, ...] = ()
    """Connections that threads wait for, as the other end names them in ``connections``."""
    connections: tuple[str, ...] = ()
    """All its TCP connections, as ``own address:port-other address:port``."""
    uses_gpu: bool = False
    """True if it has a GPU's device open."""
    gpu_percent: float | None = None
    """Time in which its GPU was busy; null where that is not known."""
