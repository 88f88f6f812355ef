"""Shell scripts: the command that trains, and the effect of the other commands on a run."""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from rlhf_core.launch.wrap.draft import UnreadPart, number
from rlhf_core.launch.wrap.slurm_counts import derived_nodes, gpu_requests, gpus_per_node, tasks_per_node
from rlhf_core.launch.wrap.slurm_options import options_in, read_options, spelled
from rlhf_core.shell.known_programs import CONDAS, CONTAINERS, SHELLS, SUBMITTER
from rlhf_core.shell.launch_line import LaunchLine, read_launch_line
from rlhf_core.shell.script import ShellScript, read_shell
from rlhf_core.shell.values import ShellCommand

_NOT_TRAINING = frozenset((
    "rollout", "deploy", "infer", "eval", "export", "app", "web-ui", "sample", "vllm-serve", "env", "chat", "api",
    "version", "merge-lora", "convert", "preprocess",
))  # fmt: skip
"""Subcommands of training suites that serve, measure or convert."""
_SILENT = frozenset((
    "echo", "set", "unset", "mkdir", "sleep", "ulimit", "trap", "[", "[[", "test", "true", "false", "date",
    "hostname", "nvidia-smi", "clear", "exit", "wait", "shift", "printf", "cat", "ls", "which", "rm", "touch", ":",
    "pwd", "shopt", "tee", "return", "break", "continue", "read", "kill", "cp", "chmod", "printenv", "env", "pkill",
    "popd", "command", "type", "seq", "mapfile", "readarray", "local", "alias", "head", "tail", "grep", "awk", "sed",
))  # fmt: skip
"""Commands without effect on the training."""
_HELPERS = frozenset(["ray", "tar", "unzip", "rsync", "mv", "ln", "find", "pip", "git"])
"""Commands that prepare the nodes, or run beside the training."""
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".sub", ".job")
"""Endings of shell scripts."""
_OF_A_SHELL = re.compile(r"#!.*\b(?:ba|da|z)?sh\b")
"""First line of a shell script."""
DROPPED = frozenset([
    "srun", "sbatch", "nohup", "exec", "setsid", "time", "nice", "ray", "env", "docker", "podman", SUBMITTER,
])  # fmt: skip
"""Wrappers that have no effect in a run. The others (uv, conda, apptainer) are kept."""
_MAX_NESTED = 6
"""Most scripts within each other."""
_MAX_READ = 200
"""Most scripts that are read, counting each time."""
_PREPARES = re.compile(
    r"(?i:(?:^|[\W_])(?:set_?up|install|prep(?:are|ro\w+)?|init|bootstrap|download|stage|copy|clean(?:_?up)?|prolog(?:ue)?"
    r"|epilog(?:ue)?|env)(?:$|[\W_]))"
)
"""Names of scripts that prepare or clean the nodes."""
_MAX_REPORTED = 40
_SETUP = frozenset(["module", "ml", "ulimit"])
_ACTIVATING = ("/bin/activate", "/etc/profile.d/conda.sh", "/etc/profile.d/mamba.sh")
"""Files that make an environment or conda ready when they are sourced, in the folder of either."""
_HOOK = re.compile(r"\$\(\s*(?:\S*/)?(?:conda|mamba|micromamba)\s[^()]*\bhook\b[^()]*\)$")
"""Commands that make conda ready in the shell that evaluates their output."""


@dataclass
class ScriptFacts:
    """Facts that a run needs from a script."""

    command: ShellCommand | None = None
    line: LaunchLine | None = None
    outer: tuple[LaunchLine, ...] = ()
    """The lines around it, outermost first: of ``bash -c``, or of another script."""
    rank: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    sbatch: Sequence[str] = ()
    """Words of its ``#SBATCH`` lines."""
    environment: str = ""
    conda: str = ""
    """Folder of the conda that the script makes ready."""
    folder: str = ""
    setup: list[str] = field(default_factory=list)
    exported: list[Mapping[str, str]] = field(default_factory=list)
    """Variables exported before each of these lines."""
    unread: list[UnreadPart] = field(default_factory=list)


@dataclass(frozen=True)
class ScriptPlace:
    """Place of a script: its surroundings when it starts."""

    folder: str
    """Folder that it is started in, absolute."""
    known: Mapping[str, str]
    """Variables that have the same value on the nodes."""
    read: Callable[[str], str | None]
    """Text of a file; None if there is none."""
    arguments: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    """Options of the job that it runs in, given outside of it."""
    name: str = ""
    """Name, if another script calls it."""
    line: int = 1
    """Number of the first line, if it is part of another script."""
    callers: tuple[str, ...] = ()
    """Files of the scripts around it."""
    nested: int = 0
    read_so_far: list[str] = field(default_factory=list)
    """Names of all scripts read so far within the first one."""


