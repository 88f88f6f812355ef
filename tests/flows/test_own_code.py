"""Changes to the user's code since it was copied into a run directory."""

import os
import shutil
from pathlib import Path

import pytest
from control_fakes import make_spec

from rlhf_core.control.own_code import changed_code, copy_code_again
from rlhf_core.errors import BadConfig
from rlhf_core.launch.prepare import prepare
from rlhf_core.run_dir.run import RunDir


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of the user with a file that is not code."""
    path = tmp_path / "work" / "lib"
    (path / "__pycache__").mkdir(parents=True)
    for name in ("same.py", "edited.py", "removed.py", "__pycache__/same.pyc"):
        (path / name).write_text(f"# {name}\n")
    return path


def run_with(package: Path, runs: Path) -> RunDir:
    spec = make_spec(code={"paths": [str(package)]})
    return prepare(spec, runs, config_source="a.toml", folder=package.parent)


def test_each_changed_file_is_named(package: Path, tmp_path: Path) -> None:
    run = run_with(package, tmp_path / "runs")
    assert changed_code(run, run.read_spec()) == []
    (package / "edited.py").write_text("# edited since\n")
    (package / "removed.py").unlink()
    (package / "added.py").write_text("")
    (package / "__pycache__" / "added.pyc").write_text("")
    assert changed_code(run, run.read_spec()) == ["lib/added.py (new)", "lib/edited.py", "lib/removed.py (removed)"]


def test_the_newest_copy_counts(package: Path, tmp_path: Path) -> None:
    run = run_with(package, tmp_path / "runs")
    for copy in (2, 3):
        (package / "edited.py").write_text(f"# edited for {copy}\n")
        assert copy_code_again(run, run.read_spec()) == copy
        assert changed_code(run, run.read_spec()) == []
        assert run.code == run.root / f"code-{copy}"
    assert (run.root / "code-2" / "snapshot" / "lib" / "edited.py").read_text() == "# edited for 2\n"


def test_what_cannot_be_copied_is_no_code(package: Path, tmp_path: Path) -> None:
    """An editor locks a file by a link to nothing beside it, and a FIFO would block the copy."""
    (package / ".#edited.py").symlink_to("anna@host.4711:1764140000")
    os.mkfifo(package / "pipe")
    (package / "linked.py").symlink_to("same.py")
    run = run_with(package, tmp_path / "runs")
    copied = {path.name for path in (run.code / "snapshot" / "lib").iterdir()}
    assert copied == {"same.py", "edited.py", "removed.py", "linked.py"}
    assert changed_code(run, run.read_spec()) == []


def test_code_that_cannot_be_copied_is_named(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, *given: object, **options: object) -> None:
        raise shutil.Error([(f"{source}/edited.py", "x", "[Errno 13] Permission denied")])

    monkeypatch.setattr(shutil, "copytree", fail)
    with pytest.raises(BadConfig, match=r"cannot copy .*edited.py with the code of the run: .*Permission denied"):
        run_with(package, tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []
