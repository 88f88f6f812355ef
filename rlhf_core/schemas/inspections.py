"""Inspections of a silent worker from outside: waits of its threads, and counters that increase only while it works."""

from enum import StrEnum

from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.reports import RankStatus


class Wait(StrEnum):
    """Reason why a thread does not run."""

    RUNNING = "running"
    """It runs or is ready to run."""
    STOPPED = "stopped"
    """A signal stopped it (state T)."""
    TRACED = "traced"
    """A debugger stopped it (state t) and may continue it at any time."""
    LOCK = "lock"
    """A lock of its own process without a timeout, which only another thread of that process can release."""
    CONNECTION = "connection"
    """Data from a TCP connection without a timeout; depends on the other end."""
    COLLECTIVE = "collective"
    """A collective that this thread carries out for the main thread."""
    TIME = "time"
    """A sleep, or a lock with a timeout."""
    KERNEL = "kernel"
    """Uninterruptible wait in the kernel (state D): usually a file system or a device."""
    OUTSIDE = "outside"
    """Anything else that another process may end: a file, a pipe, a child, several sockets at once, a shared lock."""


class Inspection(Schema):
    """One inspection of one worker."""

    status: RankStatus
    """State of the worker at that time, from its heartbeats."""
    at_s: float
    """Time of the observation, by the monotonic clock of its node."""
    problem: str = ""
    """Parts that could not be read, in a sentence; empty if the inspection is complete."""
    main: Wait = Wait.OUTSIDE
    """Wait of the main thread, the only one that sends heartbeats."""
    detail: str = ""
    """The same as text, with the call or the address."""
    others: dict[Wait, int] = {}
    """Number of its other threads by wait, without those of the communication libraries."""
    switches: int = 0
    """Context switches of all these threads so far, including the main thread."""
    cpu_ticks: int = 0
    """Processor time of all these threads so far, in ticks of the kernel."""
    child_cpu_ticks: int = 0
    """The same for its child processes, running and ended."""
    num_children: int = 0
    """Number of its running child processes, including their own."""
    io: int = 0
    """Bytes and calls of reads and writes so far, of all threads and child processes."""
    unsent_bytes: int = 0
    """Unsent bytes of its TCP connections."""
    awaited: tuple[str, ...] = ()
    """Connections that threads wait for, as named in the other end's ``connections``."""
    connections: tuple[str, ...] = ()
    """All its TCP connections, as ``own address:port-other address:port``."""
    uses_gpu: bool = False
    """True if it has a GPU's device open."""
    gpu_percent: float | None = None
    """Utilisation of its GPU; null if unknown."""
