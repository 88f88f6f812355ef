"""Activity as a sign of life: real processes that loop, wait, write and are stopped."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from amd_node import device, make_amd_node, write
from process_tools import until
from watched_programs import Start, watched

from rlhf_core.machine import amd_gpus
from rlhf_core.worker.command.observation import Reading
from rlhf_core.worker.command.sources import activity
from rlhf_core.worker.command.sources.activity import Activity

LOOP = "while True: pass"
WAIT = "import time; time.sleep(1000)"
WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
open(sys.argv[2], "w").write(str(child.pid))
time.sleep(1000)
"""
WRITE = """
import sys, time
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.write(b"x" * 4096)
        time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "SAMPLE_S", 0.5)


def shows_life(tmp_path: Path, pids: Sequence[int]) -> bool:
    """Wait until the processes are at work, then take two samples."""
    time.sleep(0.7)
    source = Activity(watched(tmp_path, pids=pids))
    assert not source.poll(time.monotonic()).moved, "there is no earlier sample to compare with"
    time.sleep(0.6)
    return source.poll(time.monotonic()).moved


def test_it_detects_a_stopped_rank(tmp_path: Path, start: Start) -> None:
    program = start(LOOP)
    program.stop()
    assert not shows_life(tmp_path, [program.pid])


def test_it_detects_a_waiting_rank(tmp_path: Path, start: Start) -> None:
    assert not shows_life(tmp_path, [start(WAIT).pid])


def test_it_is_blind_to_an_endless_loop(tmp_path: Path, start: Start) -> None:
    assert shows_life(tmp_path, [start(LOOP).pid])


def test_work_of_a_child_is_a_sign_of_life(tmp_path: Path, start: Start) -> None:
    program = start(WITH_CHILD, LOOP, tmp_path / "child")
    child = until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    assert shows_life(tmp_path, [program.pid, int(child)])


def test_work_of_a_child_is_no_sign_of_life_of_a_stopped_rank(tmp_path: Path, start: Start) -> None:
    program = start(WITH_CHILD, LOOP, tmp_path / "child")
    child = until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    program.stop()
    assert not shows_life(tmp_path, [program.pid, int(child)])


def test_writing_is_a_sign_of_life(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "MIN_CPU_SHARE", 100.0)
    assert shows_life(tmp_path, [start(WRITE, tmp_path / "file").pid])


def test_earlier_usage_of_a_process_that_joins_late_is_not_counted(tmp_path: Path, start: Start) -> None:
    waiting = start(WAIT)
    used = start(
        "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\ntime.sleep(1000)"
    )
    time.sleep(2)
    pids = [waiting.pid]
    source = Activity(watched(tmp_path, pids=pids))
    source.poll(time.monotonic())
    pids.append(used.pid)
    time.sleep(0.6)
    assert not source.poll(time.monotonic()).moved


def test_ended_processes_are_no_progress(tmp_path: Path, start: Start) -> None:
    program = start("pass")
    program.process.wait()
    source = Activity(watched(tmp_path, pids=[program.pid]))
    assert [source.poll(float(now)) for now in range(3)] == [Reading()] * 3
    assert Activity(watched(tmp_path)).poll(0.0) == Reading()


def test_a_poll_is_short(tmp_path: Path, start: Start) -> None:
    source = Activity(watched(tmp_path, pids=[start(WAIT).pid]))
    source.poll(0.0)
    before = time.process_time()
    for now in range(1, 21):
        source.poll(float(now))
    assert (time.process_time() - before) / 20 < 0.05


@pytest.mark.parametrize("is_own", [True, False])
def test_a_busy_gpu_counts_for_the_ranks_that_use_it(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    program = start(WAIT)
    user = program.pid if is_own else os.getpid()
    monkeypatch.setattr(activity, "_DRIVER", tmp_path)
    monkeypatch.setattr(activity, "GpuTelemetry", lambda: SimpleNamespace(are_used_by=lambda pids: user in pids))
    assert shows_life(tmp_path, [program.pid]) == is_own


@pytest.mark.parametrize(("listed", "problem"), [("-1", ""), ("7", "GPU utilization is unavailable")])
def test_a_job_without_gpus_on_an_amd_node_has_no_problem_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, problem: str
) -> None:
    monkeypatch.setattr(activity, "_DRIVER", tmp_path / "absent")
    monkeypatch.setattr(amd_gpus, "SYSFS", make_amd_node(tmp_path / "sys"))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", listed)
    assert Activity(watched(tmp_path)).poll(0.0).problem.partition(":")[0] == problem


def test_a_missing_driver_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    source = Activity(watched(tmp_path))
    assert "rlhf-flows[training]" in source.poll(0.0).problem


@pytest.mark.parametrize(
    ("is_own", "held", "percent", "moved"),
    [(True, 1, 90, True), (True, 0, 90, False), (True, 1, 0, False), (False, 1, 90, False)],
    ids=["busy", "no memory on it", "idle", "of another process"],
)
def test_a_busy_amd_gpu_counts_for_the_ranks_that_hold_memory_on_it(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, is_own: bool, held: int, percent: int, moved: bool
) -> None:
    program, root = start(WAIT), make_amd_node(tmp_path / "sys")
    monkeypatch.setattr(activity, "_DRIVER", tmp_path / "absent")
    monkeypatch.setattr(amd_gpus, "SYSFS", root)
    process = root / "class/kfd/kfd/proc" / str(program.pid if is_own else os.getpid())
    for gpu in range(3):
        write(device(root, gpu) / "gpu_busy_percent", f"{percent if gpu == 1 else 0}\n")
        write(process / f"vram_{30000 + gpu}", f"{held if gpu == 1 else 0}\n")
    assert shows_life(tmp_path, [program.pid]) == moved
