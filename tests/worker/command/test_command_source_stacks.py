"""Python stacks as a sign of life: real py-spy dumps of real processes."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest
from process_tools import command_of
from watched_programs import Polls, Start, watched

from rlhf_core.worker.command.observation import Reading
from rlhf_core.worker.command.sources import stacks
from rlhf_core.worker.command.sources.stacks import Stacks, stacks_of
from rlhf_core.worker.evidence.collection import find_py_spy
from rlhf_core.worker.processes import process_state

LOOP = """
def one():
    return sum(range(1000))
def two():
    return max(range(1000))
while True:
    one()
    two()
"""
WAIT = """
import threading
lock = threading.Lock()
lock.acquire()
def collective():
    lock.acquire()
collective()
"""


def samples(source: Stacks, num: int) -> Iterator[Reading]:
    """Readings at sample intervals: every poll starts a dump and collects it a little later."""
    polls = Polls(source)
    for _ in range(num):
        polls.poll()
        assert not wait(source._samples.values(), timeout=10).not_done
        yield polls.poll()


@pytest.mark.parametrize("stopped", [False, True], ids=["it waits", "stopped"])
def test_it_detects_a_rank_that_stands_still(tmp_path: Path, start: Start, stopped: bool) -> None:
    program = start(LOOP if stopped else WAIT)
    time.sleep(1)
    if stopped:
        program.stop()
    found = samples(Stacks(watched(tmp_path, pids=[program.pid])), 4)
    assert [(one.moved, one.problem) for one in found] == [(False, "")] * 4
    assert (process_state(program.pid) == "T") == stopped, "left as it was"


LOOP_BESIDE_A_HANG = f"""
import threading
threading.Thread(target=exec, args=({LOOP!r}, {{}}), daemon=True).start()
{WAIT}"""


@pytest.mark.parametrize("code", [LOOP, LOOP_BESIDE_A_HANG], ids=["of more than one line", "in a thread beside a hang"])
def test_it_is_blind_to_an_endless_loop(tmp_path: Path, start: Start, code: str) -> None:
    program = start(code)
    time.sleep(1)
    assert any(one.moved for one in samples(Stacks(watched(tmp_path, pids=[program.pid])), 12))


@pytest.fixture
def silent_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A py-spy that never answers and is killed after half a second."""
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(slow))
    monkeypatch.setattr(stacks, "TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("silent_py_spy")
def test_a_poll_does_not_block(tmp_path: Path, start: Start) -> None:
    """A py-spy that never responds is killed after its timeout, and reported."""
    program = start(WAIT)
    source = Stacks(watched(tmp_path, pids=[program.pid]))
    assert source.poll(0.0) == Reading()
    (sample,) = source._samples.values()
    assert not sample.done()
    wait([sample], timeout=10)
    assert source.poll(1.0).problem == f"no stack of process {program.pid} from py-spy: no answer within 0 s"


@pytest.mark.usefixtures("silent_py_spy")
def test_a_process_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its py-spy hung in the kernel, where it cannot be killed."""
    monkeypatch.setattr(stacks, "TIMEOUT_S", 60.0)
    first, second = start(WAIT), start(WAIT)
    pids = [first.pid]
    source = Stacks(watched(tmp_path, pids=pids))
    source.poll(0.0)
    stuck = source._samples[first.pid]
    source._program = find_py_spy()
    pids.append(second.pid)
    for now_s in (10.0, 20.0):
        source.poll(now_s)
        wait([source._samples[second.pid]], timeout=10)
    assert (source.poll(30.0).problem, source._samples[first.pid]) == ("", stuck)
    assert second.pid in source._before
    silent = [one for one in psutil.Process().children() if command_of(one)[:1] == ["sleep"]]
    for process in silent:
        process.kill()
    wait([stuck], timeout=10)


def test_samples_are_five_seconds_apart(tmp_path: Path, start: Start) -> None:
    program = start(WAIT)
    source = Stacks(watched(tmp_path, pids=[program.pid]))
    source.poll(0.0)
    wait(source._samples.values(), timeout=10)
    source.poll(stacks.SAMPLE_S - 0.1)
    assert source._samples == {}
    source.poll(stacks.SAMPLE_S)
    assert [*source._samples] == [program.pid]


def test_an_ended_process_is_no_progress(tmp_path: Path, start: Start) -> None:
    program = start("pass")
    program.process.wait()
    assert [*samples(Stacks(watched(tmp_path, pids=[program.pid])), 2)] == [Reading()] * 2


def test_a_process_that_is_not_python_is_reported(tmp_path: Path, start: Start) -> None:
    program = start("import os; os.execvp('sleep', ['sleep', '1000'])")
    time.sleep(1)
    found = [*samples(Stacks(watched(tmp_path, pids=[program.pid])), 2)]
    assert found[0].problem.startswith(f"no stack of process {program.pid} from py-spy: ")
    assert not any(one.moved for one in found)


def test_a_missing_py_spy_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    source = Stacks(watched(tmp_path, pids=[os.getpid()]))
    reading = source.poll(0.0)
    assert (reading.moved, "rlhf-flows[training]" in reading.problem) == (False, True)


def test_the_state_of_a_thread_is_not_part_of_its_stack() -> None:
    frame = {"name": "f", "filename": "a.py", "line": 3, "locals": None}
    threads = [{"thread_id": 7, "frames": [frame], "active": active, "owns_gil": active} for active in (True, False)]
    assert stacks_of(threads[:1]) == stacks_of(threads[1:]) == {7: (("f", "a.py", 3),)}
