"""Shell scripts: the command that trains, and the effect of the other commands on a run."""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rlhf_core.launch.wrap.draft import UnreadPart, number
from rlhf_core.launch.wrap.slurm_counts import derived_nodes
from rlhf_core.launch.wrap.slurm_options import read_options, split_options
from rlhf_core.shell.launch_line import SHELLS, LaunchLine, read_launch_line
from rlhf_core.shell.script import ShellCommand, ShellScript, read_shell

_NOT_TRAINING = frozenset((
    "rollout", "deploy", "infer", "eval", "export", "app", "web-ui", "sample", "vllm-serve", "env", "chat", "api",
    "version", "merge-lora", "convert",
))  # fmt: skip
"""Subcommands of training suites that serve, measure or convert."""
_SILENT = frozenset((
    "echo", "set", "unset", "mkdir", "sleep", "ulimit", "trap", "[", "[[", "test", "true", "false", "date",
    "hostname", "nvidia-smi", "clear", "exit", "wait", "shift", "printf", "cat", "ls", "which", "rm", "touch", ":",
    "pwd", "shopt", "tee", "return", "break", "continue", "read", "kill", "cp", "chmod",
))  # fmt: skip
"""Commands without effect on the training."""
_HELPERS = frozenset(["ray", "tar", "unzip", "rsync", "mv", "ln", "find", "pip", "git"])
"""Commands that prepare the nodes, or run beside the training."""
_SCRIPTS = (".sh", ".slurm", ".sbatch")
"""Endings of shell scripts."""
_PREPARES = re.compile(
    r"(?i:(?:^|[\W_])(?:set_?up|install|prep(?:are|ro\w+)?|init|bootstrap|download|stage|copy|clean(?:_?up)?|prolog(?:ue)?"
    r"|epilog(?:ue)?|env)(?:$|[\W_]))"
)
"""Names of scripts that prepare or clean the nodes."""
_MAX_REPORTED = 40
_SETUP = frozenset(["module", "ml", "ulimit"])
_ACTIVATING = ("/bin/activate", "/etc/profile.d/conda.sh", "/etc/profile.d/mamba.sh")
"""Files that make an environment or conda ready when they are sourced, in the folder of either."""


@dataclass
class ScriptFacts:
    """Facts that a run needs from a script."""

    command: ShellCommand | None = None
    line: LaunchLine | None = None
    outer: LaunchLine | None = None
    """The line around ``bash -c``, if any."""
    variables: dict[str, str] = field(default_factory=dict)
    sbatch: tuple[str, ...] = ()
    environment: str = ""
    conda: str = ""
    """Folder of the conda that the script makes ready."""
    folder: str = ""
    setup: list[str] = field(default_factory=list)
    unread: list[UnreadPart] = field(default_factory=list)


def read_script(text: str, folder: str, known: dict[str, str], arguments: Sequence[str] = ()) -> ScriptFacts:
    """Find the training command in a script.

    Args:
        folder: Folder that the script is started in, absolute.
        known: Variables of the user that have the same value on the nodes.
        arguments: Arguments of the script.
    """
    script = read_shell(text, known, arguments)
    if script.sbatch:
        script = read_shell(text, {**known, **_known_to_job(script.sbatch)}, arguments)
    facts = ScriptFacts(sbatch=script.sbatch, folder=folder)
    for note in script.unread[:_MAX_REPORTED]:
        facts.unread.append(UnreadPart(note, "check whether it changes the launch line in trainer.argv"))
    # Prefer a line that always runs to one in a branch, and that to one with only a variable.
    ranked = [(_rank(command) * 2 - command.is_conditional, command) for command in script.commands]
    best = max([0, *(rank for rank, _ in ranked)])
    chosen = [command for rank, command in ranked if rank == best > 0]
    for command in script.commands:
        if chosen and command is chosen[-1]:
            break
        _prepare(facts, command)
    _report_others(facts, script, chosen)
    if chosen:
        _choose(facts, chosen[-1], known)
    return facts


def _known_to_job(sbatch: tuple[str, ...]) -> dict[str, str]:
    """Variables that Slurm sets in a job with these options."""
    options = read_options(split_options(sbatch))
    nodes = options.get("nodes") or str(derived_nodes(options) or "")
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": options.get("ntasks_per_node", ""),
        "SLURM_GPUS_PER_NODE": options.get("gpus_per_node", "").rpartition(":")[2],
        "SLURM_GPUS_ON_NODE": options.get("gpus_per_node", "").rpartition(":")[2],
        "SLURM_CPUS_PER_TASK": options.get("cpus_per_task", ""),
    }
    return {name: value for name, value in found.items() if number(value)}


