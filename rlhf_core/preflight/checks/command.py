"""External trainers: launch line, environment and files."""

import difflib
import re
from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts, TrainerSide
from rlhf_core.preflight.launch_arguments import arguments_of
from rlhf_core.preflight.registry import Finding, blocked, check, passed, skipped, warning
from rlhf_core.schemas.command_trainer import PLACEHOLDERS, CommandTrainer, named_placeholders
from rlhf_core.schemas.launch_values import values_of_spec
from rlhf_core.shell.launch_line import read_launch_line
from rlhf_core.shell.script import read_shell
from rlhf_core.text.redaction import is_secret_name

OTHER_NAMES = {
    "nnodes": "num_nodes",
    "nproc_per_node": "ranks_per_node",
    "nproc": "ranks_per_node",
    "world_size": "num_ranks",
    "num_processes": "num_ranks",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
    "max_steps": "num_steps",
    "save_steps": "checkpoint_every",
    "resume": "checkpoint",
    "resume_path": "checkpoint",
    "resume_from_checkpoint": "checkpoint",
    "output": "output_dir",
    "cuda_visible_devices": "gpus",
    "model_path": "model",
    "train_data": "train",
}
"""Other programs' names for the values of placeholders."""

NEEDED = {"transformers": ("transformers",), "swift": ("ms-swift",), "trl": ("trl",), "openrlhf": ("openrlhf",)}
"""Packages of each framework."""

_SHELL_VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]+)")
_OF_SHELL = {
    "NNODES": "num_nodes",
    "NODE_RANK": "node_rank",
    "NPROC_PER_NODE": "ranks_per_node",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
    "WORLD_SIZE": "num_ranks",
    "RANK": "rank",
    "SLURM_NODEID": "node_rank",
    "SLURM_NNODES": "num_nodes",
    "SLURM_JOB_NUM_NODES": "num_nodes",
}


@check("command.placeholders", trainer="command")
def placeholders(facts: Facts) -> Iterator[Finding]:
    """A misspelled placeholder is not replaced, and the program takes the braces as a value."""
    trainer = facts.spec.command_trainer
    for_a_shell = read_launch_line(trainer.argv).shell_text
    wrong, left = False, []
    for setting, text in _texts(trainer):
        for name in named_placeholders(text):
            near = [] if name in PLACEHOLDERS else _nearest(name)
            if near:
                wrong = True
                yield blocked(
                    f"{setting} has {{{name}}}", f"a placeholder, for instance {{{near}}}", f"write {{{near}}}"
                )
            elif name not in PLACEHOLDERS:
                left.append(f"{{{name}}}")
        for name in () if setting == "trainer.argv" and text == for_a_shell else _SHELL_VARIABLE.findall(text):
            wrong = True
            if is_secret_name(name):
                advice = "remove it, and name the variable that the program reads in slurm.pass_environment"
            else:
                instead = f"{{{_OF_SHELL[name]}}}" if name in _OF_SHELL else "its value, or `bash -c` before the line"
                advice = f"write {instead}"
            yield warning(f"{setting} has ${name}, but no shell expands it", "placeholders in braces", advice)
    yield from _empty_ones(facts, trainer)
    if not wrong:
        as_they_are = f"; not replaced: {', '.join(dict.fromkeys(left))}" if left else ""
        yield passed(f"every placeholder has a value{as_they_are}")


def _texts(trainer: CommandTrainer) -> Iterator[tuple[str, str]]:
    yield from (("trainer.argv", word) for word in trainer.argv)
    yield from (("trainer.resume_argv", word) for word in trainer.resume_argv)
    yield from ((f"trainer.variables.{name}", value) for name, value in trainer.variables.items())
    yield "trainer.working_dir", trainer.working_dir
    yield "trainer.output_dir", trainer.output_dir


def _nearest(name: str) -> str:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    return next(iter(difflib.get_close_matches(name, sorted(PLACEHOLDERS), n=1, cutoff=0.8)), "")


def _empty_ones(facts: Facts, trainer: CommandTrainer) -> Iterator[Finding]:
    """Report placeholders of settings that are not set."""
    values = values_of_spec(facts.spec)
    settings = {"model": "model.path", "train": "data.train", "eval": "data.eval"}
    used = {name: setting for setting, text in _texts(trainer) for name in named_placeholders(text)}
    for name, source in settings.items():
        if name in used and not values[name]:
            yield blocked(
                f"{used[name]} has {{{name}}}, but {source} is not set", f"a value for {source}", f"set {source}"
            )


