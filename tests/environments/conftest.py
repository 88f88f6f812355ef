"""Packages of this folder's own, so that environments are made without a download."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of one empty module."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that pip takes everything from: two versions of `torch` and of `tinytrainer`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("torch", "tinytrainer"):
        for version in ("1.0", "2.0"):
            write_wheel(folder, name, version)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture(scope="session")
def _virtual_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def begin(_virtual_environment: Path) -> Callable[[Path], Path]:
    """Lay out an environment that was begun: pip is in it, nothing else, and no stamp. `create` goes on with it.

    A copy: to unpack and compile pip is most of the time of making one.
    """
    return lambda folder: Path(shutil.copytree(_virtual_environment, folder, symlinks=True))
