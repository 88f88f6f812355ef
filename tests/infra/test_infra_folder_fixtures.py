"""Fixtures with the lifetime of a test folder end with its last test, not with the session."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

CONFTEST = """\
from contextlib import contextmanager
from pathlib import Path
import pytest
from folder_fixtures import for_folder

@pytest.fixture(scope="module")
def server(request):
    @contextmanager
    def made():
        with LOG.open("a") as log: log.write("made ")
        yield object()
        with LOG.open("a") as log: log.write("ended ")
    return for_folder(request, made)
"""
TEST = """\
from pathlib import Path
def test_one(request, FIXTURE):
    with LOG.open("a") as log: log.write(request.path.stem + " ")
"""


def test_the_fixture_ends_before_the_next_folder_starts(tmp_path: Path) -> None:
    log = f"Path({str(tmp_path / 'log')!r})"
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "conftest.py").write_text(CONFTEST.replace("LOG", log))
    for name, fixture in {"one/test_a": "server", "one/test_b": "server", "two/test_c": "tmp_path"}.items():
        (tmp_path / f"{name}.py").write_text(TEST.replace("LOG", log).replace("FIXTURE", fixture))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "log").read_text().split() == ["made", "test_a", "test_b", "ended", "test_c"]
