"""Version bounds where another version would break or is known to be unsafe, and hashes in the container."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = DECLARED["optional-dependencies"]
TESTED = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
HASHED = dict(
    re.findall(r"^([a-z0-9._-]+)==(\S+) \\$", (ROOT / "infra" / "requirements.txt").read_text(), re.MULTILINE)
)


def declared(name: str) -> Requirement:
    listed = [*DECLARED["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    return next(found for text in listed if (found := Requirement(text)).name == name)


@pytest.mark.parametrize("name", ["torch", "submitit", "prefect", "deepspeed"])
def test_what_is_used_below_its_surface_has_an_upper_bound(name: str) -> None:
    """The next minor version may change the internals; the tested one is within the bound."""
    found = declared(name).specifier
    assert any(one.operator == "<" for one in found)
    version = Version(TESTED[name])
    assert version in found
    assert Version(f"{version.major}.{version.minor + 1}") not in found


@pytest.mark.parametrize(
    ("name", "unsafe"), [("pillow", "12.2"), ("starlette", "0.49.0"), ("torch", "2.5.1"), ("vllm", "0.17.1")]
)
def test_versions_with_published_holes_are_out(name: str, unsafe: str) -> None:
    assert Version(unsafe) not in declared(name).specifier


def test_the_container_has_the_tested_versions_each_with_a_hash() -> None:
    text = (ROOT / "infra" / "requirements.txt").read_text()
    needed = {Requirement(one).name for one in (*DECLARED["dependencies"], *EXTRAS["postgres"])}
    assert needed <= HASHED.keys()
    assert "hatchling" in HASHED, "the build requirements of the package also have hashes"
    assert {name: version for name, version in HASHED.items() if TESTED.get(name, version) != version} == {}
    blocks = re.split(r"^(?=[a-z0-9._-]+==)", text, flags=re.MULTILINE)[1:]
    assert [block.partition("\n")[0] for block in blocks if "--hash=sha256:" not in block] == []
    assert "://" not in text, "no index of this machine"


def test_the_image_takes_nothing_without_a_hash_and_no_secret() -> None:
    steps = (ROOT / "infra" / "Dockerfile").read_text().splitlines()
    installs = [line for line in steps if "pip install" in line]
    assert len(installs) == 2
    assert all("--no-deps" in line for line in installs)
    assert "--require-hashes" in installs[0]
    assert "--no-build-isolation" in installs[1]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs", "**/.env*", "**/environment", "**/rlhf.toml"} <= {*ignored}
