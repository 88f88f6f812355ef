"""Processes of an agent: nothing survives the agent, and the agent keeps track of everything.

Each test has the control that shows why the mechanism is needed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_runs import REPOSITORY
from made_reports import rank_status
from process_tools import is_alive, until

from rlhf_core.worker import processes
from rlhf_core.worker.command.rank_process import RankProcess, has_handler
from rlhf_core.worker.evidence.collection import collect

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(60)
"""
DYING = """
import time
from rlhf_core.machine.parent_death import die_with_parent
die_with_parent()
print("r", flush=True)
time.sleep(60)
"""
SURVIVING = "import time; time.sleep(60)"

AGENT = """
import os, subprocess, sys, time
from rlhf_core.machine.parent_death import adopt_orphans
from rlhf_core.worker.processes import end_descendants
if sys.argv[1] == "adopt":
    adopt_orphans()
# A shell that leaves a process behind in a session of its own, and is gone.
subprocess.run(["sh", "-c", "setsid sleep 60 & echo $! > daemon"], check=True)
time.sleep(0.2)
print(end_descendants())
"""


def _run_in_repository(code: str, *arguments: str, cwd: Path = REPOSITORY) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environment, cwd=cwd
    )


@pytest.mark.parametrize(("code", "survives"), [(DYING, False), (SURVIVING, True)])
def test_a_worker_dies_with_its_agent(code: str, survives: bool) -> None:
    parent = _run_in_repository(PARENT, code)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if not survives:
        assert parent.stdout.readline() == "r\n"
    parent.kill()
    parent.wait()
    time.sleep(0.3)
    try:
        assert is_alive(child) is survives
    finally:
        if survives:
            os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.parametrize("adopts", [True, False])
def test_daemons_are_ended_because_they_were_adopted(tmp_path: Path, adopts: bool) -> None:
    agent = _run_in_repository(AGENT, "adopt" if adopts else "ignore", cwd=tmp_path)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "[]\n"
    agent.wait(timeout=30)
    agent.stdout.close()
    daemon = int((tmp_path / "daemon").read_text(encoding="utf-8"))
    try:
        assert is_alive(daemon) is not adopts
    finally:
        if not adopts:
            os.kill(daemon, signal.SIGKILL)


def test_an_exit_is_observed_without_reaping() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"])
    assert until(lambda: processes.peek_exit(child.pid)) == 3
    assert processes.process_state(child.pid) == "Z"
    assert child.wait() == 3
    assert processes.peek_exit(child.pid) is None
    assert processes.process_state(child.pid) == "-"


def test_a_process_with_a_name_that_the_kernel_has_cut_within_a_character_is_read(tmp_path: Path) -> None:
    """A name ends after 15 bytes, and a program may give itself any, as with ``setproctitle``."""
    name = "import ctypes; ctypes.CDLL(None).prctl(15, 'обучение модели'.encode(), 0, 0, 0)"
    child = subprocess.Popen([sys.executable, "-c", f"{name}; print(flush=True); input()"], stdin=-1, stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        until(lambda: processes.process_state(child.pid) == "S")
        assert not has_handler(child.pid, signal.SIGUSR1)
        status = rank_status(0, node="n1", pid=child.pid, process_state="T")
        collect([status], {}, tmp_path, "n1")
        assert "State:" in (tmp_path / "process-n1-0.txt").read_text()
    finally:
        child.kill()
    rank = RankProcess(child.pid)
    assert rank.poll(10.0)
    assert rank.code == -signal.SIGKILL
    child.communicate()


def test_a_signal_is_a_negative_exit_and_a_stopped_group_can_be_killed() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: processes.process_state(child.pid) == "T")
    assert processes.peek_exit(child.pid) is None
    processes.kill_group(child.pid)
    assert until(lambda: processes.peek_exit(child.pid)) == -signal.SIGKILL
    child.wait()
    processes.kill_group(child.pid)  # harmless after the group has ended


def test_owned_children_are_not_reaped() -> None:
    owned, adopted = (subprocess.Popen(["true"]) for _ in range(2))
    until(lambda: {processes.process_state(child.pid) for child in (owned, adopted)} == {"Z"})
    processes.reap_orphans({owned.pid})
    assert processes.process_state(owned.pid) == "Z"
    assert processes.process_state(adopted.pid) == "-"
    assert owned.wait() == 0
    assert adopted.wait() == 0


def test_the_kernel_counts_out_of_memory_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(processes, "control_group", lambda: tmp_path)
    assert processes.oom_kills() == 2
