"""Ranks and nodes of an external trainer: options of its launcher compared with the plan."""

import re
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.launch_arguments import TRANSFORMERS, TrainerArguments, arguments_of
from rlhf_core.preflight.launch_shape import FROM_ENVIRONMENT, LaunchShape, launch_shape
from rlhf_core.preflight.registry import Finding, blocked, check, passed, skipped, warning
from rlhf_core.shell.known_programs import BOUND_CONTAINERS, CONTAINERS

_ONLY_HERE = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1"})
_OWN_LAUNCHERS = frozenset({"torchrun", "torchtune", "accelerate", "trl", "deepspeed", "mpirun", "srun"})
_LOG_FOLDERS = ("log_dir", "enable_each_rank_log")
"""Options of torchrun, accelerate and deepspeed for the folder with the output of their ranks."""
_TEES = frozenset({"tee", "t", "PET_TEE"})
"""Options and a variable of torch's launchers that print this output as well."""


@check("command.nodes", trainer="command")
def nodes(facts: Facts) -> Iterator[Finding]:
    """If a launcher is not configured for all nodes, each node trains the same model alone, and nothing fails."""
    num_nodes, trainer = facts.spec.resources.num_nodes, facts.spec.command_trainer
    if trainer.launch == "per_rank":
        return
    arguments = arguments_of(facts)
    launcher, shape = arguments.line.launcher, launch_shape(arguments)
    if num_nodes == 1:
        if shape is not None and shape.num_nodes not in (None, "1", FROM_ENVIRONMENT):
            yield blocked(
                f"{launcher} is configured for {shape.num_nodes} nodes, but resources.num_nodes is 1",
                "the same number; otherwise it waits for nodes that never join",
                "write {num_nodes} into trainer.argv",
            )
        return
    if shape is None:
        if any("{node_rank}" in word for word in (*trainer.argv, *trainer.variables.values())):
            yield passed("the program gets the rank of each node")
        else:
            yield skipped(
                f"{trainer.argv[0]} is not a known launcher; NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR "
                "and MASTER_PORT are set in its environment"
            )
        return
    wrong = list(_wrong_nodes(shape, num_nodes))
    if wrong:
        yield blocked(
            f"{launcher}, started on each of {num_nodes} nodes, {' and '.join(wrong)}",
            f"one group of ranks over all {num_nodes} nodes; with this line, every node trains alone or waits forever",
            f"write {shape.remedy}",
        )
    elif shape.address not in (None, FROM_ENVIRONMENT) and "{master_addr}" not in shape.address:
        yield warning(
            f"the address of the first node is fixed to {shape.address}",
            "the address of the first node of each attempt",
            "write {master_addr}",
        )
    else:
        yield passed(f"{launcher} is configured for {num_nodes} nodes and their order")


def _wrong_nodes(shape: LaunchShape, num_nodes: int) -> Iterator[str]:
    if shape.own_launcher:
        yield f"leaves the others to DeepSpeed ({shape.own_launcher})"
    if shape.num_nodes is not None and shape.num_nodes not in (str(num_nodes), FROM_ENVIRONMENT):
        yield f"is configured for {shape.num_nodes}"
    if shape.needs_node_rank:
        if shape.node_rank is None:
            yield "gets no node rank"
        elif shape.node_rank != FROM_ENVIRONMENT and "{node_rank}" not in shape.node_rank:
            yield f"gets {shape.node_rank} as the rank of every node"
    if shape.address is None or shape.address.rpartition(":")[0] in _ONLY_HERE or shape.address in _ONLY_HERE:
        yield f"looks for the first node at {shape.address or 'its own address'}"


