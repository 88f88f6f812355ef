"""The fork server: workers are forked from it only where a new process would behave the same."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest
from process_tools import until

from rlhf_core.worker import processes
from rlhf_core.worker.groups import fork_server
from rlhf_core.worker.groups.fork_server import ForkServer
from rlhf_core.worker.processes import ForkedWorker
from rlhf_core.worker.worker_process import AGENT_VARIABLE

GIB = 2**30
PLENTY = (64 * GIB, 64 * GIB)

FAKE_PACKAGE = """
import json, os, random, sys, time
from rlhf_core.worker.groups import fork_server_process
from rlhf_core.worker.worker_process import prepare_signals

def become(arguments):
    prepare_signals()
    path, *rest = arguments
    with open(path + ".part", "w") as file:
        json.dump({
            "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "arguments": arguments,
            "environment": dict(os.environ),
            "numbers": [random.random(), *(one.random() for one in [sys.modules.get("numpy.random")] if one)],
            "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        }, file)
    os.rename(path + ".part", path)
    if "wait" in rest:
        time.sleep(600)
    return 7

orders, answers = (int(text) for text in sys.argv[-3:-1])
sys.exit(fork_server_process.serve(orders, answers, become))
"""
"""A fork server's process whose workers say what they are, after the first thing that every worker does."""

NOTHING = "builtins:int"
"""Imports that are made already, in the place of torch: what is tested here is the hand-over."""


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, messages: list[str], adopting: None) -> Iterator[ForkServer]:
    """A fork server of this process."""
    popen = subprocess.Popen

    def start(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        if "fork-server" in command:
            command = [sys.executable, "-c", FAKE_PACKAGE, *command[-3:]]
        return popen(command, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(fork_server.subprocess, "Popen", start)
    monkeypatch.setattr(fork_server, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setenv(AGENT_VARIABLE, str(os.getpid()))
    made = ForkServer(messages.append, lambda: PLENTY)
    yield made
    made.close()
    for child in psutil.Process().children():
        if child.pid in made.started:
            child.kill()
            child.wait(30)


def ready(server: ForkServer, imports: str = NOTHING) -> int:
    """Wait until the server has finished its imports and return its process id."""
    server.prepare(imports)
    until(lambda: not server.is_importing)
    (pid,) = server.pids
    return pid


def environment(**changed: str) -> Mapping[str, str]:
    return {**os.environ, **changed}


def fork(server: ForkServer, path: Path, *arguments: str, **changed: str) -> ForkedWorker:
    worker = server.fork([str(path), *arguments], environment(**changed))
    assert worker is not None
    return worker


def reported(path: Path) -> dict[str, object]:
    until(path.exists)
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_the_answers_may_have_any_descriptor(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agent 0 of a thousand nodes has more connections than select() takes descriptors."""
    processes.allow_open_files()
    pipe = os.pipe

    def high_pipe() -> tuple[int, ...]:
        low = pipe()
        high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1024) for end in low)
        for end in low:
            os.close(end)
        return high

    monkeypatch.setattr(os, "pipe", high_pipe)
    ready(server)
    assert fork(server, tmp_path / "said").wait(30) == 7


def test_a_forked_worker_is_what_a_new_process_would_be(server: ForkServer, tmp_path: Path) -> None:
    pid = ready(server)
    worker = fork(server, tmp_path / "said", "two", RANK="3")
    assert worker.wait(30) == 7, "its exit code is that of the worker"
    assert worker.poll() == 7
    found = reported(tmp_path / "said")
    assert found["pid"] == worker.pid != pid
    assert found["parent"] == os.getpid(), "a child of the agent, which reads its exit"
    assert found["session"] == worker.pid
    assert found["arguments"] == [str(tmp_path / "said"), "two"]
    assert found["environment"] == dict(environment(RANK="3"))
    assert found["files"] == [0, 1, 2, 3, 4], "two are those of become: no pipe of the server"
    assert server.pids == {pid}, "the server waits for the next order"


def test_forked_workers_draw_different_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    """Python reseeds its generator after a fork; numpy's would be the same in all workers."""
    ready(server, "numpy.random:random")
    paths = [tmp_path / str(rank) for rank in range(3)]
    for worker in [fork(server, path) for path in paths]:
        worker.wait(30)
    python, numpy = np.array([reported(path)["numbers"] for path in paths]).T
    assert len(set(python)) == len(set(numpy)) == 3


def test_a_worker_dies_with_its_agent_and_not_with_the_server(tmp_path: Path) -> None:
    """The kernel sees the agent, here a separate process, as the new parent."""
    script = f"""
import os, pathlib, sys, time
sys.path[:0] = {list(map(str, Path(__file__).parents[:2]))!r}
from rlhf_core.machine.parent_death import adopt_orphans
from rlhf_core.worker.groups import fork_server
from rlhf_core.worker.groups.fork_server import ForkServer
import subprocess, test_worker_fork_server as tools
popen = subprocess.Popen
fork_server.subprocess.Popen = lambda command, **options: popen(
    [sys.executable, "-c", tools.FAKE_PACKAGE, *command[-3:]], **options)
adopt_orphans()
os.environ["{AGENT_VARIABLE}"] = str(os.getpid())
server = ForkServer(print)
server.prepare(tools.NOTHING)
while server.is_importing:
    time.sleep(0.01)
worker = server.fork([{str(tmp_path / "said")!r}, "wait"], dict(os.environ))
server.close()
time.sleep(0.2)
print(worker.pid, worker.poll(), flush=True)
time.sleep(600)
"""
    agent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    pid, ended = agent.stdout.readline().split()
    assert ended == "None", "it lives on without the server"
    until((tmp_path / "said").exists)
    agent.kill()
    agent.wait()
    until(lambda: processes.process_state(int(pid)) in ("-", "Z"))


def test_ps_shows_a_worker_by_its_own_command(server: ForkServer, tmp_path: Path) -> None:
    pid = ready(server)
    worker = fork(server, tmp_path / "said", "wait", "a b")
    reported(tmp_path / "said")
    words = ["python", "-P", "-m", "rlhf_core.worker"]
    assert psutil.Process(worker.pid).cmdline()[:7] == [*words, str(tmp_path / "said"), "wait", "a b"]
    assert psutil.Process(pid).cmdline()[:5] == [*words, "fork-server"]
    assert psutil.Process(worker.pid).environ()["PATH"] == os.environ["PATH"], "the rest is left alone"


def kill(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    os.kill(pid, signal.SIGKILL)
    until(lambda: processes.process_state(pid) == "Z")
    return "ended with exit code -9"


def stop(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: processes.process_state(pid) == "T")
    return "in state T"


def change_the_environment(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    return "environment or code has changed"


def change_the_code(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    fake = Path(os.environ["PYTEST_CURRENT_TEST"].split("::")[0]).resolve()
    monkeypatch.setattr(fork_server.rlhf_core, "__file__", str(fake))
    return "environment or code has changed"


@pytest.mark.parametrize("damage", [kill, stop, change_the_environment, change_the_code])
def test_a_server_whose_forks_would_differ_is_replaced(
    server: ForkServer,
    messages: list[str],
    damage: Callable[[int, pytest.MonkeyPatch], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control is the test above: the same server, undamaged, forks twice."""
    pid = ready(server)
    why = damage(pid, monkeypatch)
    assert ready(server) != pid
    assert why in " ".join(messages)
    assert not Path(f"/proc/{pid}").exists()
    assert fork(server, tmp_path / "said").wait(30) == 7


def test_a_server_that_is_lost_during_a_start_forks_nothing(
    server: ForkServer, messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is returned; the caller then starts a new process."""
    why = kill(ready(server), monkeypatch)
    assert server.fork([str(tmp_path / "said")], environment()) is None
    assert why in " ".join(messages)
    assert server.pids == frozenset()
    assert not (tmp_path / "said").exists()


def test_a_server_that_does_not_answer_is_ended(
    server: ForkServer, messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = ready(server)
    monkeypatch.setattr(fork_server, "ANSWER_TIMEOUT_S", 0.0)
    assert server.fork([str(tmp_path / "said")], environment()) is None
    assert "it did not respond within 0 s" in messages[0]
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_that_is_blocked_in_the_kernel_is_left_behind(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a hung file system: it does not end when it is killed."""
    pid = ready(server)
    assert server._server is not None
    wait = server._server.process.wait

    def wait_in_time(timeout: float | None = None) -> int:
        assert timeout is not None
        return wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(server._server.process, "wait", wait_in_time)
        patch.setattr(processes, "kill_group", lambda pid: None)
        patch.setattr(fork_server, "KILL_TIMEOUT_S", 0.0, raising=False)
        server.close()
    assert server.pids == frozenset()
    processes.kill_group(pid)
    until(lambda: processes.process_state(pid) == "Z")
    processes.reap_orphans(server.started - {pid})


def test_exit_codes_of_workers_are_left_to_their_owner(server: ForkServer, tmp_path: Path) -> None:
    """The thread that reaps orphans leaves workers alone and reaps everything else."""
    pid = ready(server)
    worker = fork(server, tmp_path / "said")
    assert server.started == {pid, worker.pid}
    until(lambda: processes.process_state(worker.pid) == "Z")
    processes.reap_orphans(server.started)
    assert worker.wait(30) == 7
    other = fork(server, tmp_path / "other")
    until(lambda: processes.process_state(other.pid) == "Z")
    processes.reap_orphans(server.started - {other.pid})
    assert other.wait(30) == 0, "as Popen reports an exit that was reaped elsewhere"


def test_waiting_for_a_live_worker_ends_at_the_timeout(server: ForkServer, tmp_path: Path) -> None:
    ready(server)
    worker = fork(server, tmp_path / "said", "wait")
    assert worker.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.05)
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.wait(30) == -signal.SIGKILL


def test_no_server_is_started_if_the_run_needs_the_memory(messages: list[str]) -> None:
    made = ForkServer(messages.append, lambda: (3 * GIB, 24 * GIB))
    made.prepare(NOTHING)
    assert made.pids == frozenset()
    assert not made.is_importing
    assert made.fork([], {}) is None
    assert messages == [], "there may be room later"


def test_the_server_is_stopped_when_memory_runs_low(
    server: ForkServer, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = ready(server)
    server.watch_memory()
    assert server.pids == {pid}
    monkeypatch.setattr(server, "_memory", lambda: (2 * GIB, 64 * GIB))
    server.watch_memory()
    assert not Path(f"/proc/{pid}").exists()
    assert "memory is low (2.0 of 64.0 GiB are free)" in messages[0]
    monkeypatch.setattr(server, "_memory", lambda: PLENTY)
    server.prepare(NOTHING)
    assert server.pids == frozenset(), "not again in this attempt: it would start and stop repeatedly"


THREADED_PACKAGE = """
import sys, threading, time
from rlhf_core.worker.groups import fork_server_process
threading.Thread(target=time.sleep, args=(600,), name="of-a-library", daemon=True).start()
fork_server_process.serve(int(sys.argv[-3]), int(sys.argv[-2]), None)
"""


@pytest.mark.parametrize(
    ("package", "code"), [("raise SystemExit(3)", 3), (THREADED_PACKAGE, 1)], ids=["fails", "starts a thread"]
)
def test_imports_that_prevent_forking_are_not_tried_again(
    server: ForkServer, messages: list[str], monkeypatch: pytest.MonkeyPatch, package: str, code: int
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAKE_PACKAGE", package)
    server.prepare(NOTHING)
    until(lambda: not server.is_importing)
    assert f"it ended with exit code {code} during its imports" in messages[0]
    server.prepare(NOTHING)
    assert server.pids == frozenset()


def test_imports_that_take_too_long_are_abandoned(
    server: ForkServer, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAKE_PACKAGE", "import time; time.sleep(600)")
    server.prepare(NOTHING)
    assert server.is_importing
    monkeypatch.setattr(fork_server, "IMPORT_TIMEOUT_S", 0.0)
    assert not server.is_importing
    assert "it did not finish its imports within 0 s" in messages[0]


SLOW_IMPORTS = """
import time
def wait():
    while not os.path.exists(os.environ["RLHF_TEST_GATE"]):
        time.sleep(0.01)
    open(os.environ["RLHF_TEST_GATE"] + ".passed", "a").write("once ")
sys.modules["slow"] = sys.modules["__main__"]
"""


def test_imports_are_added_to_those_of_a_server_that_has_forked_already(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of the probe need only torch; the modules for workers are imported after the measurement."""
    package = FAKE_PACKAGE.replace("\ndef become", SLOW_IMPORTS + "\ndef become")
    monkeypatch.setattr(sys.modules[__name__], "FAKE_PACKAGE", package)
    gate = tmp_path / "gate"
    monkeypatch.setenv("RLHF_TEST_GATE", str(gate))
    pid = ready(server)
    assert fork(server, tmp_path / "probe").wait(30) == 7
    for _ in range(2):
        server.prepare("slow:wait")
        assert server.is_importing
    assert server.fork([str(tmp_path / "early")], environment()) is None
    gate.touch()
    until(lambda: not server.is_importing)
    assert fork(server, tmp_path / "worker").wait(30) == 7
    assert server.pids == {pid}
    assert Path(f"{gate}.passed").read_text() == "once "
    assert not (tmp_path / "early").exists()


def test_a_new_process_is_started_if_none_can_be_forked(server: ForkServer, tmp_path: Path) -> None:
    command = ("-P", "-m", fork_server.PACKAGE, "check-import", "builtins:int")
    started = server.start(command, environment())
    assert not isinstance(started, ForkedWorker)
    assert started.wait(60) == 0
    pid = ready(server)
    forked = server.start(("-P", "-m", fork_server.PACKAGE, str(tmp_path / "said")), environment())
    assert isinstance(forked, ForkedWorker)
    assert forked.wait(30) == 7
    assert reported(tmp_path / "said")["session"] == forked.pid != pid


def test_real_imports_start_no_thread_and_have_no_side_effects() -> None:
    """The real imports, in a process of its own, have no side effects on forked workers.

    A forked worker computes with as many threads as a new process: numpy has its threads from the start, and OpenMP
    none before the fork.
    """
    code = """
import os, sys, threading
def threads(): return len(os.listdir("/proc/self/task"))
import numpy
before = threads()
from rlhf_core.training.warm import import_libraries
import_libraries()
import torch, torch.distributed as dist
assert {"deepspeed", "transformers", "rlhf_core.training.trainers.run"} <= set(sys.modules)
assert not torch.cuda.is_initialized() and not dist.is_initialized()
assert threading.active_count() == 1
assert threads() == before, (threads(), before)
expected = torch.get_num_threads()
pid = os.fork()
if pid == 0:
    assert torch.get_num_threads() == expected
    numbers = torch.randn(500, 500)
    assert torch.allclose(numbers @ numbers, torch.from_numpy(numbers.numpy() @ numbers.numpy()), atol=1e-2)
    os._exit(5 if threads() >= expected else 6)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    around = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=around, check=False)
    assert done.returncode == 5, done.stderr


def test_a_server_whose_imports_counted_gpus_through_the_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a MIG slice, torch counts GPUs this way without marking CUDA as initialised; each forked worker would fail."""
    from rlhf_core.errors import WorkerError
    from rlhf_core.training import warm
    from rlhf_core.training.trainers import engine

    monkeypatch.setattr(engine, "load_deepspeed", lambda on_cpu: None)
    monkeypatch.setattr(warm.torch.backends.cuda, "is_built", lambda: True)
    warm.import_libraries()
    monkeypatch.setattr(warm.torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(warm.torch.cuda, "device_count", lambda: 0)
    warm.import_libraries()  # a build of torch for CUDA, on a node without GPUs
    monkeypatch.setattr(warm.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(WorkerError, match="initialized CUDA's driver"):
        warm.import_libraries()


def test_imports_that_touch_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core.errors import WorkerError
    from rlhf_core.training import warm
    from rlhf_core.training.trainers import engine

    monkeypatch.setattr(engine, "load_deepspeed", lambda on_cpu: None)
    monkeypatch.setattr(warm.dist, "is_initialized", lambda: True)
    with pytest.raises(WorkerError, match="imports initialized a process group"):
        warm.import_libraries()
