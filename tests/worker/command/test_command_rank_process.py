"""Rank processes that are not children of the worker: found, and followed until they exit."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from process_tools import is_alive, until
from small_disk import small_disk

from rlhf_core.worker.command.rank_process import RankProcess, find_rank
from rlhf_core.worker.in_rank.rlhf_rank_file import PATH_VARIABLE, RankFile, own_file, rank_path

PARENT = (
    "import subprocess, sys, time; child = subprocess.Popen(sys.argv[1:]); print(child.pid, flush=True); time.sleep(60)"
)
"""A launcher that starts one process and does not collect its exit."""


@contextmanager
def launched(code: str, parent: str = PARENT) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A launcher that has started a program, and the process id of the program."""
    command = [sys.executable, "-c", parent, sys.executable, "-c", code]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        yield launcher, int(launcher.stdout.readline())
    finally:
        launcher.kill()
        launcher.communicate()


def test_the_exit_code_of_a_process_that_is_not_a_child_is_known() -> None:
    for code, expected in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("pass", 0)):
        with launched(f"import time; time.sleep(0.5); {code}") as (_, pid):
            rank = RankProcess(pid)
            assert not rank.poll()
            assert rank.poll(20.0)
            assert rank.code == expected
            rank.close()


def test_the_exit_code_of_a_process_reaped_earlier_is_unknown() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    rank = RankProcess(child.pid)
    child.wait()
    assert rank.poll()
    assert rank.code is None, "and not 0, which would be a success"
    rank.send(signal.SIGTERM)  # harmless
    rank.close()


def test_the_exit_of_the_launcher_of_a_rank_is_seen() -> None:
    """By a worker that did not start the launcher: of a rank that exits with 0, the launcher logs nothing."""
    with launched("input()") as (launcher, pid):
        rank = RankProcess(pid)
        assert not rank.has_launcher_exited
        launcher.kill()
        until(lambda: rank.has_launcher_exited)
        assert not rank.poll()
        rank.close()


def test_the_exit_code_of_a_watched_rank_is_read_before_its_launcher_reaps_it() -> None:
    """The launcher reaps the rank soon, and the worker polls later, as a worker does that reads large logs."""
    collects = PARENT.replace("time.sleep(60)", "child.poll() or time.sleep(1.2); child.wait(); time.sleep(60)")
    with launched("import os, time; time.sleep(0.8); os.kill(os.getpid(), 9)", collects) as (_, pid):
        watched, unwatched = RankProcess(pid), RankProcess(pid)
        watched.watch()
        until(lambda: not is_alive(pid) and not psutil.pid_exists(pid))
        assert watched.poll()
        assert unwatched.poll()
        assert (watched.code, watched.has_failed) == (-9, True)
        assert unwatched.code is None, "negative control: a later poll cannot tell"


def test_a_process_that_is_gone_cannot_be_followed() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        RankProcess(child.pid)


def test_a_status_file_for_which_memory_has_no_room_is_named(tmp_path: Path) -> None:
    """In a process of its own: without room for a page, the kernel would kill the one that first writes to it."""
    code = f"import sys; from {RankFile.__module__} import RankFile; RankFile(sys.argv[1], create=True)"
    with small_disk(tmp_path / "small", "64k") as disk:
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        ended = subprocess.run([sys.executable, "-c", code, disk / "rank-0"], capture_output=True, text=True)
    assert f"No space left on device: '{disk}/rank-0'" in ended.stderr, ended.returncode


def test_a_rank_is_found_by_its_environment_or_its_own_report(tmp_path: Path) -> None:
    prefix = str(tmp_path / "ranks")
    status = RankFile(rank_path(prefix, 1), create=True)
    assert find_rank(status, prefix, 1) is None
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, PATH_VARIABLE: prefix, "LOCAL_RANK": "1"})
    try:
        assert until(lambda: find_rank(status, prefix, 1)) == sleeper.pid
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_process_that_a_rank_starts_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = str(tmp_path / "ranks")
    status = RankFile(rank_path(prefix, 0), create=True)
    monkeypatch.setenv(PATH_VARIABLE, prefix)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert own_file() is not None
    assert rank_of_a_child() == 0
    assert find_rank(status, prefix, 0) == os.getpid()


def test_a_helper_that_ran_before_the_program_is_not_taken_for_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With launch = "per_rank", trainer.setup and a script run `python -c ...` with the variables of the rank."""
    prefix = str(tmp_path / "ranks")
    status = RankFile(rank_path(prefix, 0), create=True)
    monkeypatch.setenv(PATH_VARIABLE, prefix)
    monkeypatch.setenv("LOCAL_RANK", "0")
    helper, program = rank_of_a_child(), rank_of_a_child()
    assert helper != program
    assert find_rank(status, prefix, 0) == program


def rank_of_a_child() -> int:
    """Process id of a new process if it is taken for the rank, otherwise 0."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import rlhf_rank_file as words; "
        "print(os.getpid() if words.own_file() else 0)"
    )
    in_rank = Path(__file__).parents[3] / "rlhf_core" / "worker" / "in_rank"
    command = [sys.executable, "-c", program, str(in_rank)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