def _rank(command: ShellCommand) -> int:
    """Score for how likely a command is the training; 0 if it is not."""
    line = read_launch_line(command.argv)
    if line.shell_text:
        return 4
    if line.launcher in ("", "srun") and not any(item.role == "launcher" for item in line.items):
        # Neither a launcher nor Python: `srun` also runs what prepares and cleans the nodes.
        if not line.wrappers or not line.program or line.program[0] in _SILENT | _HELPERS:
            return 0
        if line.launcher == "srun":
            return 1 if _prepares(line) else 3
        return 0 if line.program[0].endswith(_SCRIPTS) else 2
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
    return name.endswith(_SCRIPTS) and "train" not in name and _PREPARES.search(name) is not None


def _prepare(facts: ScriptFacts, command: ShellCommand) -> None:
    """Apply a command that precedes the training."""
    before = facts.environment, len(facts.setup)
    _apply(facts, command)
    if command.is_conditional and before != (facts.environment, len(facts.setup)):
        shown = f"line {command.line} is inside a branch: {' '.join(command.argv)[:100]}"
        facts.unread.append(UnreadPart(shown, "check trainer.environment and trainer.setup, which it is part of"))


def _apply(facts: ScriptFacts, command: ShellCommand) -> None:
    words = command.argv
    name = words[0] if words else ""
    if name == "cd" and len(words) > 1:
        if command.unread or command.is_conditional:
            facts.unread.append(UnreadPart(f"line {command.line}: cd {words[1]}", "set trainer.working_dir"))
        else:
            facts.folder = posixpath.normpath(posixpath.join(facts.folder, words[1]))
    elif name in ("source", ".") and len(words) > 1:
        ending = next((ending for ending in _ACTIVATING if words[1].endswith(ending)), "")
        if ending and not command.unread:
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
    elif name in ("conda", "mamba") and words[1:2] == ("activate",) and facts.conda and not command.unread:
        facts.environment = _conda_environment(facts, words[2:])
    elif name in ("conda", "mamba", "micromamba") and words[1:2] == ("activate",):
        facts.setup.append(" ".join(words))
        facts.unread.append(
            UnreadPart(
                f"line {command.line}: {' '.join(words)}",
                "check that conda works in a shell of a job, or set trainer.environment to its folder",
            )
        )


def _conda_environment(facts: ScriptFacts, words: Sequence[str]) -> str:
    """Folder that ``activate`` makes the environment: of conda's, that of a name or path; of Python's, its own."""
    name = next((word for word in words if not word.startswith("-")), "base")
    if "/" in name:
        return posixpath.normpath(posixpath.join(facts.folder, name))
    return facts.conda if name == "base" else posixpath.join(facts.conda, "envs", name)


def _report_others(facts: ScriptFacts, script: ShellScript, chosen: list[ShellCommand]) -> None:
    for command in script.commands:
        name = command.argv[0] if command.argv else ""
        if (chosen and command is chosen[-1]) or name in _SILENT | _SETUP | {"cd", "source", ".", "conda", "mamba"}:
            continue
        if len(facts.unread) >= _MAX_REPORTED:
            facts.unread.append(UnreadPart(f"everything from line {command.line} on", "read the script yourself"))
            return
        shown = f"line {command.line}: {' '.join(command.argv[:3])[:100]}"
        if name.startswith("-"):
            advice = "options without a program: remove any space after the backslash of the previous line"
        elif command in chosen:
            advice = "several lines train, the last one was used: wrap this one separately, or pass its options"
        elif command.in_background:
            advice = "it runs beside the training, and the run does not start it: keep it running as a separate job"
        else:
            advice = "it is not part of the run: run it once beforehand, or add it to trainer.setup"
        facts.unread.append(UnreadPart(shown, advice))


def _choose(facts: ScriptFacts, command: ShellCommand, known: dict[str, str]) -> None:
    if command.is_conditional:
        facts.unread.append(UnreadPart(f"line {command.line} is inside a branch", "check that it is the intended line"))
    line = read_launch_line(command.argv)
    variables = dict(command.variables) | dict(line.variables)
    inner = line.shell_text
    if inner:
        within = read_script(inner, facts.folder, known)
        if within.line is not None and within.command is not None:
            facts.unread += within.unread
            facts.setup += within.setup
            facts.folder, facts.environment = within.folder, within.environment or facts.environment
            # Wrappers of both lines count; the outer line's positions are lost along with its words.
            facts.outer = line
            command, line, variables = within.command, within.line, variables | within.variables
    facts.command, facts.line, facts.variables = command, line, variables