@check("command.environment", trainer="command")
def environment(facts: Facts) -> Iterator[Finding]:
    """A virtual environment that is missing, or lacks the framework, ends every rank at its first import."""
    trainer, side = facts.spec.command_trainer, facts.trainer or TrainerSide()
    if side.setup_problem:
        # The machines that run the job may have modules that this one lacks.
        report = blocked if facts.scheduler == "local" else warning
        yield report(
            f"the setup lines before the program fail here: {side.setup_problem}",
            "lines that succeed where the program is started",
            "correct trainer.setup or slurm.setup; if only the nodes have what they need, the probe tests them there",
        )
    if side.problem:
        yield blocked(
            side.problem,
            "a name given to `rlhf env create`, or the folder of a virtual environment",
            "create it, or correct trainer.environment; on a cluster it must be on a file system that the nodes see",
        )
    elif side.unseen:
        yield skipped(f"{side.unseen}; the probe checks it on the nodes")
    elif side.python_problem:
        yield blocked(f"{side.python}: {side.python_problem}", "an interpreter that starts", "recreate it")
    elif not side.python:
        yield skipped(f"the Python that runs {side.program or trainer.argv[0]} is unknown; set trainer.environment")
    else:
        yield from _packages(trainer, side)


def _packages(trainer: CommandTrainer, side: TrainerSide) -> Iterator[Finding]:
    names = NEEDED.get(trainer.framework, ())
    missing = [name for name in (*names, "torch") if names and name not in side.packages]
    version = ".".join(map(str, side.version))
    if missing:
        yield blocked(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing in {side.python}",
            f"an environment of {trainer.framework}",
            f"{side.python} -m pip install {' '.join(missing)}, or correct trainer.environment",
        )
    else:
        shown = [f"{name} {side.packages[name]}" for name in (*names, "torch") if name in side.packages]
        yield passed(", ".join([f"{side.python} is Python {version}", *shown]))


@check("command.program", trainer="command")
def program(facts: Facts) -> Iterator[Finding]:
    """A program, module or script that is not found ends every attempt in its first second."""
    trainer, side = facts.spec.command_trainer, facts.trainer or TrainerSide()
    if "pipefail" not in " ".join(trainer.argv) and read_shell(read_launch_line(trainer.argv).shell_text).ends_in_pipe:
        yield warning(
            "trainer.argv ends in a pipe, whose exit code is that of its last program: if the training before it "
            "crashes, the run ends as incomplete and is not retried",
            "the exit code of the training",
            "leave out `| tee`, the output is kept anyway; or begin the text with `set -o pipefail;`",
        )
    if side.problem or side.unseen:
        return  # reported by command.environment
    where = f"in {side.folder}/bin or on the PATH" if side.folder else "on the PATH"
    if not side.program:
        # On the machines that run the job, the PATH may be different.
        report = blocked if side.folder or facts.scheduler == "local" else warning
        yield report(
            f"trainer.argv begins with {arguments_of(facts).line.command or trainer.argv[0]}, which is not {where}",
            "a program that exists",
            "correct trainer.argv, or set trainer.environment",
        )
    for name in side.missing_modules:
        yield blocked(
            f"{side.python} does not find the module {name}", "an installed module", f"install it, or correct {name}"
        )
    for name in side.missing_files:
        yield blocked(
            f"trainer.argv names {name}, which is not in {trainer.working_dir or 'the folder that the run creates'}",
            "files given by absolute path, or in the copy of your code",
            f"write the absolute path, or {{code}}/{name.rpartition('/')[2]} with the file in code.paths",
        )
    if side.program and not side.missing_modules and not side.missing_files:
        yield passed(f"found {side.program}")


@check("command.output", trainer="command")
def output(facts: Facts) -> Iterator[Finding]:
    """Runs that share an output folder mistake each other's checkpoints for their own."""
    trainer, arguments = facts.spec.command_trainer, arguments_of(facts)
    folder = trainer.output_dir
    if not {"run_dir", "run_id"} & set(named_placeholders(folder)):
        yield blocked(
            f"trainer.output_dir = {folder}, the same for every run",
            "a separate folder for each run",
            "set it to {run_dir}/trainer/output, or put {run_id} into it",
        )
    passed_dir = arguments.text("output_dir", "output", "save_path")
    # OpenRLHF has an option for the model and one for checkpoints; transformers puts both into one folder.
    is_within = trainer.framework == "openrlhf" and (passed_dir or "").startswith("{output_dir}/")
    if passed_dir is not None and passed_dir.rstrip("/") not in ("{output_dir}", folder.rstrip("/")) and not is_within:
        yield blocked(
            f"the program writes to {passed_dir}, but trainer.output_dir is {folder}",
            "one folder: checkpoints and logs are read from trainer.output_dir",
            "write --output_dir {output_dir}",
        )
    elif passed_dir is None and not any("{output_dir}" in text for _, text in _texts(trainer)):
        yield warning(
            "trainer.output_dir is not passed to the program",
            f"its checkpoints in {folder}",
            "add --output_dir {output_dir}, or the program's own option for it",
        )
    else:
        yield passed(f"its files are in {folder}")
