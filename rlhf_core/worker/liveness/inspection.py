"""Inspection of a worker through ``/proc``: the waits of its threads, and any sign of activity.

An inspection needs no cooperation from the worker and does not disturb it; it takes some milliseconds, and only
suspects and their peers are inspected. A thread's current system call comes from ``/proc/<pid>/task/<tid>/syscall``,
which the kernel shows to processes allowed to trace the worker, normally including its agent. If tracing is not
allowed, the inspection reports that.
"""

import contextlib
import os
import platform
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.schemas.inspections import Inspection, Wait
from rlhf_core.schemas.reports import RankStatus

SERVING_THREADS = ("gloo_tcp_loop", "pt_tcpstore", "pt_nccl", "NCCL", "cuda", "jemalloc", "rlhf-collective")
"""Name prefixes of threads that run no user code and may poll forever: those of gloo, NCCL, torch's store, CUDA and the
allocator, and our own that answers questions about collectives. They wake the main thread only when data has arrived or
a GPU has finished, which shows in ``io``, the connections and the GPU."""
COLLECTIVE_THREADS = ("pt_gloo_runloop",)
"""Name prefixes of threads that execute collectives: they wait for a lock when idle, and with a timeout inside one."""
MAX_CONNECTIONS = 512
"""Maximum connections listed per worker; beyond it, waits for peers and for the outside are not distinguished."""

_FUTEX, _READS = {"x86_64": (202, {0, 19, 45, 47}), "aarch64": (98, {63, 65, 207, 212})}.get(
    platform.machine(), (-1, set[int]())
)
"""System call numbers of futex, and of read, readv, recvfrom, recvmsg. On other architectures every wait counts as one
for something outside the job."""
_SLEEPS = {"x86_64": {35, 230, 219}, "aarch64": {101, 115, 128}}.get(platform.machine(), set[int]())
"""System call numbers of nanosleep, clock_nanosleep, restart_syscall."""
_FUTEX_PRIVATE = 128
_FUTEX_CLOCK_REALTIME = 256
_FUTEX_WAITS = frozenset({0, 9})
"""FUTEX_WAIT and FUTEX_WAIT_BITSET (linux/futex.h)."""
_LISTENING = "0A"
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")
_STOPPED = "T"
_STATES = {"R": Wait.RUNNING, "T": Wait.STOPPED, "t": Wait.TRACED, "D": Wait.KERNEL}


@dataclass(frozen=True)
class Connection:
    """A TCP connection of this node, kept in the raw form of ``/proc/net/tcp``: few of many are ever decoded."""

    local_field: str
    remote_field: str
    unsent_bytes: int
    is_open: bool
    """True if it has a remote end; a listening socket has none."""

    @property
    def local(self) -> str:
        """Local address and port."""
        return _address(self.local_field)

    @property
    def remote(self) -> str:
        """Remote address and port."""
        return _address(self.remote_field)


def inspect_workers(ranks: Iterable[RankStatus], gpu_percents: Mapping[int, float]) -> list[Inspection]:
    """Inspect workers of this node once.

    Args:
        ranks: The workers.
        gpu_percents: GPU utilisation by local rank; empty if unknown.

    Returns:
        One inspection per worker; for a worker that has exited in the meantime it carries a problem.
    """
    ranks = list(ranks)
    connections = read_connections(ranks[0].pid) if ranks else {}
    return [_inspect(rank, gpu_percents.get(rank.local_rank), connections) for rank in ranks]


