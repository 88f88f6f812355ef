"""Inspection of an external trainer's environment: its folder, its interpreter, the files of its launch line.

Nothing of it is imported: its interpreter runs once and lists the installed packages.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.errors import BadConfig
from rlhf_core.files.reading import read_document
from rlhf_core.files.settings_files import settings_in, text_of
from rlhf_core.machine.environments import environment_folder
from rlhf_core.machine.interpreters import LISTING_CODE, find_program, interpreter_of
from rlhf_core.preflight.facts import TrainerSide
from rlhf_core.preflight.program_queries import Tick, query_program
from rlhf_core.presets import drivers_folder
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.command_trainer import CommandTrainer, fill
from rlhf_core.schemas.launch_values import after_setup, filled_argv, values_of_spec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.shell.known_programs import CONDAS
from rlhf_core.shell.launch_line import LaunchLine, normalized, read_launch_line
from rlhf_core.shell.script import read_shell
from rlhf_core.shell.training_script import never_resumes

_SCRIPTS = (".py", ".sh")
_CALLBACK = "rlhf_core.callback"
_OF_SHELL = frozenset((
    "module", "ml", "source", ".", *CONDAS, "eval", "ulimit", "umask", "shopt", "cd", "echo",
))  # fmt: skip
"""Commands that change nothing but the shell they run in."""
_PRINT_VARIABLES = "import json, os; print(json.dumps(dict(os.environ)))"


def inspect_trainer(spec: RunSpec, home: Path, code: Path, slurm: SlurmSpec, tick: Tick = lambda: None) -> TrainerSide:
    """Inspect the environment of a run's trainer.

    Args:
        home: folder of the site, which holds the environments.
        code: folder with the copy of the user's code.
        slurm: settings of run and site.

    Raises:
        ValueError: the trainer is native.
    """
    trainer = spec.command_trainer
    if slurm.container_image:
        return TrainerSide(unseen=f"it is in the container {slurm.container_image}")
    values = {**values_of_spec(spec), "code": str(code), "drivers": str(drivers_folder())}
    line = read_launch_line(filled_argv(spec, values))
    working_dir = _working_dir(trainer, values)
    texts = {name: _script_text(name, working_dir) for name in _scripts(line)}
    side = replace(
        _configs(line, working_dir),
        missing_files=tuple(_missing(line, working_dir)),
        has_callback=any(_CALLBACK in text for text in texts.values()),
        never_resumes=next((name for name, text in texts.items() if never_resumes(text)), ""),
    )
    try:
        folder = str(environment_folder(trainer.environment, home)) if trainer.environment else ""
    except BadConfig as error:
        return replace(side, problem=str(error))
    return _with_program(replace(side, folder=folder), trainer, line, [*slurm.setup, *trainer.setup], values, tick)


def _with_program(
    side: TrainerSide,
    trainer: CommandTrainer,
    line: LaunchLine,
    setup: Sequence[str],
    values: Mapping[str, str],
    tick: Tick,
) -> TrainerSide:
    working_dir = _working_dir(trainer, values)
    variables = {name: fill(value, values) for name, value in trainer.variables.items()}
    search = variables.get("PATH") or os.environ.get("PATH") or os.defpath
    variables["PATH"] = f"{side.folder}/bin{os.pathsep}{search}" if side.folder else search
    if setup:
        found: Mapping[str, Any] | str = ""
        if _only_prepare(setup):
            # This interpreter prints the variables, with -I because the lines may set PYTHONHOME.
            printing = [sys.executable, "-ISc", _PRINT_VARIABLES]
            command = after_setup(setup, values, side.folder, printing)
            found = query_program(command, tick, variables=variables, folder=working_dir)
        if not isinstance(found, str):
            variables |= found
        elif side.folder:
            side = replace(side, setup_problem=found)
        else:
            determine = f"the setup lines before it determine what is found: {setup[0]}"
            return replace(side, setup_problem=found, unseen=determine)
    first = line.command
    if "{" in first:
        return replace(side, unseen=f"{first} is filled in only when the run starts")
    if "/" in first and working_dir is not None:
        first = str(working_dir / first)
    program = find_program(first, side.folder, variables["PATH"]) if first else None
    python = Path(side.folder, "bin", "python") if side.folder else interpreter_of(program) if program else None
    side = replace(side, program=str(program or ""), python=str(python or ""))
    if python is None:
        return side
    # The ranks also have the user's code on their path; `-m` looks in the folder that it is started in as well.
    folders = [values["code"], *([str(working_dir)] if line.is_module and working_dir else [])]
    code = f"import sys\nsys.path[:] = {folders!r} + [path for path in sys.path if path]\n{LISTING_CODE}"
    modules = [line.program[0]] if line.is_module and line.program else []
    answer = query_program([str(python), "-c", code, *modules], tick, variables=variables, folder=working_dir)
    if isinstance(answer, str):
        return replace(side, python_problem=answer)
    missing = tuple(name for name, found in answer["modules"].items() if not found)
    version = tuple(answer["version"])
    return replace(side, version=version, packages=answer["packages"], missing_modules=missing)


def _only_prepare(setup: Sequence[str]) -> bool:
    """True for shell lines that only prepare their own shell, so that a check may run them as well."""
    script = read_shell("\n".join(setup))
    return not script.unread and all({*command.argv[:1]} & _OF_SHELL for command in script.commands)


def _working_dir(trainer: CommandTrainer, values: Mapping[str, str]) -> Path | None:
    """Folder that the program starts in; None for one that the run creates."""
    filled = fill(trainer.working_dir, values)
    return Path(filled).expanduser() if filled and "{" not in filled else None


def _missing(line: LaunchLine, folder: Path | None) -> Iterator[str]:
    """Scripts and config files of a line that do not exist."""
    for name in dict.fromkeys([*_scripts(line), *line.config_files]):
        if "{" in name:
            continue  # in a folder that the run creates, or JSON
        path = Path(name) if folder is None else folder / name
        # A working folder that the run creates is empty.
        if not path.is_absolute() or not path.exists():
            yield name


def _scripts(line: LaunchLine) -> list[str]:
    """The script of a line; empty for a module or a program."""
    return [line.program[0]] if line.program and not line.is_module and line.program[0].endswith(_SCRIPTS) else []


def _script_text(script: str, folder: Path | None) -> str:
    """Text of a script; empty if it cannot be read, which ``missing_files`` reports."""
    try:
        content = read_document(Path(script) if folder is None else folder / script, follow_link=True)
    except OSError:
        return ""
    return content.decode("utf-8", errors="replace")


# ---------------------------------------------------------------------------------------------------------------------
# Config files


def _configs(line: LaunchLine, folder: Path | None) -> TrainerSide:
    settings: dict[str, str] = {}
    launcher: dict[str, str] = {}
    deepspeed: Mapping[str, Any] = {}
    unread = []
    for name in line.config_files:
        content = _read(Path(name) if folder is None else folder / name)
        if content is None:
            unread.append(name)
        elif name in line.deepspeed_configs:
            deepspeed = content
        else:
            target = launcher if name in line.launcher_options.values() else settings
            nested = content.get("deepspeed_config")
            if target is launcher and isinstance(nested, dict):  # accelerate takes its keys for options as well
                content = {**content, **nested}
                if named := nested.get("deepspeed_config_file"):
                    deepspeed = _read(Path(str(named)) if folder is None else folder / str(named)) or deepspeed
            target.update({normalized(key): text_of(value) for key, value in content.items() if value is not None})
    return TrainerSide(settings=settings, launcher_settings=launcher, deepspeed=deepspeed, unread=tuple(unread))


def _read(path: Path) -> Mapping[str, Any] | None:
    """Settings in a config file; None if it cannot be read."""
    try:
        return settings_in(read_document(path, follow_link=True), path.name)
    except OSError:
        return None