@check("command.ranks", trainer="command")
def ranks(facts: Facts) -> Iterator[Finding]:
    """If the number of processes differs from the planned ranks, they wait forever or leave GPUs idle."""
    trainer, arguments = facts.spec.command_trainer, arguments_of(facts)
    planned, launcher = facts.spec.resources.ranks_per_node, arguments.line.launcher
    gpus = facts.spec.resources.gpus_per_node
    if trainer.launch == "per_rank":
        if launcher in _OWN_LAUNCHERS:
            yield blocked(
                f'trainer.launch = "per_rank" with {launcher}, which itself starts several ranks for every rank',
                "ranks started by one of the two",
                'set trainer.launch = "per_node", or remove the launcher: RANK and WORLD_SIZE are set',
            )
        else:
            yield passed(f"{planned} ranks per node, each started with its own RANK")
        return
    shape = launch_shape(arguments)
    per_node = shape.per_node if shape is not None else None
    if per_node is None:
        yield skipped(
            f"the number of processes that {launcher or trainer.argv[0]} starts cannot be read from its launch line"
        )
    elif per_node in (str(planned), FROM_ENVIRONMENT):
        yield passed(f"{planned} processes per node, as planned")
    elif per_node in ("gpu", "auto") and gpus == planned:
        yield passed(f"one process per GPU: {planned} per node")
    else:
        per_gpu = per_node in ("gpu", "auto")
        started = f"one process per GPU (resources.gpus_per_node = {gpus})" if per_gpu else f"{per_node} processes"
        number = str(gpus or "") if per_gpu else per_node
        # A script may start its other processes itself; a launcher starts as many as its options say.
        report = warning if launcher == "python" else blocked
        yield report(
            f"{launcher} starts {started} on a node, resources.ranks_per_node is {planned}",
            "the same number",
            "write {ranks_per_node} into trainer.argv"
            + (f", or set resources.ranks_per_node={number}" if number.isdigit() else ""),
        )


@check("command.logs", trainer="command")
def logs(facts: Facts) -> Iterator[Finding]:
    """Output in a folder that only the launcher knows is in no log, and unseen by patterns and by the diagnosis."""
    arguments = arguments_of(facts)
    options = arguments.launcher_options
    if arguments.line.launcher == "trl":
        options |= dict.fromkeys(arguments.line.arguments, "")
    if not _TEES.isdisjoint({*options, *arguments.variables}):
        return
    elsewhere = [f"--{name}" for name in _LOG_FOLDERS if name in options]
    elsewhere += ["PET_LOG_DIR"] if "PET_LOG_DIR" in arguments.variables else []
    for name in elsewhere:
        yield warning(
            f"{name}: the launcher writes the output of the ranks to a folder of its own",
            "the output of every rank in the logs of the run",
            f"remove {name}; `rlhf logs RUN --rank N` shows the output of a rank",
        )


@check("command.container", trainer="command")
def container(facts: Facts) -> Iterator[Finding]:
    """A program in a container that lacks the folders of the run ends at its start, or loses what it writes."""
    line, runs_dir = arguments_of(facts).line, facts.disk.runs_dir
    for item in [item for item in line.items if item.role == "wrapper" and item.name in CONTAINERS]:
        words = [part for word in line.argv[item.start : item.stop] for part in re.split("[,:=]", word)]
        mounted = [Path(word) for word in words if word.startswith("/")]
        if item.name in BOUND_CONTAINERS:
            yield passed(f"{item.name}: the run binds its folders and scripts into the image")
        elif "{run_dir}" not in words and not any(runs_dir.is_relative_to(folder) for folder in mounted):
            yield warning(
                f"{item.name} does not mount the run directory, which is in {runs_dir}",
                "the run directory under the same path in the image",
                "mount {run_dir}, and {drivers} if the launch line names it; or set slurm.container_kind and "
                "slurm.container_image",
            )


@check("command.cpu", trainer="command")
def cpu(facts: Facts) -> Iterator[Finding]:
    """On nodes without GPUs, ranks of transformers each train alone unless the CPU is selected."""
    arguments, gpus = arguments_of(facts), facts.spec.resources.gpus_per_node
    if arguments.trainer.framework not in TRANSFORMERS or facts.spec.num_ranks == 1:
        return
    options = arguments.launcher_options
    by_variable = arguments.variables.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    uses_cpu = arguments.is_on("use_cpu") or by_variable or "cpu" in options or options.get("use_cpu") == "true"
    if gpus and uses_cpu:
        yield warning(
            f"resources.gpus_per_node = {gpus}, but the program is set to use the CPU",
            "training on the requested GPUs",
            "remove --use_cpu and ACCELERATE_USE_CPU, or set resources.gpus_per_node=0",
        )
    elif not gpus and not uses_cpu and arguments.is_whole and not _is_ours(arguments):
        # A script may set it in its own code.
        report = blocked if arguments.is_known_program else warning
        yield report(
            f"{facts.spec.num_ranks} ranks without GPUs, but the program is not set to use the CPU: accelerate then "
            "forms no process group, and every rank trains alone",
            "one process group of all ranks",
            "add --use_cpu true, or ACCELERATE_USE_CPU=true to trainer.variables",
        )


def _is_ours(arguments: TrainerArguments) -> bool:
    """Return True for the scripts that come with rlhf-flows, which detect GPUs themselves."""
    return any(word.startswith("{drivers}/") for word in arguments.line.program)