def read_script(text: str, place: ScriptPlace) -> ScriptFacts:
    """Find the training command in a script."""
    known = {**place.known, "PWD": place.folder}
    read_file, first = place.read, place.line
    sbatch = options_in(text)
    if sbatch or place.job:
        known |= _known_to_job(sbatch, place)
    script = read_shell(text, known, place.arguments, lambda path: _sourced(read_file, path), first)
    facts = ScriptFacts(sbatch=sbatch, folder=place.folder)
    for note in script.unread[:_MAX_REPORTED]:
        is_file = note.startswith("file ")
        advice = "the run does not write it: write it once beforehand" if is_file else ""
        facts.unread.append(UnreadPart(note, advice or "check whether it changes the launch line in trainer.argv"))
    folder, written = place.folder, script.files
    place = replace(place, known=known, read=lambda path: written.get(_below(folder, path)) or read_file(path))
    # Prefer a line that always runs to one in a branch, and that to one with only a variable.
    ranked = [(_rank(command, place) * 2 - command.is_conditional, command) for command in script.commands]
    ranked = [(rank, command) for rank, command in ranked if rank > 2 or not command.in_background]
    best = max([0, *(rank for rank, _ in ranked)])
    chosen = [command for rank, command in ranked if rank == best > 0]
    facts.rank = (best + 1) // 2
    absent = script.absent if best else script.absent + script.tested
    if absent and not place.nested:
        missing = f"{', '.join(absent)}: the script has no such argument"
        facts.unread.append(
            UnreadPart(missing, "if it needs some, wrap it with them: rlhf wrap -o FILE SCRIPT ARGUMENTS")
        )
    for command in script.commands:
        if chosen and command is chosen[-1]:
            break
        if not chosen or chosen[-1].subshells[: len(command.subshells)] == command.subshells:
            _prepare(facts, command)
    _report_others(facts, script, chosen, f" of {place.name}" if place.name else "")
    if chosen:
        _choose(facts, chosen[-1], place)
    return facts


def _below(folder: str, path: str) -> str:
    """A path relative to a folder, if it is in it."""
    return posixpath.normpath(path).removeprefix(f"{folder}/")


def _sourced(read_file: Callable[[str], str | None], path: str) -> str | None:
    """Text of a file that a script reads with ``source``, unless it activates an environment."""
    return read_file(path) if path.endswith(SCRIPTS) and not path.endswith(_ACTIVATING) else None


def _known_to_job(sbatch: Sequence[str], place: ScriptPlace) -> dict[str, str]:
    """Variables that Slurm sets in a job with these options."""
    options = read_options([*sbatch, *place.job])
    # A job of one task, unless something else is said, is on one node; a step has the nodes of its job.
    is_said = {"nodes", "ntasks", "gpus"} & options.keys() or "SLURM_NNODES" in place.known
    nodes = options.get("nodes") or str(derived_nodes(options) or ("" if is_said else 1))
    tasks = tasks_per_node(options, number(nodes) or 1)
    gpus = gpus_per_node(gpu_requests(options), number(nodes) or 1, tasks or 1)
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": options.get("ntasks", ""),
        "SLURM_NTASKS_PER_NODE": options.get("ntasks_per_node", ""),
        "SLURM_GPUS_PER_NODE": options.get("gpus_per_node", "").rpartition(":")[2],
        "SLURM_GPUS_ON_NODE": str(gpus[1]) if gpus else "",
        "SLURM_CPUS_PER_TASK": options.get("cpus_per_task", ""),
    }
    counts = {name: value for name, value in found.items() if number(value)}
    return counts | {"SLURM_SUBMIT_DIR": place.folder}


