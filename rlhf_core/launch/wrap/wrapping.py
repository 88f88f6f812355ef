"""`rlhf wrap`: convert a launch line, or a script that contains one, to a config."""

import json
import posixpath
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import PurePosixPath

from rlhf_core.config.loading import validate
from rlhf_core.config.problems import expected_name, is_name
from rlhf_core.config.toml_files import MAX_CONFIG_BYTES
from rlhf_core.errors import BadInput
from rlhf_core.launch.wrap.arguments import read_arguments
from rlhf_core.launch.wrap.config_text import config_text, shown_line
from rlhf_core.launch.wrap.draft import Draft, ReadPart, UnreadPart, WrapSurroundings
from rlhf_core.launch.wrap.frameworks import Family, FrameworkName, recognise
from rlhf_core.launch.wrap.launchers import axolotl_launcher_words, read_launcher
from rlhf_core.launch.wrap.scripts import DROPPED, ScriptFacts, ScriptPlace, read_script, take_script_within
from rlhf_core.launch.wrap.slurm_options import read_options, read_slurm, spelled
from rlhf_core.schemas.slurm_values import VARIABLE
from rlhf_core.shell.known_programs import BOUND_CONTAINERS, CONTAINERS, SUBMITTER
from rlhf_core.shell.launch_line import LaunchLine, Wrapper, read_launch_line
from rlhf_core.text.redaction import is_secret_name

MAX_LINE = 100_000
"""Longest launch line in characters: a config is limited to 128 KiB."""
_MAX_SHOWN = 20
_OF_STEP = ("nodes", "ntasks", "ntasks_per_node", "nodelist")


@dataclass(frozen=True)
class WrapOptions:
    """Settings that the user gives in addition to the launch line."""

    name: str = ""
    framework: FrameworkName | None = None
    steps: int | None = None


@dataclass(frozen=True)
class WrappedLine:
    """Config generated from a launch line, with a report."""

    text: str
    """The config, as TOML. Without optimizer steps it does not load until they are filled in."""
    num_steps: int | None
    read: tuple[ReadPart, ...]
    unread: tuple[UnreadPart, ...]
    argv: tuple[str, ...]
    """The launch line with placeholders."""


def wrap_line(
    argv: Sequence[str], around: WrapSurroundings, options: WrapOptions, known: Mapping[str, str] | None = None
) -> WrappedLine:
    """Convert a launch line to a config. If it runs a script that can be read, this is the script's training command.

    Args:
        known: Variables of the user that have the same value on the nodes.

    Raises:
        BadInput: it contains no program, or something that a config cannot hold.
    """
    line = read_launch_line(argv)
    facts = ScriptFacts(line=line, variables=dict(line.variables), folder=around.folder)
    place = ScriptPlace(around.folder, {**(known or {}), **line.variables}, around.read_file)
    take_script_within(facts, line, place)
    return _wrapped(facts, around, options, shown_line(argv))


def wrap_script(
    text: str,
    source: str,
    around: WrapSurroundings,
    options: WrapOptions,
    known: Mapping[str, str],
    arguments: Sequence[str],
) -> WrappedLine:
    """Convert a shell script to a config, without running it.

    Raises:
        BadInput: no line of it trains, or it contains something that a config cannot hold.
    """
    facts = read_script(text, ScriptPlace(around.folder, known, around.read_file, tuple(arguments)))
    if facts.line is None:
        notes = "".join(f"\n  {part.what}" for part in facts.unread[:_MAX_SHOWN])
        raise BadInput(
            f"found no line in {source} that starts training; pass that line itself: rlhf wrap -- torchrun ...{notes}"
        )
    return _wrapped(facts, around, options, source)


def _wrapped(facts: ScriptFacts, around: WrapSurroundings, options: WrapOptions, source: str) -> WrappedLine:
    line = facts.line
    around = around.within(facts.folder)
    facts.variables = {name: value for name, value in facts.variables.items() if not _is_part(value, line)}
    if line is None or not any(line.program):
        raise BadInput(
            "found no program in the launch line; expected one such as: torchrun --nproc_per_node 8 train.py --lr 1e-6"
        )
    if sum(map(len, line.argv)) > MAX_LINE:
        raise BadInput(f"found a launch line of {sum(map(len, line.argv))} characters, expected at most {MAX_LINE}")
    draft = Draft(line, around, variables=dict(facts.variables), unread=list(facts.unread))
    _read_job(draft, facts)
    _missing_files(draft, facts)
    _take_wrappers(draft)
    read_launcher(draft)
    family = recognise(draft, options.framework)
    read_arguments(draft, family, options.steps)
    _select_cpu(draft, family)
    if line.launcher == "axolotl":
        draft.last_words += axolotl_launcher_words()
    _read_places(draft, facts)
    _name(draft, family, options.name)
    _unusable_variables(draft)
    draft.without_secrets()
    _left_unread(draft, facts)
    text = config_text(draft, source)
    steps = draft.settings.get("trainer.num_steps")
    num_steps = steps if isinstance(steps, int) else None
    _require_valid(text, num_steps is not None)
    return WrappedLine(text, num_steps, tuple(draft.read), tuple(draft.unread), tuple(draft.argv))


def _is_part(value: str, line: LaunchLine | None) -> bool:
    """True for a variable that only holds a part of the launch line: CMD, LAUNCHER and the like."""
    words = [*dropwhile(lambda word: re.match(r"[A-Za-z_]\w*=", word), value.split())]
    whole = f" {' '.join(' '.join(line.argv if line else ()).split())} "
    return len(words) > 1 and f" {' '.join(words)} " in whole


def _read_job(draft: Draft, facts: ScriptFacts) -> None:
    if facts.sbatch:
        read_slurm(draft, read_options(facts.sbatch), "#SBATCH")
    outer = [wrapper for line in facts.outer for wrapper in line.wrappers]
    for wrapper in (*outer, *draft.line.wrappers):
        if wrapper.name in ("srun", "sbatch"):
            found = read_options(spelled(wrapper.options))
            if wrapper.name == "srun" and draft.line.is_of_ray:  # a step for the driver, not for the nodes of Ray
                found = {name: value for name, value in found.items() if name not in _OF_STEP}
            read_slurm(draft, found, wrapper.name)
        elif wrapper.name == "ray":
            _read_ray(draft, wrapper)
        elif wrapper.name in ("docker", "podman"):
            draft.missing(
                f"{wrapper.name} run: removed, the program starts without the image {wrapper.image}",
                "install what it needs, or set slurm.container_kind and container_image; paths are those of the nodes",
            )


def _missing_files(draft: Draft, facts: ScriptFacts) -> None:
    """Report config files that do not exist or cannot be read: their settings are unknown, and the program may end at
    its start."""
    for name in draft.line.config_files:
        if set("{$") & set(name):
            continue
        if not draft.around.exists(name):
            draft.missing(
                f"{name}: there is no such file" + ("" if name.startswith("/") else f" in {facts.folder}"),
                "correct the path in trainer.argv, or create the file and wrap the line again, which reads it",
            )
        elif draft.settings_of(name) is None:
            draft.missing(
                f"{name}: not read, expected names with values in JSON or YAML",
                "if it sets the steps, the output folder or checkpoints, give them in the line as well",
            )


def _read_ray(draft: Draft, wrapper: Wrapper) -> None:
    draft.missing(
        f"ray job submit to {wrapper.options.get('address') or 'Ray'}: removed, each start has a Ray of its own",
        "nothing, unless the program needs a Ray that it shares with others",
    )
    text = wrapper.options.get("runtime_env_json", "{}")
    try:
        environment = json.loads(text)
    except ValueError:
        draft.missing("--runtime-env-json of ray", "put its variables into trainer.variables")
        return
    given = environment.pop("env_vars", {}) if isinstance(environment, dict) else {}
    if isinstance(given, dict) and given:
        draft.variables |= {str(name): str(value) for name, value in given.items()}
        draft.report("variables of ray", ", ".join(map(str, given)), "trainer.variables")
    if environment:
        draft.missing("--runtime-env-json of ray", "the run does without it, except for env_vars")


def _take_wrappers(draft: Draft) -> None:
    for index, item in enumerate(draft.line.items):
        if item.role == "wrapper" and item.name == SUBMITTER:
            draft.missing(
                f"{' '.join(draft.words[index])[:100]}: removed, the run starts what follows on its nodes",
                "set resources.num_nodes and gpus_per_node, and the variables that it would set",
            )
        if item.role == "variable" or (item.role == "wrapper" and item.name in DROPPED):
            draft.words[index] = ()
        elif item.role == "wrapper":
            draft.report(item.name, " ".join(draft.words[index]), "stays before the launch line")
            _folders_in_image(draft, item.name)


def _folders_in_image(draft: Draft, container: str) -> None:
    """Report what a program in a container sees of the run."""
    if container in BOUND_CONTAINERS:
        draft.report(f"folders in the image of {container}", "not in the line", "bound by the run, with its scripts")
        draft.missing(
            f"{container}: other folders that the image lacks",
            "bind those of the model, the data and the code (--bind), unless they are in your home folder",
        )
    elif container in CONTAINERS:
        draft.missing(
            f"{container}: the image lacks the folders of the run, and perhaps those of model, data and code",
            "mount them under the same paths, among them {run_dir} and {drivers}; or set slurm.container_kind",
        )


def _read_places(draft: Draft, facts: ScriptFacts) -> None:
    draft.set("trainer.working_dir", facts.folder, "working directory")
    if facts.setup:
        draft.set("trainer.setup", list(facts.setup), "lines before it", "; ".join(facts.setup))
    environment = facts.environment
    first = next((index for index, words in enumerate(draft.words) if words), None)
    if first is not None and "/bin/" in draft.words[first][0]:
        path = posixpath.join(facts.folder, draft.words[first][0])
        folder, _, program = path.rpartition("/bin/")
        if draft.around.read_file(f"{folder}/pyvenv.cfg") is not None:
            environment = posixpath.normpath(folder)
            draft.words[first] = (program, *draft.words[first][1:])
    # A job does not run in the user's shell, and its PATH may have another program of that name.
    if not environment and first is not None and draft.around.has_program(draft.words[first][0]):
        environment = draft.around.environment
    if environment:
        draft.set("trainer.environment", environment, "Python environment")


def _select_cpu(draft: Draft, family: Family) -> None:
    """Make accelerate use the CPU if a run has no GPUs: otherwise every rank would silently train on its own."""
    has_gpus = draft.settings.get("resources.gpus_per_node") != 0
    if not family.has_trainer or has_gpus or "ACCELERATE_USE_CPU" in draft.variables:
        return
    draft.variables["ACCELERATE_USE_CPU"] = "{use_cpu}"
    draft.report("use of the CPU", "GPUs unknown", "ACCELERATE_USE_CPU in trainer.variables, false with GPUs")


def _name(draft: Draft, family: Family, given: str) -> None:
    if given:
        if not is_name(given):
            raise BadInput(f"found --name {given!r}, {expected_name(given)}")
        draft.set("name", given, "name of the run")
        return
    run_name = draft.given(
        "argument", "run_name", "exp_name", "experiment_name", "wandb_run_name", "trainer.experiment_name"
    )
    of_job = draft.settings.get("name")
    program = draft.line.program
    called = " ".join(program) if len(program) > 1 else PurePosixPath(program[0]).stem
    model = draft.given("argument", "model", "model_name_or_path", "pretrain") or ""
    candidates = [
        run_name or "",
        str(of_job or ""),
        f"{called} {family.algorithm} {PurePosixPath(model).name}",
        "wrapped",
    ]
    for text in candidates:
        words = dict.fromkeys(re.split(r"[^a-z0-9]+", text.lower()))
        name = "-".join(filter(None, words))[:63].strip("-")
        if is_name(name):
            draft.set("name", name, "name of the run")
            return


def _unusable_variables(draft: Draft) -> None:
    for name, value in list(draft.variables.items()):
        if not VARIABLE.fullmatch(name) or not value.replace("\n", " ").replace("\t", " ").isprintable():
            del draft.variables[name]
            draft.missing(f"variable {name!r}: its value cannot be stored in a config", "set it in trainer.setup")


def _left_unread(draft: Draft, facts: ScriptFacts) -> None:
    """Report shell expansions that are still in the config."""
    sources: dict[str, str] = {}
    for source in facts.command.unread if facts.command else ():
        sources.setdefault(source.partition(" (")[0], source)
    lines = [(at, 1, line) for at, line in enumerate(facts.setup)]
    for name, value in list(draft.variables.items()):
        if any(expansion in value for expansion in sources):
            del draft.variables[name]
            extended = value.replace(f"${{{name}}}", f"${name}")
            rest = extended.replace(f"${name}", "")
            if rest and rest != extended and not set('$`"\\{}') & set(rest):  # PATH=/x/bin:$PATH
                # Before the lines that it preceded, which may need it: `conda activate` a PATH with conda.
                places = (at for at, exported in enumerate(facts.exported) if exported.get(name) == value)
                lines.append((next(places, len(facts.setup)), 0, f'export {name}="{extended}"'))
                draft.report(f"variable {name}", value[:60], "trainer.setup")
                continue
            draft.missing(
                f"variable {name} = {value[:60]}", "if the program needs it, set it in trainer.setup: export NAME=value"
            )
    settings = [str(value) for value in draft.settings.values()]
    whole = "\0".join([*draft.argv, *settings])
    left = [expansion for expansion in sources if expansion in whole]
    if lines:
        draft.settings["trainer.setup"] = [line for *_, line in sorted(lines)]
    for expansion in left[:_MAX_SHOWN]:
        if is_secret_name(expansion.strip("${}")):
            advice = "remove the option, and name the variable that the program reads in slurm.pass_environment"
        else:
            advice = "write its value into the config; no shell expands it"
        draft.missing(f"{sources[expansion]}: known only to the shell", advice)
    if len(left) > _MAX_SHOWN:
        draft.missing(f"{len(left) - _MAX_SHOWN} more of them", "look for $ in the config")


def _require_valid(text: str, has_steps: bool) -> None:
    """Reject a config with content that cannot be stored, such as certain characters.

    Raises:
        BadConfig: it is invalid; the message lists the problems.
        BadInput: it is too long.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_CONFIG_BYTES:
        raise BadInput(f"found a launch line that needs a config of more than {MAX_CONFIG_BYTES} bytes")
    whole = text if has_steps else text.replace("# num_steps = ", "num_steps = 1", 1)
    validate(tomllib.loads(whole), "the config of this launch line")
