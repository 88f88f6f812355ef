"""Evidence from real processes that stand still in different ways."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_reports import rank_status
from process_tools import until

from rlhf_core.schemas.agent_messages import NodeEnd, WorkerReport
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import Phase, RankStatus
from rlhf_core.worker import processes
from rlhf_core.worker.evidence import collection as evidence
from rlhf_core.worker.evidence.exit_reports import NodeReport, explain

PRELUDE = """
import ctypes, faulthandler, os, signal, sys
faulthandler.register(signal.SIGUSR1)
def endless_loop():
    while True: pass
def holds_the_interpreter():
    ctypes.PyDLL(None).sleep(60)
def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)
print("ready", flush=True)
"""


@pytest.fixture
def still_process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[RankStatus, Path]]:
    """A process that stands still in the function named by the test's parameter, and its log."""
    log = tmp_path / "trainer-here-0.log"
    with log.open("wb") as file:
        command = [sys.executable, "-c", f"{PRELUDE}{request.param}()"]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    until(lambda: log.read_bytes())
    if request.param == "stops_itself":
        until(lambda: processes.process_state(process.pid) == "T")
    at = {"local_rank": 0, "pid": process.pid, "collectives": 0, "step": 4, "phase": Phase.REWARD, "age_s": 9.0}
    yield rank_status(3, process_state=processes.process_state(process.pid), **at), log
    process.kill()
    process.wait()


WAYS = ["endless_loop", "holds_the_interpreter", "stops_itself"]


@pytest.mark.training
@pytest.mark.parametrize("still_process", WAYS, indirect=True)
def test_the_stack_names_the_function(
    still_process: tuple[RankStatus, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rank, log = still_process
    folder = tmp_path / "incident"
    missing = evidence.collect([rank], {0: log}, folder, "here")
    assert missing == []
    stack = (folder / "stack-here-0.txt").read_text(encoding="utf-8")
    way = request.node.callspec.params["still_process"]
    assert f"{way} (<string>:" in stack, "a frame: the header of the stack shows the whole program"
    assert "State:" in (folder / "process-here-0.txt").read_text(encoding="utf-8")
    assert (folder / "log-here-0.txt").read_text(encoding="utf-8").startswith("ready")
    assert '"rank": 3' in (folder / "ranks-here.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("still_process", ["holds_the_interpreter"], indirect=True)
def test_without_py_spy_the_worker_writes_its_own_stack(
    still_process: tuple[RankStatus, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while C code holds the interpreter lock: the fault handler does not need Python."""
    monkeypatch.setattr("rlhf_core.worker.evidence.collection.shutil.which", lambda *_, **__: None)
    rank, log = still_process
    missing = evidence.collect([rank], {0: log}, tmp_path / "incident", "here")
    assert "not installed" in missing[0]
    assert "holds_the_interpreter" in (tmp_path / "incident" / "log-here-0.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("still_process", ["stops_itself"], indirect=True)
def test_a_py_spy_that_cannot_be_killed_is_left_behind(
    still_process: tuple[RankStatus, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a hung file system it stays in the kernel; here its child keeps the pipe open. Otherwise the test hangs."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(evidence, "find_py_spy", lambda: str(program))
    monkeypatch.setattr(evidence, "STACK_TIMEOUT_S", 0.5)
    monkeypatch.setattr(evidence, "KILL_TIMEOUT_S", 0.1)
    rank, log = still_process
    missing = evidence.collect([rank], {0: log}, tmp_path / "incident", "here")
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert "no answer within" in missing[0]


@pytest.mark.parametrize("still_process", ["stops_itself"], indirect=True)
def test_a_py_spy_that_is_killed_within_a_character_costs_only_its_stack(
    still_process: tuple[RankStatus, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\nprintf 'f\\303'\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(evidence, "find_py_spy", lambda: str(program))
    monkeypatch.setattr(evidence, "STACK_TIMEOUT_S", 2.0)
    rank, log = still_process
    missing = evidence.collect([rank], {0: log}, tmp_path / "incident", "here")
    assert "no answer within" in missing[0]
    assert (tmp_path / "incident" / "log-here-0.txt").read_text(encoding="utf-8").startswith("ready")


@pytest.mark.parametrize("still_process", ["endless_loop"], indirect=True)
def test_unavailable_evidence_is_reported_without_an_error(
    still_process: tuple[RankStatus, Path], tmp_path: Path
) -> None:
    rank, log = still_process
    os.kill(rank.pid, signal.SIGKILL)
    until(lambda: processes.process_state(rank.pid) == "Z")
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    missing = evidence.collect([rank], {0: log}, tmp_path / "file" / "incident", "here")
    assert any("py-spy" in line for line in missing)
    assert any("could not be written" in line for line in missing)


@pytest.mark.parametrize(("node", "kind"), [("a", FailureKind.HOST_OOM), ("b", FailureKind.WORKER_KILLED)])
def test_the_memory_of_another_node_explains_no_kill(node: str, kind: FailureKind) -> None:
    killed = WorkerReport(rank=0, local_rank=0, code=-9, by_agent=False, ended_s=1.0)
    ended = WorkerReport(rank=1, local_rank=0, code=-9, by_agent=True, ended_s=2.0)
    ends = {"a": NodeEnd(num_workers=1, workers=(killed,)), "b": NodeEnd(num_workers=1, workers=(ended,))}
    ends[node] = ends[node].model_copy(update={"oom_kills": 1})
    failure = explain([NodeReport(name, end) for name, end in ends.items()], None)
    assert (failure.kind, failure.nodes) == (kind, ("a",))


FORK = """Traceback (most recent call last):
  File "subprocess.py", line 7, in _execute_child
    self.pid = _fork_exec(
"""


@pytest.mark.parametrize(
    ("trace", "kind"),
    [
        (f"{FORK}BlockingIOError: [Errno 11] Resource temporarily unavailable\n", FailureKind.UNKNOWN),
        (f"{FORK}OSError: [Errno 12] Cannot allocate memory\n", FailureKind.HOST_OOM),
        ("cut off", FailureKind.UNKNOWN),
    ],
)
def test_a_start_that_fails_on_one_node_explains_the_end_of_the_others(trace: str, kind: FailureKind) -> None:
    """The agents end the workers of all other nodes for it."""
    ended = tuple(WorkerReport(rank=rank, local_rank=rank, code=-9, by_agent=True, ended_s=1.0) for rank in range(2))
    cascade = WorkerReport(
        rank=2, local_rank=0, code=-6, ended_s=1.0, log_tail="RuntimeError: Connection reset by peer"
    )
    ends = (
        NodeEnd(num_workers=2, workers=ended),
        NodeEnd(num_workers=1, workers=(cascade,)),
        NodeEnd(num_workers=2, problem=trace),
    )
    failure = explain([NodeReport(f"node{index}", end) for index, end in enumerate(ends)], None)
    assert (failure.kind, failure.nodes, failure.ranks) == (kind, ("node2",), ())
    assert failure.message.endswith(f"could not be run on node2: {trace.strip().splitlines()[-1]}")