def script_within(line: LaunchLine, place: ScriptPlace) -> tuple[str, ScriptPlace] | None:
    """Script that a line runs, as a text or a file that can be read, with its place; None without one."""
    if place.nested >= _MAX_NESTED or len(place.read_so_far) >= _MAX_READ:
        return None
    job = [word for one in line.wrappers if one.name in ("sbatch", "srun") for word in spelled(one.options)]
    inner = replace(place, job=(*place.job, *job), nested=place.nested + 1, arguments=(), name="")
    text = line.shell_text or next((one.options["wrap"] for one in line.wrappers if "wrap" in one.options), "")
    if text:
        place.read_so_far.append("-c")
        return text, inner
    first = next((item for item in line.items if item.role == "program"), None)
    if first is None or not line.starts_itself:
        return None
    words = [*line.argv[first.start :]]
    if PurePosixPath(words[0]).name in SHELLS:
        del words[0]
        while words and words[0].startswith(("-", "+")):
            del words[: 2 if words[0] in ("-o", "+o", "-O", "+O") else 1]
    path = posixpath.normpath(posixpath.join(place.folder, words[0])) if words else ""
    found = place.read(path) if words and path not in place.callers else None
    if found is None or not (words[0].endswith(SCRIPTS) or _OF_A_SHELL.match(found)):
        return None
    known = {**place.known, "0": words[0]}
    name = PurePosixPath(words[0]).name
    place.read_so_far.append(path)
    callers = (*place.callers, path)
    return found, replace(inner, arguments=tuple(words[1:]), known=known, name=name, line=1, callers=callers)


def _values(command: ShellCommand) -> dict[str, str]:
    """Variables of a command that are known: a script that it runs would take other ones for texts."""
    parts = [source.partition(" (")[0] for source in command.unread]
    return {name: value for name, value in command.variables.items() if not any(part in value for part in parts)}


def _rank(command: ShellCommand, place: ScriptPlace) -> int:
    """Score for how likely a command is the training; 0 if it is not."""
    line = read_launch_line(command.argv)
    place = replace(place, known={**place.known, **_values(command)}, folder=command.folder or place.folder)
    within = script_within(line, place)
    if within:
        found = read_script(*within).rank
        return found or (1 if line.shell_text and command.unread else 0)
    if line.starts_itself:  # `srun` also runs what prepares and cleans the nodes
        if not line.wrappers or not line.program or line.program[0] in _SILENT | _HELPERS:
            return 0
        if line.launcher == "srun":
            return 1 if _prepares(line) or line.program[0].startswith("$") else 3
        return 0 if line.program[0].endswith(SCRIPTS) else 2
    if set(line.program[1:]) & _NOT_TRAINING or not line.program:
        return 0
    if line.launcher == "python":
        return 0 if line.program[0] in ("pip", "setup.py") or "c" in line.launcher_options else 2
    return 4


def _prepares(line: LaunchLine) -> bool:
    """True if a line starts a shell script whose name says that it prepares or cleans the nodes."""
    in_shell = PurePosixPath(line.program[0]).name in SHELLS
    script = (line.positional or ("",))[0] if in_shell else line.program[0]
    name = PurePosixPath(script).name
    return name.endswith(SCRIPTS) and "train" not in name and _PREPARES.search(name) is not None


def _prepare(facts: ScriptFacts, command: ShellCommand) -> None:
    """Apply a command that precedes the training."""
    before = facts.environment, len(facts.setup)
    _apply(facts, command)
    facts.exported += [command.variables] * (len(facts.setup) - len(facts.exported))
    if command.is_conditional and before != (facts.environment, len(facts.setup)):
        shown = f"line {command.line} is inside a branch: {' '.join(command.argv)[:100]}"
        facts.unread.append(UnreadPart(shown, "check trainer.environment and trainer.setup, which it is part of"))


def _apply(facts: ScriptFacts, command: ShellCommand) -> None:
    words = command.argv
    name = words[0] if words else ""
    if name in ("cd", "pushd") and len(words) > 1:
        if not command.is_known or command.is_conditional:
            facts.unread.append(UnreadPart(f"line {command.line}: {name} {words[1]}", "set trainer.working_dir"))
        else:
            facts.folder = posixpath.normpath(posixpath.join(facts.folder, words[1]))
    elif words[1:2] == ("activate",) and name in (*CONDAS, "source", "."):
        if facts.conda and command.is_known:
            facts.environment = _conda_environment(facts, words[2:])
            return
        if name == "conda" and not any("hook" in line for line in facts.setup):  # a job's shell is no login shell
            facts.setup.append('eval "$(conda shell.bash hook)"')
        facts.setup.append(" ".join(words))
        facts.unread.append(
            UnreadPart(
                f"line {command.line}: {' '.join(words)}",
                "if `rlhf check` finds that it fails, set trainer.environment to the folder of the environment",
            )
        )
    elif name in ("source", ".") and len(words) > 1:
        ending = next((ending for ending in _ACTIVATING if words[1].endswith(ending)), "")
        if ending and command.is_known:
            facts.conda = posixpath.normpath(posixpath.join(facts.folder, words[1].removesuffix(ending)))
            if ending == "/bin/activate":
                facts.environment = _conda_environment(facts, words[2:])
        else:
            facts.unread.append(
                UnreadPart(f"line {command.line}: source {words[1]}", "add what it does to trainer.setup or variables")
            )
    elif name == "ulimit":
        # Setup ends with the first error. The script goes on if the job must not raise the limit.
        facts.setup.append(f"{' '.join(words)} || true")
    elif name in _SETUP:
        facts.setup.append(" ".join(words))
    elif name == "eval" and _HOOK.match(" ".join(words[1:])):
        facts.setup.append(f'eval "{" ".join(words[1:])}"')


