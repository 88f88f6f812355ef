"""Inspections of real processes: every kind of waiting is distinguished, and so is every kind of activity."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_runs import REPOSITORY
from made_reports import rank_status
from process_tools import until

from rlhf_core.diagnosis.hangs.standstill import movement
from rlhf_core.schemas.inspections import Inspection, Wait
from rlhf_core.worker.liveness.inspection import inspect_workers

Start = Callable[..., "subprocess.Popen[bytes]"]

DEADLOCK = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
HELPED = "import threading, time; thread = threading.Thread(target={}); thread.start(); thread.join()"
WORKING_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
FIFO = "import sys; open(sys.argv[1], 'rb').read()"
BLOCKED_IN_KERNEL = """
import os, sys
# Before it becomes another program the child opens a FIFO that has no writer; its parent waits for that in state D.
fifo = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)
os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}, file_actions=[fifo])
"""
RECEIVE = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.settimeout(float(sys.argv[2]) or None)
connection.recv(1)
"""
PEER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
connection, _ = server.accept()
connection.recv(1)
"""
POLLING_THREAD = """
import threading, time
from rlhf_core.worker import processes
from rlhf_core.worker.liveness import collectives
def poll():
    {}
    while True:
        time.sleep(0.01)
threading.Thread(target=poll, daemon=True).start()
time.sleep(0.2)
lock = threading.Lock(); lock.acquire(); lock.acquire()
"""

WAITS = [
    pytest.param(DEADLOCK, Wait.LOCK, id="a lock that is never given back"),
    pytest.param("import time; time.sleep(60)", Wait.TIME, id="a sleep"),
    pytest.param("import threading; threading.Event().wait(60)", Wait.TIME, id="a lock with a timeout"),
    pytest.param("import multiprocessing as m; l = m.Lock(); l.acquire(); l.acquire()", Wait.OUTSIDE, id="shared lock"),
    pytest.param("while True: pass", Wait.RUNNING, id="a loop"),
    pytest.param(
        "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)", Wait.RUNNING, id="a computation in C"
    ),
    pytest.param(WORKING_CHILD, Wait.OUTSIDE, id="a child that works"),
    pytest.param("import os; os.read(os.pipe()[0], 1)", Wait.OUTSIDE, id="a pipe"),
    pytest.param(FIFO, Wait.OUTSIDE, id="a FIFO that is not opened at the other end"),
    pytest.param(BLOCKED_IN_KERNEL, Wait.KERNEL, id="state D"),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python programs with a FIFO, or the given values, as arguments."""
    processes: list[subprocess.Popen[bytes]] = []
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def start(program: str, *arguments: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", program, *(map(str, arguments) if arguments else (str(fifo),))]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return processes[-1]

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def inspect(*pids: int) -> list[Inspection]:
    ranks = [rank_status(number, node="here", pid=pid, step=20, age_s=11.0) for number, pid in enumerate(pids)]
    return inspect_workers(ranks, {})


def inspect_until(pid: int, wait: Wait) -> Inspection:
    """The first inspection that finds a process in this wait twice.

    During startup, the process may briefly make the same call.
    """

    def settled() -> Inspection | None:
        before = inspect(pid)[0]
        time.sleep(0.3)
        after = inspect(pid)[0]
        rests = wait is Wait.RUNNING or before.switches == after.switches
        return after if rests and (before.main, after.main) == (wait, wait) else None

    found = until(settled)
    assert isinstance(found, Inspection)
    return found


@pytest.mark.parametrize(("program", "wait"), WAITS)
def test_the_kinds_of_waits_of_a_main_thread_are_distinguished(start: Start, program: str, wait: Wait) -> None:
    found = inspect_until(start(program).pid, wait)
    assert not found.problem
    assert found.detail


def test_a_deadlock_shows_no_activity_and_work_shows_some(start: Start) -> None:
    """With the controls: a computation, and a child that works while its parent waits."""
    stands, computes, has_child = start(DEADLOCK), start("while True: pass"), start(WORKING_CHILD)
    for process, wait in ((stands, Wait.LOCK), (computes, Wait.RUNNING), (has_child, Wait.OUTSIDE)):
        inspect_until(process.pid, wait)
    until(lambda: inspect(has_child.pid)[0].num_children == 1)
    before = inspect(stands.pid, computes.pid, has_child.pid)

    def moved() -> list[str]:
        after = inspect(stands.pid, computes.pid, has_child.pid)
        return [movement(one, other) for one, other in zip(before, after, strict=True)]

    until(lambda: moved() == ["", "processor time", "processor time of child processes"])


def test_a_stopped_process_is_distinguished_from_a_debugged_one(start: Start) -> None:
    """A debugger releases the process again: gdb reads the symbols of torch for a minute."""
    process = start(DEADLOCK)
    inspect_until(process.pid, Wait.LOCK)
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    attach, detach = 16, 17
    assert ptrace(attach, process.pid, 0, 0) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(process.pid, os.WUNTRACED)
    assert inspect(process.pid)[0].main is Wait.TRACED
    assert ptrace(detach, process.pid, 0, 0) == 0
    inspect_until(process.pid, Wait.LOCK)
    process.send_signal(signal.SIGSTOP)
    inspect_until(process.pid, Wait.STOPPED)


@pytest.mark.parametrize(
    ("helper", "wait"),
    [("lambda: time.sleep(60)", Wait.TIME), ("lambda: __import__('os').read(0, 1)", Wait.OUTSIDE)],
)
def test_a_thread_that_the_main_thread_waits_for_is_seen(start: Start, helper: str, wait: Wait) -> None:
    """The main thread waits for another thread of the process, which waits for a timer or an external event."""
    process = start(HELPED.format(helper.replace("read(0,", "read(__import__('os').pipe()[0],")))
    until(lambda: wait in inspect(process.pid)[0].others)
    assert inspect_until(process.pid, Wait.LOCK).others == {wait: 1}


def test_a_lock_that_an_alarm_may_end_is_no_deadlock(start: Start) -> None:
    """Reward functions often use ``signal.alarm`` as a timeout; the blocked call itself shows no sign of it."""
    assert inspect_until(start(DEADLOCK).pid, Wait.LOCK).others == {}
    with_alarm = "import signal; signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(60); "
    assert inspect_until(start(with_alarm + DEADLOCK).pid, Wait.LOCK).others == {Wait.TIME: 1}


def test_a_thread_that_answers_questions_about_collectives_is_left_out(start: Start) -> None:
    """With the control: without its name, it is a thread that never rests, and nothing can be proven."""
    named = start(POLLING_THREAD.format("processes.name_thread(collectives.THREAD_NAME)"))
    found = inspect_until(named.pid, Wait.LOCK)
    assert found.others == {}
    plain = start(POLLING_THREAD.format(""))
    until(lambda: inspect(plain.pid)[0].others.get(Wait.TIME) == 1 and inspect(plain.pid)[0].main is Wait.LOCK)
    before = inspect(plain.pid)[0]
    until(lambda: movement(before, inspect(plain.pid)[0]) == "context switches")


def test_a_peer_and_a_service_are_distinguished_by_the_other_end_of_the_connection(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        client, patient = start(RECEIVE, port, 0), start(RECEIVE, port, 60)
        found = inspect_until(client.pid, Wait.CONNECTION)
        assert found.detail == f"data from 127.0.0.1:{port}"
        assert len(found.awaited) == 1
        assert found.awaited[0].startswith(f"127.0.0.1:{port}-127.0.0.1:")
        assert inspect_until(patient.pid, Wait.OUTSIDE).awaited == (), "it polls, and may go on by itself"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start(PEER, port)
    until(lambda: _listens(port))
    client = start(RECEIVE, port, 0)
    waits = inspect_until(client.pid, Wait.CONNECTION)
    peer = inspect_until(server.pid, Wait.CONNECTION)
    assert set(waits.awaited) <= set(peer.connections)
    assert set(peer.awaited) <= set(waits.connections)
    assert not set(found.awaited) & set(peer.connections)


def _listens(port: int) -> bool:
    return any(line.split()[1].endswith(f":{port:04X}") for line in Path("/proc/net/tcp").read_text().splitlines()[1:])


def test_data_in_transit_is_detected(start: Start) -> None:
    """A stalled network: data sent by a peer is still in transit."""
    program = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(bytes(64 << 20))
"""
    with socket.create_server(("127.0.0.1", 0)) as service:
        process = start(program, service.getsockname()[1])
        connection, _ = service.accept()
        with connection:
            until(lambda: inspect(process.pid)[0].unsent_bytes > 0)


def test_a_worker_that_cannot_be_inspected_is_reported() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    found = inspect(gone.pid)[0]
    assert "could not be inspected" in found.problem
    assert found.main is Wait.OUTSIDE, "and waits for nothing that proves anything"
