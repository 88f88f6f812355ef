"""Looks at a worker through ``/proc``: what each of its threads waits for, and whether anything of it moves.

A look needs no help from the worker and disturbs nothing; it takes some milliseconds, and only suspects and their peers
are looked at. The call that a thread is in comes from ``/proc/<pid>/task/<tid>/syscall``, which the kernel shows to
processes that may trace it: an agent may trace its own workers. Where it may not, the look says so.
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
"""Beginnings of names of threads that run no code of the user and may poll for ever: those of gloo, NCCL, torch's
store, CUDA and the allocator, and our own that answers what is asked about collectives. They wake the main thread only
when data has come or a GPU has finished, which is seen in ``io``, in the connections and in the GPU."""
COLLECTIVE_THREADS = ("pt_gloo_runloop",)
"""Those that carry out collectives: they wait for a lock while there is none, and with a time-out inside of one."""
MAX_CONNECTIONS = 512
"""Connections of a worker that are listed; with more of them, waiting for a peer is not told from waiting outside."""

_FUTEX, _READS = {"x86_64": (202, {0, 19, 45, 47}), "aarch64": (98, {63, 65, 207, 212})}.get(
    platform.machine(), (-1, set[int]())
)
"""Numbers of futex, and of read, readv, recvfrom, recvmsg. On another architecture everything waits for the outside."""
_SLEEPS = {"x86_64": {35, 230, 219}, "aarch64": {101, 115, 128}}.get(platform.machine(), set[int]())
"""Of nanosleep, clock_nanosleep, restart_syscall."""
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
    """A TCP connection of this node, in the words of ``/proc/net/tcp``: few of many are ever asked about."""

    local_field: str
    remote_field: str
    unsent_bytes: int
    is_open: bool
    """True if it has another end; a listening socket has none."""

    @property
    def local(self) -> str:
        """Own address and port."""
        return _address(self.local_field)

    @property
    def remote(self) -> str:
        """Address and port of the other end."""
        return _address(self.remote_field)


def inspect_workers(
    ranks: Iterable[RankStatus], gpu_percents: Mapping[int, float], connections: Mapping[int, Connection] | None = None
) -> list[Inspection]:
    """Look once at workers of this node.

    Args:
        ranks: The workers.
        gpu_percents: How busy each GPU is, by local rank; empty where that is not known.
        connections: All TCP connections of the node by inode; None to read them.

    Returns:
        One look for each; a worker that has ended meanwhile has a look with a problem.
    """
    ranks = list(ranks)
    if connections is None and ranks:
        connections = read_connections(ranks[0].pid)
    return [_inspect(rank, gpu_percents.get(rank.local_rank), connections or {}) for rank in ranks]


def _inspect(rank: RankStatus, gpu_percent: float | None, connections: Mapping[int, Connection]) -> Inspection:
    at_s = time.monotonic()
    # A worker that stands for one other process only follows it: what that one waits for is what counts.
    pid = rank.speaks_for[0].pid if len(rank.speaks_for) == 1 else rank.pid
    try:
        threads = [_read_thread(pid, tid) for tid in _threads(pid)]
        links = _open_files(pid)
        children = [_read_child(child) for child in descendants_of(pid)]
        child_ticks = _ended_children_ticks(pid) + sum(child.cpu_ticks for child in children)
        io = _io(pid) + sum(child.io for child in children)
    except (OSError, ValueError, IndexError) as error:
        return Inspection(status=rank, at_s=at_s, problem=f"rank {rank.rank} could not be looked at: {error}")
    main = next((thread for thread in threads if thread.tid == pid), None)
    own = [thread for thread in threads if thread is main or not thread.name.startswith(SERVING_THREADS)]
    waits = {thread.tid: _classify(thread, links, connections) for thread in own}
    sockets = [connections[inode] for inode in _socket_inodes(links.values()) if inode in connections]
    opened = [one for one in sockets if one.is_open]
    wait, detail, _ = waits.get(pid, (Wait.OUTSIDE, "", ""))
    stopped = [one.pid for one in rank.speaks_for if one.process_state in _STOPPED]
    if stopped:
        # Its beats show their progress: it stands as still as they do.
        wait, detail = Wait.STOPPED, f"process {stopped[0]} that it speaks for (state T)"
    return Inspection(
        status=rank,
        at_s=at_s,
        problem="" if main is not None else f"rank {rank.rank} has no main thread any more",
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
    """Number and arguments of the system call it is in; empty while it runs."""
    has_alarm: bool
    """True if its process handles the signal of an alarm clock, which would end any wait."""


def _read(path: str) -> str:
    """A small file of ``/proc``; a look reads a hundred of them, and pathlib would take most of its time."""
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
    # "running", or "-1" with two addresses for a thread that is blocked outside a system call.
    numbers = tuple(int(word, 0) for word in call[:7]) if len(call) > 3 else ()
    return _Thread(tid, name, fields[0], int(fields[11]) + int(fields[12]), switches, numbers, has_alarm)


def _stat(path: str) -> tuple[str, list[str]]:
    """The name, and the fields after it, from the state on (proc(5): the third)."""
    before, _, after = _read(path).rpartition(")")
    return before.partition("(")[2], after.split()


def _classify(
    thread: _Thread, links: Mapping[int, str], connections: Mapping[int, Connection]
) -> tuple[Wait, str, str]:
    """Wait of a thread: its kind, the same in words, and the connection as its other end names it."""
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
        return Wait.OUTSIDE, "a lock that processes share"
    return (Wait.TIME, "a lock with a time-out") if timeout else (Wait.LOCK, "a lock of its own")


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


def _socket_inodes(targets: Iterable[str]) -> set[int]:
    return {inode for inode in map(_inode, targets) if inode >= 0}


def read_connections(pid: int) -> dict[int, Connection]:
    """TCP connections of the network namespace of a process, by inode; empty where they cannot be read."""
    found: dict[int, Connection] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                inode = int(fields[9])
                if inode:  # without one it belongs to no process any more
                    unsent = int(fields[4].partition(":")[0], 16)
                    found[inode] = Connection(fields[1], fields[2], unsent, is_open=fields[3] != _LISTENING)
    return found


def _address(field: str) -> str:
    """``0100007F:1F90`` as ``127.0.0.1:8080``; an IPv4 address that was mapped into IPv6 as itself."""
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
    """Living child processes of a process, with theirs.

    Raises:
        OSError: it has ended, or the kernel does not tell.
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
    """With that of its own ended children."""
    io: int


def _read_child(pid: int) -> _Child:
    _, fields = _stat(f"/proc/{pid}/stat")
    return _Child(fields[0], sum(int(field) for field in fields[11:15]), _io(pid) if fields[0] != "Z" else 0)


def _io(pid: int) -> int:
    """Bytes and calls of reading and writing of a process, all of its threads together."""
    return sum(int(line.split()[1]) for line in _read(f"/proc/{pid}/io").splitlines())
