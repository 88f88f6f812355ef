"""Facts about an external trainer on this node: package versions of its environment, and files on its launch line.

None of it is imported; its interpreter is started once, in the shell in which the program would be started.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.diagnosis.nodes import checks as node_checks
from rlhf_core.diagnosis.nodes.checks import blocked
from rlhf_core.errors import BadConfig
from rlhf_core.machine.environments import environment_folder
from rlhf_core.machine.interpreters import LISTING_CODE, interpreter_of
from rlhf_core.presets import drivers_folder
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checks import CheckResult
from rlhf_core.schemas.command_trainer import CommandTrainer, fill
from rlhf_core.schemas.launch_values import filled_argv, values_of_spec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.shell.launch_line import LaunchItem, LaunchLine, read_launch_line

ANSWER_S = 20.0
"""Time that its interpreter has to list the installed packages, in seconds."""

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
    values = {"run_dir": str(run_dir.root), "code": str(run_dir.code / "snapshot"), "run_id": run_dir.run_id}
    values["drivers"] = str(drivers_folder())
    line = read_launch_line(filled_argv(spec, values))
    working_dir = fill(trainer.working_dir, {**values_of_spec(spec), **values})
    files = dict(_files(line, run_dir.root, Path(working_dir) if working_dir else None))
    try:
        home = Path(environment.get("RLHF_HOME") or "~/.rlhf").expanduser()
        folder = environment_folder(trainer.environment, home) if trainer.environment else None
    except BadConfig as error:
        return TrainerFacts(files=files, complaints=(_finding(str(error)),))
    program = line.command
    try:
        started_in = Path(working_dir) if working_dir else run_dir.root
        versions = _versions(trainer, program, folder, environment, started_in)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return TrainerFacts(files=files, complaints=(_finding(f"{program}: {error}"),))
    return TrainerFacts(versions, files)


def _finding(found: str) -> CheckResult:
    advice = "put the environment where every node can read it, or correct trainer.environment and trainer.setup"
    return blocked(node_checks.TRAINER, found, "the program of trainer.argv, ready to start", advice)


def _versions(
    trainer: CommandTrainer, program: str, folder: Path | None, environment: Mapping[str, str], started_in: Path
) -> dict[str, str]:
    """Versions of packages in the interpreter that would run a program; empty if it is not a Python program.

    Args:
        started_in: Folder that it starts in; the run may have to create it.

    Raises:
        ValueError: the program is not found, or its interpreter does not answer.
        OSError: it cannot be started.
        subprocess.SubprocessError: it takes too long.
    """
    search = trainer.variables.get("PATH") or environment.get("PATH", os.defpath)
    given = {**environment, "PATH": f"{folder}/bin:{search}" if folder else search}
    shell = _shell(trainer.setup)
    where = _answer([*shell, 'command -v "$1"'], program, given, started_in).strip()
    if not where:
        raise ValueError("not found on the PATH of the job")
    python = folder / "bin" / "python" if folder else interpreter_of(started_in / where)
    if python is None:
        return {}
    output = _answer([*shell, 'exec "$1" -c "$2"'], str(python), given, started_in, LISTING_CODE).splitlines()
    found = json.loads(output[-1]) if output else None
    if not isinstance(found, dict):
        raise ValueError(f"{python} did not list its packages")
    return {"python": ".".join(map(str, found["version"])), **found["packages"]}


def _shell(setup: Sequence[str]) -> list[str]:
    """Shell setup lines to run before the program; their output is discarded."""
    return ["{", *setup, ":", "} >/dev/null"]


def _answer(lines: Sequence[str], first: str, environment: Mapping[str, str], started_in: Path, *more: str) -> str:
    result = subprocess.run(
        ["bash", "-c", "\n".join(lines), "rlhf-flows", first, *more],
        cwd=started_in if started_in.is_dir() else None,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=ANSWER_S,
        check=False,
    )
    return result.stdout.decode(errors="replace")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _files(line: LaunchLine, run_dir: Path, working_dir: Path | None) -> Iterator[tuple[str, Path]]:
    """Files and folders named on a launch line, except for the program's own output."""
    for item in line.items:
        if item.role in ("variable", "wrapper") or _WRITTEN.search(item.name):
            continue
        for text in _texts(line, item):
            path = Path(text).expanduser()
            if not path.is_absolute():
                # Model names on a hub look like relative paths, so only existing paths count.
                if working_dir is None or not (working_dir / path).exists():
                    continue
                path = working_dir / path
            if run_dir not in (path, *path.parents):
                yield f"trainer.argv {text}", path


def _texts(line: LaunchLine, item: LaunchItem) -> Iterator[str]:
    for word in line.argv[item.start : item.stop]:
        text = word.partition("=")[2] if item.is_joined else word
        if "/" in text and "{" not in text and not text.startswith("-") and len(text) < 4_096:
            yield text
