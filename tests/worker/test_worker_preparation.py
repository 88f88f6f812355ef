"""The compilation before the first start: its end is seen, and it cannot hold the agent for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_runs import REPOSITORY

LIMIT_S = 20

CALL = """
import sys
from rlhf_core.worker.preparation import prebuild
sys.executable = sys.argv[1]
asked = iter([False, True])
built = prebuild(float(sys.argv[2]), lambda: sys.argv[3] == "cancel" and next(asked, True))
print(built.ok, built.output)
"""


def _prebuild(tmp_path: Path, script: str, patience_s: float, way: str = "wait") -> str:
    """What it says, with a shell script in place of the compiler. Not to be waited for longer than ``LIMIT_S``."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    compiler.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", CALL, str(compiler), str(patience_s), way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("script", "said"), [("echo /cache/op", "True /cache/op"), ("echo no compiler >&2; exit 1", "False no compiler")]
)
def test_what_it_printed_is_kept(tmp_path: Path, script: str, said: str) -> None:
    assert _prebuild(tmp_path, script, 30.0) == said


@pytest.mark.parametrize(
    ("patience_s", "way", "said"), [(0.5, "wait", "False no end within 0 s"), (60.0, "cancel", "False")]
)
def test_a_compiler_that_waits_for_ever_is_ended_with_its_children(
    tmp_path: Path, patience_s: float, way: str, said: str
) -> None:
    """The child holds the output open, as ninja's compilers do: killing the parent alone would leave us waiting."""
    assert _prebuild(tmp_path, f"sleep {2 * LIMIT_S} & wait", patience_s, way) == said
