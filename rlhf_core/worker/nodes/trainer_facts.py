"""Facts about an external trainer on this node: package versions of its environment, and files on its launch line.

None of it is imported; its interpreter is started once, in the shell in which the program would be started.
"""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.diagnosis.nodes.checks import NodeCheck, blocked
from rlhf_core.errors import BadConfig
from rlhf_core.machine.environments import environment_folder
from rlhf_core.machine.interpreters import LISTING_CODE, interpreter_of
from rlhf_core.presets import drivers_folder
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checks import CheckResult
from rlhf_core.schemas.command_trainer import CommandTrainer, fill
from rlhf_core.schemas.launch_values import after_setup, filled_argv, values_of_spec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.shell.launch_line import LaunchItem, LaunchLine, read_launch_line

ANSWER_S = 120.0
"""Time that its interpreter has to list the installed packages, after the lines of ``trainer.setup``, in seconds. On a
cold file system, conda, environment modules and the start of Python take long, at once on all nodes."""

_WRITTEN = re.compile(r"out|log|cache|save|ckpt|checkpoint|tmp|temp|dump|report", re.IGNORECASE)
"""Names of options whose files the program writes; these differ between nodes."""


@dataclass(frozen=True)
class TrainerFacts:
    """Facts about the program, for comparison between nodes."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions by package name, including ``python``."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files and folders that its launch line reads, by the word that names them."""
    complaints: tuple[CheckResult, ...] = ()
    """Reasons why it cannot start on this node."""


def gather(run_dir: RunDir, spec: RunSpec, environment: Mapping[str, str] = os.environ) -> TrainerFacts:
    """Gather facts about a run's program on this node.

    Args:
        environment: Environment of the job.

    Raises:
        ValueError: the run's trainer is native, not an external program.
    """
    trainer = spec.command_trainer
    values = {**values_of_spec(spec), "run_dir": str(run_dir.root), "run_id": run_dir.run_id}
    values |= {"code": str(run_dir.code / "snapshot"), "drivers": str(drivers_folder())}
    line = read_launch_line(filled_argv(spec, values))
    working_dir = fill(trainer.working_dir, values)
    files = dict(_files(line, run_dir.root, Path(working_dir) if working_dir else None))
    try:
        home = Path(environment.get("RLHF_HOME") or "~/.rlhf").expanduser()
        folder = environment_folder(trainer.environment, home) if trainer.environment else None
    except BadConfig as error:
        return TrainerFacts(files=files, complaints=(_finding(str(error)),))
    program = line.command
    try:
        started_in = Path(working_dir) if working_dir else run_dir.root
        versions = _versions(trainer, program, folder, values, environment, started_in)
    except subprocess.TimeoutExpired:
        late = f"{program}: no answer within {ANSWER_S:g} s, in which trainer.setup and its Python have to run"
        return TrainerFacts(files=files, complaints=(_finding(late),))
    except (OSError, ValueError) as error:
        return TrainerFacts(files=files, complaints=(_finding(f"{program}: {error}"),))
    return TrainerFacts(versions, files)


def _finding(found: str) -> CheckResult:
    advice = "put the environment where every node can read it, or correct trainer.environment and trainer.setup"
    return blocked(NodeCheck.TRAINER, found, "the program of trainer.argv, ready to start", advice)


def _versions(
    trainer: CommandTrainer,
    program: str,
    folder: Path | None,
    values: Mapping[str, str],
    environment: Mapping[str, str],
    started_in: Path,
) -> dict[str, str]:
    """Versions of packages in the interpreter that would run a program; empty if it is not a Python program.

    Args:
        values: Values of placeholders.
        started_in: Folder that it starts in; the run may have to create it.

    Raises:
        ValueError: the program is not found, a shell line before it fails, or its interpreter does not answer.
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it takes too long.
    """
    given = {**environment, **{name: fill(value, values) for name, value in trainer.variables.items()}}
    if folder:
        given["PATH"] = f"{folder}/bin:{given.get('PATH', os.defpath)}"

    def answer(*command: str) -> tuple[str, str]:
        line = after_setup(trainer.setup, values, str(folder or ""), command)
        return _last_lines(line, given, started_in)

    where, complaint = answer("bash", "-c", 'command -v "$1"', "rlhf-flows", program)
    if not where:
        raise ValueError(complaint or "not found on the PATH of the job")
    python = folder / "bin" / "python" if folder else interpreter_of(started_in / where)
    if python is None:
        return {}
    listed, _ = answer(str(python), "-c", LISTING_CODE)
    found = json.loads(listed) if listed else None
    if not isinstance(found, dict):
        raise ValueError(f"{python} did not list its packages")
    return {"python": ".".join(map(str, found["version"])), **found["packages"]}


def _last_lines(command: Sequence[str], environment: Mapping[str, str], started_in: Path) -> tuple[str, str]:
    """Last lines that a command prints to its two outputs, or nothing for the first one if it fails."""
    result = subprocess.run(
        command,
        cwd=started_in if started_in.is_dir() else None,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=ANSWER_S,
        check=False,
    )
    printed, complaint = (
        (output.decode(errors="replace").strip().splitlines() or [""])[-1] for output in (result.stdout, result.stderr)
    )
    return ("" if result.returncode else printed), complaint


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _files(line: LaunchLine, run_dir: Path, working_dir: Path | None) -> Iterator[tuple[str, Path]]:
    """Files and folders named on a launch line, except for the program's own output."""
    for item in line.items:
        if item.role in ("variable", "wrapper") or _WRITTEN.search(item.name):
            continue
        for text in _texts(line, item):
            path = Path(text).expanduser() if text.startswith("~/") else Path(text)
            if not path.is_absolute():
                # Model names on a hub, and sentences, look like relative paths, so only existing paths count.
                if working_dir is None or not _exists(working_dir / path):
                    continue
                path = working_dir / path
            if run_dir not in (path, *path.parents):
                yield f"trainer.argv {text}", path


def _exists(path: Path) -> bool:
    """True if a path exists; False also if it is too long for one, or may not be looked up."""
    with contextlib.suppress(OSError):
        return path.exists()
    return False


def _texts(line: LaunchLine, item: LaunchItem) -> Iterator[str]:
    for word in line.argv[item.start : item.stop]:
        text = word.partition("=")[2] if item.is_joined else word
        if "/" in text and "{" not in text and not text.startswith("-") and len(text) < 4_096:
            yield text
