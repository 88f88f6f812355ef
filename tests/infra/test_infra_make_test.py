"""`make test` passes for the right reasons: it is independent of a developer's shell, and no skip is silent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rerun_guard import OPTION as RERUNS
from skip_guard import OPTION, read_allowed

REPOSITORY = Path(__file__).parents[2]
GUARDED = "from skip_guard import pytest_addoption, pytest_configure\n"
"""The conftest of the small test suites below."""


def run_ci(folder: Path, **variables: str) -> dict[str, str]:
    """Run .ci/run with a `make` that only prints the variables of its `make test`."""
    stub = folder / "make"
    stub.write_text(f'#!/bin/sh\n[ "$1" = test ] && exec env\nexec {real_make()} -C {REPOSITORY} "$@"\n')
    stub.chmod(0o755)
    environment = {"HOME": str(folder), "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", str(REPOSITORY / ".ci" / "run")], env=environment, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def real_make() -> str:
    found = subprocess.run(["sh", "-c", "command -v make"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_ci_keeps_only_the_variables_named_in_the_makefile(tmp_path: Path) -> None:
    seen = run_ci(
        tmp_path,
        PIP_EXTRA_INDEX_URL="https://one.example/simple https://two.example/simple",
        PYTHONUNBUFFERED="1",
        PYTHONPATH="/somewhere",
        RLHF_HOME="/somewhere",
        LANG="de_DE.UTF-8",
    )
    shell = {"PWD", "SHLVL", "_"}
    assert seen.keys() - shell == {"HOME", "PATH", "LANG", "PIP_EXTRA_INDEX_URL"}
    assert seen["PIP_EXTRA_INDEX_URL"] == "https://one.example/simple https://two.example/simple"
    assert seen["LANG"] == "C.UTF-8"


def guarded(
    folder: Path, tests: dict[str, str], *options: str, conftest: str = GUARDED
) -> "subprocess.CompletedProcess[str]":
    """Run a small suite of these modules with the guard in its conftest."""
    (folder / "conftest.py").write_text(conftest)
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text("import pytest\n" + text)
    plugins = ("-p", "no:cacheprovider", "-p", "xdist", "-p", "pytest_rerunfailures")  # others take as long as the rest
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--rootdir", str(folder), *options, "."],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


SKIPS = {
    "mark": '@pytest.mark.skipif(True, reason="no Slurm 1")\ndef test_one(): pass\n',
    "inside": 'def test_one(): pytest.skip("no Slurm 2")\n',
    "fixture": '@pytest.fixture\ndef slurm(): pytest.skip("no Slurm 3")\ndef test_one(slurm): pass\n',
    "module": 'pytest.importorskip("slurm", reason="no Slurm 4")\ndef test_one(): pass\n',
}
"""Each way in which a test is skipped."""


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "workers"])
def test_a_skip_that_is_not_allowed_fails_the_session(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = guarded(tmp_path, SKIPS | {"passing": "def test_two(): pass\n"}, OPTION, *options)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    named = done.stdout.partition("skips that are not allowed")[2]
    assert [reason for reason in ("no Slurm 1", "no Slurm 2", "no Slurm 3", "no Slurm 4") if reason not in named] == []


def test_without_the_guard_the_session_would_pass(tmp_path: Path) -> None:
    assert guarded(tmp_path, {"mark": SKIPS["mark"]}).returncode == pytest.ExitCode.OK


def test_a_skip_on_the_list_passes(tmp_path: Path) -> None:
    skipped = '@pytest.mark.skip(reason="needs a CUDA device; this machine has none")\ndef test_one(): pass\n'
    done = guarded(tmp_path, {"gpu": skipped}, OPTION)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "not allowed" not in done.stdout


def test_every_row_has_a_reason(tmp_path: Path) -> None:
    assert all(row.why for row in read_allowed())
    silent = tmp_path / "allowed.toml"
    silent.write_text('[[skip]]\ntest = ""\nreason = "x"\nwhy = " "\n')
    with pytest.raises(ValueError, match="does not say why"):
        read_allowed(silent)


TWICE = """
from pathlib import Path

@pytest.mark.parametrize("number", range({failing}))
def test_first_time_never(number):
    seen = Path(f"seen-{{number}}")
    first = not seen.exists()
    seen.touch()
    assert not first, "too early"

def test_steady(): pass
"""
BOTH = """
import rerun_guard
def pytest_addoption(parser): rerun_guard.add_option(parser)
def pytest_configure(config): rerun_guard.configure(config)
"""


@pytest.mark.parametrize(("failing", "code"), [(0, 0), (2, 0), (3, 1)])
def test_tests_that_pass_on_a_rerun_are_named_and_too_many_fail_the_session(
    tmp_path: Path, failing: int, code: int
) -> None:
    words = ("-n", "1", "--reruns", "1", RERUNS, "2")
    done = guarded(tmp_path, {"twice": TWICE.format(failing=failing)}, *words, conftest=BOTH)
    assert done.returncode == code, done.stdout
    output = done.stdout.partition("tests that were run again")[2]
    assert output.count("AssertionError: too early") == failing


def test_a_test_that_never_passes_fails(tmp_path: Path) -> None:
    words = ("--reruns", "1", RERUNS, "2")
    done = guarded(tmp_path, {"never": "def test_one(): assert False\n"}, *words, conftest=BOTH)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed" in done.stdout


SLOW_TO_COLLECT = """
import time
from pathlib import Path

log = Path("log").open("a", buffering=1)
log.write("begin\\n")
time.sleep(1.0)
log.write("end\\n")
def test_one(): pass
"""


def test_one_worker_collects_before_the_others(tmp_path: Path) -> None:
    hook = "from first_collection import pytest_collection\n"
    done = guarded(tmp_path, {"slow": SLOW_TO_COLLECT}, "-n", "3", conftest=hook)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    first, *others = (tmp_path / "log").read_text().split("end\n")[:-1]
    assert first == "begin\n"
    assert "".join(others).count("begin") == 2


def test_a_machine_without_python_is_told_which_one_it_needs() -> None:
    """`make PYTHON=` calls the script with one word, and so does the advice of infra/slurm/cluster.py."""
    script = REPOSITORY / "infra" / "system_packages.sh"
    done = subprocess.run(["sh", str(script), "python"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "no python3 on PATH: Python 3.11 or newer is needed\n")
