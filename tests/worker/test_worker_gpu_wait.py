"""The compilation before the first start: its end is seen, and it cannot hold the agent for ever."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_runs import REPOSITORY, AgentRun

from rlhf_core.diagnosis.policy import decide_next
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.run import SuperviseSpec

LIMIT_S = 20

CALL = """
import sys
from rlhf_core.worker.gpu_wait import prebuild
sys.executable = sys.argv[1]
asked = iter([False, True])
said = lambda doing: print("said", doing)
built = prebuild(float(sys.argv[2]), lambda: sys.argv[3] == "cancel" and next(asked, True), said)
print(built.kind, built.output)
"""


def _prebuild(tmp_path: Path, script: str, timeout_s: float, way: str = "wait") -> str:
    """Its output, with a shell script in place of the compiler. Not to be waited for longer than ``LIMIT_S``."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    compiler.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", CALL, str(compiler), str(timeout_s), way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo /cache/op", "None /cache/op"),
        ("echo no compiler >&2; exit 1", "import_error no compiler"),
        ("echo fatal error: Killed signal terminated program cc1plus; exit 1", "host_oom fatal error: Killed signal"),
        ("echo error: No space left on device; exit 1", "disk_full error: No space left on device"),
        ("echo not yet; exit 75", "hang not yet"),
        ("kill -9 $$", "worker_killed"),
        ("kill -TERM $$; kill -USR2 $$; echo /cache/op", "None /cache/op"),
    ],
)
def test_what_it_printed_is_kept_and_what_may_pass_is_no_import_error(tmp_path: Path, script: str, said: str) -> None:
    assert _prebuild(tmp_path, script, 30.0).startswith(said)


def test_it_may_take_longer_than_its_silence_may_last(tmp_path: Path) -> None:
    """It says what it does meanwhile, and that is passed on; with the control that in silence it is ended."""
    speaks = "for i in 1 2 3 4 5 6; do echo ... waiting for process 7; sleep 1; done; echo /cache/op"
    assert _prebuild(tmp_path, speaks, 4.0).splitlines() == ["said waiting for process 7"] * 6 + ["None /cache/op"]
    silent = speaks.replace("echo ... waiting for process 7;", "")
    assert _prebuild(tmp_path, silent, 4.0) == "hang no sign of life for 4 s"


@pytest.mark.parametrize(
    ("timeout_s", "way", "said"), [(0.5, "wait", "hang no sign of life for 0 s"), (60.0, "cancel", "worker_killed")]
)
def test_a_compiler_that_waits_for_ever_is_ended_with_its_children(
    tmp_path: Path, timeout_s: float, way: str, said: str
) -> None:
    """The child holds the output open, as ninja's compilers do: killing the parent alone would leave us waiting."""
    assert _prebuild(tmp_path, f"sleep {2 * LIMIT_S} & wait", timeout_s, way) == said


@pytest.mark.parametrize(
    ("exit_code", "kind"), [(1, FailureKind.IMPORT_ERROR), (75, FailureKind.HANG)], ids=["cannot be", "took too long"]
)
def test_an_attempt_whose_operation_is_not_there_ends_with_why(
    agent_run: Callable[..., AgentRun], exit_code: int, kind: FailureKind, tmp_path: Path
) -> None:
    """A compilation that only took too long is tried again; one that cannot succeed is not."""
    run = agent_run()
    # In place of the package that compiles: what it says, and its exit code.
    stand_in = tmp_path / "sitecustomize.py"
    words = ["... waiting for process 7 on n1", "shm.cpp:9:10: fatal error: omp.h: No such file or directory"]
    stand_in.write_text(
        "import os, sys\n"
        "if sys.orig_argv[-2:] == ['rlhf_core.worker', 'prebuild']:\n"
        f"    print({words[0]!r}, {words[1]!r}, sep='\\n', flush=True)\n"
        f"    os._exit({exit_code})\n"
    )
    run.start(native=True, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    code, _ = run.finish()
    outcome = run.outcome()
    assert (code, outcome.state, outcome.failure_kind) == (1, AttemptState.FAILED, kind)
    assert words[1] in outcome.message
    assert "waiting for process 7" not in outcome.message
    said = [event.message for event in run.events(0) if event.kind == "prebuild"]
    assert said[0] == "waiting for process 7 on n1"
    again = decide_next(kind, 1, False, SuperviseSpec(), 0.0).action
    assert again is (Action.NEW_ATTEMPT if kind is FailureKind.HANG else Action.STOP)