def _conda_environment(facts: ScriptFacts, words: Sequence[str]) -> str:
    """Folder that ``activate`` makes the environment: of conda's, that of a name or path; of Python's, its own."""
    name = next((word for word in words if not word.startswith("-")), "base")
    if "/" in name:
        return posixpath.normpath(posixpath.join(facts.folder, name))
    return facts.conda if name == "base" else posixpath.join(facts.conda, "envs", name)


def _report_others(facts: ScriptFacts, script: ShellScript, chosen: list[ShellCommand], origin: str) -> None:
    applied = _SILENT | _SETUP | {"cd", "pushd", "source", ".", *CONDAS}
    for command in script.commands:
        name = command.argv[0] if command.argv else ""
        if (chosen and command is chosen[-1]) or name in applied:
            continue
        if name == "eval" and _HOOK.match(" ".join(command.argv[1:])):
            continue
        if len(facts.unread) >= _MAX_REPORTED:
            facts.unread.append(UnreadPart(f"everything from line {command.line} on", "read the script yourself"))
            return
        shown = f"line {command.line}{origin}: {' '.join(command.argv[:3])[:100]}"
        if name.startswith("-"):
            advice = "options without a program: remove any space after the backslash of the previous line"
        elif "ray" in command.argv and {"start", "stop"} & {*command.argv}:
            advice = "nothing: Ray is started with the program and ends with it"
        elif command in chosen:
            advice = "several lines train, the last one was used: wrap this one separately, or pass its options"
        elif command.in_background:
            advice = "it runs beside the training, and the run does not start it: keep it running as a separate job"
        else:
            advice = "it is not part of the run: run it once beforehand, or add it to trainer.setup"
        facts.unread.append(UnreadPart(shown, advice))


def _choose(facts: ScriptFacts, command: ShellCommand, place: ScriptPlace) -> None:
    if command.is_conditional:
        facts.unread.append(UnreadPart(f"line {command.line} is inside a branch", "check that it is the intended line"))
    line = read_launch_line(command.argv)
    variables = dict(command.variables) | dict(line.variables)
    place = replace(
        place, folder=facts.folder, known={**place.known, **_values(command), **line.variables}, line=command.line
    )
    facts.command, facts.line, facts.variables = command, line, variables
    take_script_within(facts, line, place)


def take_script_within(facts: ScriptFacts, line: LaunchLine, place: ScriptPlace) -> None:
    """Replace a line that runs a script by the training command of this script, if it has one."""
    found = script_within(line, place)
    within = read_script(*found) if found else None
    if within is not None and found and found[1].name:  # one that this script writes
        facts.unread = [part for part in facts.unread if not part.what.startswith(f"file {found[1].name}, written")]
    if within is None or within.line is None or within.command is None:
        return
    facts.unread += within.unread
    facts.setup += within.setup
    facts.exported += within.exported
    facts.folder, facts.environment = within.folder, within.environment or facts.environment
    facts.sbatch = facts.sbatch or within.sbatch
    # Wrappers of all lines count; the other words of the outer lines are lost.
    facts.outer = (*facts.outer, line, *within.outer)
    kept = [item for item in line.items if item.role == "wrapper" and item.name not in DROPPED]
    words = [word for item in kept for word in line.argv[item.start : item.stop]]
    inside = [item.name for item in kept if item.name in CONTAINERS]
    if inside and within.setup:
        lines = "; ".join(within.setup)
        facts.unread.append(UnreadPart(f"{lines}: within {inside[0]}", "trainer.setup has it outside of the container"))
    unread = (*(facts.command.unread if facts.command else ()), *within.command.unread)
    facts.command = replace(within.command, unread=tuple(dict.fromkeys(unread)))
    facts.line = read_launch_line([*words, *within.line.argv]) if words else within.line
    facts.variables = {**facts.variables, **within.variables}