def _inspect(rank: RankStatus, gpu_percent: float | None, connections: Mapping[int, Connection]) -> Inspection:
    at_s = time.monotonic()
    # A worker that represents one other process only follows it, so that process's wait is what counts.
    pid = rank.speaks_for[0].pid if len(rank.speaks_for) == 1 else rank.pid
    try:
        threads = [_read_thread(pid, tid) for tid in _threads(pid)]
        links = _open_files(pid)
        children = [_read_child(child) for child in descendants_of(pid)]
        child_ticks = _ended_children_ticks(pid) + sum(child.cpu_ticks for child in children)
        io = _io(pid) + sum(child.io for child in children)
    except (OSError, ValueError, IndexError) as error:
        return Inspection(status=rank, at_s=at_s, problem=f"rank {rank.rank} could not be inspected: {error}")
    main = next((thread for thread in threads if thread.tid == pid), None)
    own = [thread for thread in threads if thread is main or not thread.name.startswith(SERVING_THREADS)]
    waits = {thread.tid: _classify(thread, links, connections) for thread in own}
    sockets = [connections[inode] for inode in set(map(_inode, links.values())) if inode in connections]
    opened = [one for one in sockets if one.is_open]
    wait, detail, _ = waits.get(pid, (Wait.OUTSIDE, "", ""))
    stopped = [one.pid for one in rank.speaks_for if one.process_state in _STOPPED]
    if stopped:
        # The worker's beats represent these processes, so it stands still if they do.
        wait, detail = Wait.STOPPED, f"process {stopped[0]} that it reports for (state T)"
    return Inspection(
        status=rank,
        at_s=at_s,
        problem="" if main is not None else f"rank {rank.rank} no longer has a main thread",
        main=wait,
        detail=detail,
        others=dict(
            Counter(
                [
                    *(waits[thread.tid][0] for thread in own if thread is not main),
                    *(Wait.KERNEL for child in children if child.state == "D"),
                    *([Wait.TIME] if main is not None and main.has_alarm else []),
                ]
            )
        ),
        switches=sum(thread.switches for thread in own),
        cpu_ticks=sum(thread.cpu_ticks for thread in own),
        child_cpu_ticks=child_ticks,
        num_children=len(children),
        io=io,
        unsent_bytes=sum(one.unsent_bytes for one in opened),
        awaited=tuple(sorted({awaited for _, _, awaited in waits.values() if awaited})),
        connections=tuple(f"{one.local}-{one.remote}" for one in opened) if len(opened) <= MAX_CONNECTIONS else (),
        uses_gpu=any(target.startswith(_GPU_DEVICES) for target in links.values()),
        gpu_percent=gpu_percent,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Threads


@dataclass(frozen=True)
class _Thread:
    tid: int
    name: str
    state: str
    cpu_ticks: int
    switches: int
    call: tuple[int, ...]
    """Number and arguments of its current system call; empty while it runs."""
    has_alarm: bool
    """True if its process handles an alarm signal, which could end any wait."""


def _read(path: str) -> str:
    """Read a small file in ``/proc``. Avoids pathlib, which would dominate the time: an inspection reads a hundred."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    finally:
        os.close(descriptor)


def _threads(pid: int) -> list[int]:
    with os.scandir(f"/proc/{pid}/task") as entries:
        return [int(entry.name) for entry in entries]


def _read_thread(pid: int, tid: int) -> _Thread:
    folder = f"/proc/{pid}/task/{tid}"
    name, fields = _stat(f"{folder}/stat")
    call = _read(f"{folder}/syscall").split()
    status = dict(line.split(":", 1) for line in _read(f"{folder}/status").splitlines())
    switches = int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
    has_alarm = bool(int(status["SigCgt"], 16) >> (signal.SIGALRM - 1) & 1)
    # "running", or "-1" with two addresses for a thread blocked outside a system call.
    numbers = tuple(int(word, 0) for word in call[:7]) if len(call) > 3 else ()
    return _Thread(tid, name, fields[0], int(fields[11]) + int(fields[12]), switches, numbers, has_alarm)


def _stat(path: str) -> tuple[str, list[str]]:
    """The process name, and the fields after it, beginning with the state (the third in proc(5))."""
    before, _, after = _read(path).rpartition(")")
    return before.partition("(")[2], after.split()


def _classify(
    thread: _Thread, links: Mapping[int, str], connections: Mapping[int, Connection]
) -> tuple[Wait, str, str]:
    """A thread's wait: its kind, a description, and the connection as the remote end would name it."""
    if thread.state in _STATES:
        return _STATES[thread.state], f"nothing (state {thread.state})", ""
    if not thread.call:
        return Wait.RUNNING, "nothing", ""
    number, *arguments = thread.call
    if number == _FUTEX:
        wait, detail = _classify_futex(arguments)
        in_collective = wait is Wait.TIME and thread.name.startswith(COLLECTIVE_THREADS)
        return (Wait.COLLECTIVE if in_collective else wait), detail, ""
    if number in _SLEEPS:
        return Wait.TIME, "a sleep to end", ""
    if number in _READS:
        target = links.get(arguments[0], "")
        connection = connections.get(_inode(target), None)
        if connection is not None and connection.is_open:
            return Wait.CONNECTION, f"data from {connection.remote}", f"{connection.remote}-{connection.local}"
        return Wait.OUTSIDE, f"data from {target or 'a file'}", ""
    return Wait.OUTSIDE, f"system call {number}", ""


def _classify_futex(arguments: Sequence[int]) -> tuple[Wait, str]:
    _, operation, _, timeout = arguments[:4]
    if operation & ~(_FUTEX_PRIVATE | _FUTEX_CLOCK_REALTIME) not in _FUTEX_WAITS or not operation & _FUTEX_PRIVATE:
        return Wait.OUTSIDE, "a lock shared between processes"
    return (Wait.TIME, "a lock with a timeout") if timeout else (Wait.LOCK, "a lock of its own")


# ---------------------------------------------------------------------------------------------------------------------
# Files, connections, children


def _open_files(pid: int) -> dict[int, str]:
    found: dict[int, str] = {}
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found[int(entry.name)] = os.readlink(entry.path)  # noqa: PTH115 - thousands of descriptors
    return found


def _inode(target: str) -> int:
    return int(target[len("socket:[") : -1]) if target.startswith("socket:[") else -1


def read_connections(pid: int) -> dict[int, Connection]:
    """TCP connections in a process's network namespace, by inode; empty if they cannot be read."""
    found: dict[int, Connection] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                inode = int(fields[9])
                if inode:  # without an inode it no longer belongs to a process
                    unsent = int(fields[4].partition(":")[0], 16)
                    found[inode] = Connection(fields[1], fields[2], unsent, is_open=fields[3] != _LISTENING)
    return found


def _address(field: str) -> str:
    """Decode ``0100007F:1F90`` as ``127.0.0.1:8080``; an IPv4-mapped IPv6 address becomes its IPv4 address."""
    digits, _, port = field.partition(":")
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    packed = b"".join(words)
    if len(packed) == 16 and packed.startswith(bytes(10) + b"\xff\xff"):
        packed = packed[12:]
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"


def _ended_children_ticks(pid: int) -> int:
    _, fields = _stat(f"/proc/{pid}/stat")
    return int(fields[13]) + int(fields[14])


def descendants_of(pid: int) -> list[int]:
    """Living descendants of a process.

    Raises:
        OSError: it has exited, or the kernel does not list its children.
    """
    found: list[int] = []
    left = [pid]
    while left:
        parent = left.pop()
        with contextlib.suppress(FileNotFoundError) if parent != pid else contextlib.nullcontext():
            for tid in _threads(parent):
                children = _read(f"/proc/{parent}/task/{tid}/children").split()
                left += map(int, children)
                found += map(int, children)
    return found


@dataclass(frozen=True)
class _Child:
    state: str
    cpu_ticks: int
    """CPU time, including that of its reaped children."""
    io: int


def _read_child(pid: int) -> _Child:
    _, fields = _stat(f"/proc/{pid}/stat")
    return _Child(fields[0], sum(int(field) for field in fields[11:15]), _io(pid) if fields[0] != "Z" else 0)


def _io(pid: int) -> int:
    """Sum of bytes and calls read and written by a process, across all its threads."""
    return sum(int(line.split()[1]) for line in _read(f"/proc/{pid}/io").splitlines())
