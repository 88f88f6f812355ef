"""Packages are installed by uv with pip's configuration, and by pip where uv cannot do it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "install_packages.py"
STUB = """
import json, os, sys
if sys.argv[1:] == ["config", "list"]:
    print(os.environ.get("LISTING", ""))
    raise SystemExit
names = ("UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX_STRATEGY", "SSL_CERT_FILE")
with open(os.environ["CALLS"], "a") as calls:
    variables = {name: os.environ[name] for name in names if name in os.environ}
    print(json.dumps([__spec__.parent, sys.argv[1:], variables]), file=calls)
sys.exit(__spec__.parent in os.environ["FAILING"].split())
"""

Install = Callable[..., tuple[int, list[tuple[str, list[str], dict[str, str]]]]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Run the script between stubs of pip and uv; exit status, and the calls of both that install something."""
    for name in ("pip", "uv"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "__main__.py").write_text(STUB)
    calls = tmp_path / "calls"

    def run(
        listing: str = "", failing: str = "", **variables: str
    ) -> tuple[int, list[tuple[str, list[str], dict[str, str]]]]:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "CALLS": str(calls), **variables}
        environment |= {"LISTING": listing, "FAILING": failing}
        done = subprocess.run([sys.executable, str(SCRIPT), "-e", ".[dev]"], env=environment, check=False)
        return done.returncode, [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def test_uv_installs_with_what_pip_is_configured_for(install: Install) -> None:
    status, calls = install(
        "\n".join(
            [
                "global.index-url='https://user:secret@one.example/simple'",
                "global.extra-index-url='https://two.example/simple file:///three'",
                "install.find-links='/wheels\\n/more'",
                "global.constraint='/first.txt /second.txt'",
                "global.cert='/file.pem'",
                ":env:.cert='/variable.pem'",
                "download.index-url='https://unused.example/simple'",
            ]
        )
    )
    (first, _, _), (tool, arguments, variables) = calls
    assert (status, first, tool) == (0, "pip", "uv")
    assert arguments[-4:] == ["--constraint=/first.txt", "--constraint=/second.txt", "-e", ".[dev]"]
    assert not any("secret" in argument for argument in arguments)
    assert variables == {
        "UV_DEFAULT_INDEX": "https://user:secret@one.example/simple",
        "UV_EXTRA_INDEX_URL": "https://two.example/simple file:///three",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/variable.pem",
    }


def test_variables_of_uv_that_a_user_has_set_are_kept(install: Install) -> None:
    _, calls = install("global.index-url='https://one.example/simple'", UV_DEFAULT_INDEX="https://mine.example/simple")
    assert calls[-1][2]["UV_DEFAULT_INDEX"] == "https://mine.example/simple"


@pytest.mark.parametrize(
    ("listing", "failing", "expected"),
    [
        pytest.param("global.only-binary=':all:'", "", ["pip"], id="a setting of unknown meaning"),
        pytest.param("", "uv", ["pip", "uv", "pip"], id="uv fails"),
    ],
)
def test_pip_installs_where_uv_does_not(install: Install, listing: str, failing: str, expected: list[str]) -> None:
    status, calls = install(listing, failing)
    assert (status, [call[0] for call in calls]) == (0, expected)
    assert calls[-1][1][-3:] == ["--no-compile", "-e", ".[dev]"]


def test_a_failure_of_both_is_a_failure(install: Install) -> None:
    status, _ = install("", "uv pip")
    assert status == 1
