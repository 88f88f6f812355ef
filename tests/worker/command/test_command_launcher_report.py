"""Exit codes of ranks, read from logs that torchrun 2.13 wrote."""

import itertools
from pathlib import Path

import pytest

from rlhf_core.worker.command import launcher_report
from rlhf_core.worker.command.launcher_report import TAIL_BYTES, await_exit_code, reported_exit_code

FIRST_FAILURE = """\
W1126 03:11:05.730000 4700 elastic/multiprocessing/api.py:1028] Sending process 4710 closing signal SIGTERM
E1126 03:11:05.845000 4700 elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 4711) of \
binary: /usr/bin/python3
"""
SUMMARY = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-26_03:11:05
  host      : node-1
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 4710)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 4710
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-26_03:11:05
  host      : node-1
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4711
============================================================
"""


@pytest.mark.parametrize(
    ("log", "pid", "code"),
    [
        (FIRST_FAILURE, 4711, -9),
        (FIRST_FAILURE, 4710, None),
        (FIRST_FAILURE, 711, None),
        (FIRST_FAILURE.replace("-9", "3"), 4711, 3),
        (SUMMARY, 4711, -9),
        (SUMMARY, 4710, -15),
        ("step 3 loss 0.5 (pid: 4711)\n", 4711, None),
    ],
)
def test_the_exit_code_is_that_of_the_rank(tmp_path: Path, log: str, pid: int, code: int | None) -> None:
    path = tmp_path / "trainer-0.log"
    path.write_text("x" * 2 * TAIL_BYTES + "\n" + log)
    assert reported_exit_code(path, pid) == code


def test_a_log_that_does_not_exist_reports_nothing(tmp_path: Path) -> None:
    assert reported_exit_code(tmp_path / "none.log", 4711) is None


def test_a_line_that_comes_later_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher first ends its other ranks."""
    path = tmp_path / "trainer-0.log"
    path.touch()
    waits = itertools.count(1)

    def sleep(_seconds: float) -> None:
        if next(waits) == 3:
            path.write_text(FIRST_FAILURE)

    monkeypatch.setattr(launcher_report.time, "sleep", sleep)
    assert await_exit_code(path, 4711, 60.0, lambda: False) == -9
    assert next(waits) == 4


def test_a_launcher_that_has_exited_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trainer-0.log"
    path.write_text(FIRST_FAILURE)
    monkeypatch.setattr(launcher_report.time, "sleep", lambda _seconds: pytest.fail("waited"))
    assert await_exit_code(path, 4711, 60.0, lambda: True) == -9, "its log is read once more"
    assert await_exit_code(path, 4710, 60.0, lambda: True) is None
    assert await_exit_code(path, 4710, 0.0, lambda: False) is None, "nor is one that logs nothing"
