"""Python environments of external trainers: virtual environments made from constraints kept here.

A definition (``infra/environments/NAME.toml``) names the required packages and pins everything else, so that an
environment is the one that was tested. An environment is complete once its stamp, written last, holds the hash of the
definition.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import BadConfig, BadInput, EnvironmentFailed
from rlhf_core.files.shipped import shipped
from rlhf_core.machine.accounts import expanded
from rlhf_core.text.redaction import masked

_DEFINITIONS = shipped("definitions", "environments")
STAMP = "rlhf-environment.json"
"""File in an environment that records what it was made from; written once everything is installed."""
_NUM_LINES_SHOWN = 15
_DISK_FULL = os.strerror(errno.ENOSPC)
_TORCH = re.compile(r"^torch\b", re.IGNORECASE)
_VERSION = re.compile(r"\d+\.\d+")
_PIP_IS_COMPLETE = """
import importlib.metadata, sys
names = ["pip"] if sys.version_info >= (3, 12) else ["pip", "setuptools"]
sys.exit(not all(importlib.metadata.distribution(name).read_text("INSTALLER") for name in names))
"""
"""Exits with 0 if pip and setuptools are complete: pip writes INSTALLER after it has unpacked a package."""

_VERSIONS = """\
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = ""
print(json.dumps(found))
"""

State = Literal["ready", "unfinished", "outdated", "absent"]


@dataclass(frozen=True)
class Definition:
    """Content of an environment."""

    name: str
    summary: str
    """Purpose, in one sentence."""
    torch: str
    """Requirement of torch that it was tested with."""
    requirements: tuple[str, ...]
    """Required packages, as arguments of pip, without torch."""
    constraints: tuple[str, ...]
    """Tested versions of all other packages."""

    def lines(self, torch: str) -> tuple[str, ...]:
        """Constraints for a requirement of torch; the pins of torch's own packages hold only for the tested one."""
        return self.constraints if torch == self.torch else tuple(x for x in self.constraints if not _TORCH.match(x))

    def content_hash(self, torch: str, python: str) -> str:
        """Hash of everything that determines what is installed.

        Args:
            torch: Requirement of torch.
            python: Version of Python, such as "3.11".
        """
        parts = [python, torch, *self.requirements, "", *self.lines(torch)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Found:
    """State of an environment."""

    folder: Path
    state: State
    torch: str = ""
    """Requirement of torch that it was made with; empty unless it is ready or outdated."""
    python: str = ""
    """Python version, such as "3.11"; empty unless it is ready or outdated."""


@dataclass(frozen=True)
class Made:
    """Result of :func:`create`."""

    folder: Path
    was_there: bool
    """True if nothing had to be done."""
    seconds: float


def names() -> tuple[str, ...]:
    """Names of all definitions."""
    return tuple(sorted(path.stem for path in _DEFINITIONS.glob("*.toml")))


def definition(name: str) -> Definition:
    """Definition with a given name.

    Raises:
        BadInput: there is no such definition.
    """
    if name not in names():
        raise BadInput(f"found no environment {name!r}, expected one of {', '.join(names())}")
    return read_definition(_DEFINITIONS / f"{name}.toml")


def read_definition(path: Path) -> Definition:
    """Read a definition.

    Raises:
        BadInput: its content is not a definition.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return Definition(
            name=path.stem,
            summary=content["summary"],
            torch=content["torch"],
            requirements=tuple(content["requirements"]),
            constraints=tuple(content["constraints"].split()),
        )
    except (KeyError, ValueError, AttributeError) as error:
        raise BadInput(f"{path} is no definition of an environment: {error!r}") from None


def default_folder(name: str, home: Path) -> Path:
    """Folder of an environment that was made without naming a folder.

    Args:
        name: Name of the definition.
        home: Home folder of the site.
    """
    return home / "environments" / name


def environment_folder(name_or_folder: str, home: Path) -> Path:
    """Folder that ``trainer.environment`` refers to.

    Args:
        name_or_folder: Name of an environment of ``rlhf env create``, or the folder of any virtual environment.
        home: Home folder of the site.

    Raises:
        BadConfig: it does not exist, or was not finished.
    """
    found = f"trainer.environment = {name_or_folder!r}"
    if "/" in name_or_folder or name_or_folder.startswith((".", "~")):
        folder = expanded(name_or_folder).absolute()
        if not _interpreter(folder).is_file():
            raise BadConfig(f"{found} without bin/python in it")
        return folder
    folder = default_folder(name_or_folder, home)
    stamped = _stamp(folder)
    if _interpreter(folder).is_file() and (stamped or name_or_folder not in names()):
        return folder
    if name_or_folder not in names():
        raise BadConfig(
            f"{found}, and no {folder} (`rlhf env create` knows {', '.join(names())}; a path needs a / in it)"
        )
    state = "was not finished" if folder.exists() else "is not there"
    raise BadConfig(f"{found}, and {folder} {state} (run `rlhf env create {name_or_folder}`)")


def inspect(wanted: Definition, folder: Path) -> Found:
    """State of an environment, from its stamp."""
    stamp = _stamp(folder)
    if not stamp or not _interpreter(folder).is_file():
        return Found(folder, "unfinished" if (folder / "pyvenv.cfg").exists() else "absent")
    torch, python = str(stamp.get("torch", "")), str(stamp.get("python", ""))
    fits = stamp.get("hash") == wanted.content_hash(torch, python)
    return Found(folder, "ready" if fits else "outdated", torch, python)


def create(
    wanted: Definition,
    folder: Path,
    *,
    torch: str = "",
    python: str = sys.executable,
    report_progress: Callable[[str], None] = lambda line: None,
) -> Made:
    """Make an environment, or resume an unfinished one; does nothing if it is complete.

    Args:
        wanted: Definition of its content.
        folder: Its folder; must be empty, absent, or a virtual environment.
        torch: Requirement of torch; empty for the one in the definition.
        python: Interpreter to make it with.
        report_progress: Called with each line of progress.

    Raises:
        BadInput: the folder holds something else, another process is making it, or ``torch`` or ``python`` is not one.
        EnvironmentFailed: it could not be made; a retry resumes from what is there.
    """
    torch = torch or wanted.torch
    if not _TORCH.match(torch) and "/" not in torch:
        raise BadInput(f"found --torch {torch}, expected a requirement such as {wanted.torch}")
    started = time.monotonic()
    version = _python_version(python)
    if inspect(wanted, folder) == Found(folder, "ready", torch, version):
        return Made(folder, True, 0.0)
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is no virtual environment and not empty; give another --folder, or remove it first")
    with _locked(folder):
        (folder / STAMP).unlink(missing_ok=True)
        report_progress(f"making {folder} with Python {version}")
        _make_virtual(folder, python, report_progress)
        _install(wanted, folder, torch, report_progress)
        _check_versions(wanted, folder, torch)
        seconds = time.monotonic() - started
        stamp = {
            "name": wanted.name,
            "hash": wanted.content_hash(torch, version),
            "torch": torch,
            "python": version,
            "seconds": round(seconds, 1),
        }
        from rlhf_core.files.whole import write_text  # loads pydantic, which `rlhf --help` does without

        write_text(folder / STAMP, json.dumps(stamp))
    return Made(folder, False, seconds)


def _interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def _stamp(folder: Path) -> dict[str, Any]:
    """Content of the stamp; empty if it is missing or cannot be read."""
    try:
        found = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude a second ``rlhf env create``. The lock ends with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise BadInput(f"cannot make {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BadInput(f"another process is making {folder}; wait for it") from None
    try:
        yield
    finally:
        os.close(lock)


def _python_version(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"found --python {python}, which does not run: {reason}") from None
    version = answer.stdout.strip()
    if not _VERSION.fullmatch(version):
        raise BadInput(f"found --python {python}, which is no Python interpreter")
    return version


def _make_virtual(folder: Path, python: str, report_progress: Callable[[str], None]) -> None:
    """Make a virtual environment, or resume one: pip, most of the work, is unpacked only if it is incomplete."""
    command = [python, "-I", "-m", "venv", str(folder)]
    if (folder / "pyvenv.cfg").exists():
        # It may have been made for another Python.
        _run([*command, "--without-pip"], report_progress, f"python -m venv {folder}")
        answer = subprocess.run([_interpreter(folder), "-I", "-c", _PIP_IS_COMPLETE], capture_output=True, check=False)
        if answer.returncode == 0:
            return
    _run(command, report_progress, f"python -m venv {folder}")


def _install(wanted: Definition, folder: Path, torch: str, report_progress: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        constraints = Path(temporary) / "constraints.txt"
        constraints.write_text("\n".join([torch, *wanted.lines(torch)]) + "\n", encoding="utf-8")
        command = [
            str(_interpreter(folder)), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check",
            "--progress-bar", "off", "--constraint", str(constraints), torch, *wanted.requirements,
        ]  # fmt: skip
        _run(command, report_progress, f"pip install for {folder}")


def _run(command: Sequence[str], report_progress: Callable[[str], None], shown: str) -> None:
    """Run a program, passing on its lines of output.

    Raises:
        EnvironmentFailed: it does not start or fails; the message has its last lines.
    """
    # With PYTHONPATH, packages from elsewhere would count as installed in the environment.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PYTHONNOUSERSITE"] = "1"
    last: deque[str] = deque(maxlen=_NUM_LINES_SHOWN)
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        ) as program:
            assert program.stdout is not None
            for line in program.stdout:
                last.append(masked(line.rstrip()))
                report_progress(last[-1])
    except OSError as error:
        raise EnvironmentFailed(f"{shown}: cannot start {command[0]}: {error.strerror}") from None
    if program.returncode:
        output = "\n".join(f"  {line}" for line in last)
        remedy = "Make room there, or give another --folder. " if any(_DISK_FULL in line for line in last) else ""
        raise EnvironmentFailed(
            f"{shown} ended with {program.returncode}; its last lines:\n{output}\n{remedy}The next `rlhf env create` "
            "continues with what is there"
        )


def _check_versions(wanted: Definition, folder: Path, torch: str) -> None:
    """Compare what is installed with what is pinned.

    Raises:
        EnvironmentFailed: something is missing or has another version.
    """
    pins = dict(pin for text in (torch, *wanted.requirements) if (pin := _pinned(text)))
    command = [str(_interpreter(folder)), "-I", "-c", _VERSIONS, *pins]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    try:
        versions: dict[str, str] = json.loads(answer.stdout)
    except ValueError:
        raise EnvironmentFailed(f"{folder}: its Python does not run: {answer.stderr.strip()[-500:]}") from None
    wrong = [
        f"{name} {versions[name] or 'missing'}, expected {pin}"
        for name, pin in pins.items()
        if not versions[name] or (pin and versions[name].partition("+")[0] != pin.partition("+")[0])
    ]
    if wrong:
        raise EnvironmentFailed(f"{folder}: found {'; '.join(wrong)}; remove the folder and create it again")


def _pinned(requirement: str) -> tuple[str, str] | None:
    """Name and version of a requirement; the version is empty unless pinned with ``==``. None for a URL or path."""
    found = re.match(r"^([A-Za-z0-9][\w.-]*)(?:\[[\w,.\s-]*\])?\s*(?:==\s*([\w.+!-]+))?", requirement)
    if not found or "/" in requirement or "@" in requirement:
        return None
    return found[1], found[2] or ""
