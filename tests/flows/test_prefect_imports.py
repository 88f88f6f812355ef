"""Import of Prefect for the processes of a site."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import importlib, gc, sys
import prefect.engine
cache_policies = sys.modules["prefect.cache_policies"]
print(__name__, sys.argv[1:], "pandas" in sys.modules, gc.get_threshold()[0])
importlib.reload(cache_policies)
print("pandas" in sys.modules)
"""


def test_prefect_is_imported_without_pandas_which_stays_available(tmp_path: Path) -> None:
    """And, as a control: imported in the usual way, Prefect imports it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "flows.prefect_imports", "program", "one"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ ['one'] False 10000\nTrue\n"
