"""Garbage collection during imports: disabled, enabled again afterwards, and rare while a program runs."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.garbage import RARE, uncollected
from rlhf_core.worker.roles import load

PROGRAM = """\
import atexit, gc, sys
print(__name__, sys.argv[1:], gc.get_threshold()[0], gc.isenabled())
atexit.register(lambda: print(gc.get_freeze_count() > 0))
"""


def test_the_collector_is_enabled_again_after_failed_imports() -> None:
    with uncollected():
        assert not gc.isenabled()
    with uncollected():
        load("json:loads")
        assert not gc.isenabled(), "an import inside leaves it off for the rest"
    with pytest.raises(ImportError):
        load("rlhf_core.no_such_module:run")
    assert gc.isenabled()


@pytest.mark.parametrize(("before", "seen"), [((), 700), (("rlhf_core.garbage",), RARE)], ids=["plain", "rarely"])
def test_a_program_runs_with_rare_collections(tmp_path: Path, before: tuple[str, ...], seen: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", *before, "program", "one", "two"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    # Exit handlers that a program registers run before those registered earlier: nothing is frozen yet.
    assert done.stdout == f"__main__ ['one', 'two'] {seen} True\nFalse\n"
