"""Number of processes that a launch line starts, and rendezvous of its nodes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.preflight.launch_arguments import TrainerArguments

TORCHRUN = "--nnodes {num_nodes} --nproc_per_node {ranks_per_node} --node_rank {node_rank} --master_addr {master_addr} "
TORCHRUN += "--master_port {master_port}"
ACCELERATE = "--num_machines {num_nodes} --num_processes {num_ranks} --machine_rank {node_rank} "
ACCELERATE += "--main_process_ip {master_addr} --main_process_port {master_port}"
STANDARD = "--deepspeed_multinode_launcher standard "
DEEPSPEED = "--no_ssh --num_nodes {num_nodes} --num_gpus {ranks_per_node} --node_rank {node_rank} "
DEEPSPEED += "--master_addr {master_addr} --master_port {master_port}"
PER_RANK = 'trainer.launch = "per_rank", or torchrun in front of the script'

FROM_ENVIRONMENT = "set for every launch"
"""Stands for values that the launcher reads from NNODES and similar variables, which each node's agent sets."""


@dataclass(frozen=True)
class LaunchShape:
    """Processes that a launch line starts on a node, and their rendezvous, as far as the line defines them."""

    num_nodes: str | None
    """Number of nodes passed to the launcher; None if unknown."""
    per_node: str | None
    """Number of processes that it starts on this node; None if unknown."""
    node_rank: str | None
    """Node rank passed to the launcher; None if there is none."""
    address: str | None
    """Address of the first node passed to the launcher; None if there is none."""
    needs_node_rank: bool = True
    """False if the nodes agree on their order among themselves."""
    own_launcher: str = ""
    """Option by which it starts the other nodes itself; empty if it starts only its own."""
    remedy: str = ""
    """Arguments that form one group over all nodes."""


def launch_shape(arguments: TrainerArguments) -> LaunchShape | None:
    """Shape of a launch line; None for unknown launchers."""
    line = arguments.line
    options = arguments.launcher_options
    match line.launcher:
        case "torchrun" | "torchtune":
            return _torchrun(options, arguments.variables)
        case "accelerate":
            return _accelerate(options)
        case "trl":
            given = {name: values[0] for name, values in line.arguments.items() if values}
            return _accelerate({**arguments.side.settings, **options, **given})
        case "deepspeed":
            return _deepspeed(options)
        case "swift" | "llamafactory":
            return _from_environment(arguments.variables)
        case "python":
            return LaunchShape("1", "1", None, None, remedy=PER_RANK)
        case _:
            return None


def _torchrun(options: Mapping[str, str], variables: Mapping[str, str]) -> LaunchShape:
    set_outside = {name[4:].lower(): value for name, value in variables.items() if name.startswith("PET_")}
    found = {**set_outside, **options}

    def given(*names: str) -> str | None:
        return next((found[name] for name in names if name in found), None)

    meeting = given("rdzv_backend") not in (None, "", "static")
    return LaunchShape(
        num_nodes="1" if "standalone" in options else (given("nnodes") or "1").rpartition(":")[2],
        per_node=given("nproc_per_node") or "1",
        node_rank=given("node_rank"),
        address=given("rdzv_endpoint") if meeting else given("master_addr", "rdzv_endpoint"),
        needs_node_rank=not meeting,
        remedy=TORCHRUN,
    )


def _accelerate(options: Mapping[str, str]) -> LaunchShape:
    nodes, total = options.get("num_machines", "1"), options.get("num_processes")
    per_node = total
    if total is not None and total.isdigit() and nodes.isdigit() and int(nodes):
        share, rest = divmod(int(total), int(nodes))
        per_node = str(share) if not rest else f"{total}/{nodes}"
    other = options.get("deepspeed_multinode_launcher", "pdsh")
    by_deepspeed = "use_deepspeed" in options or options.get("distributed_type") == "DEEPSPEED"
    starts_others = by_deepspeed and other != "standard"
    return LaunchShape(
        nodes,
        per_node,
        options.get("machine_rank"),
        options.get("main_process_ip"),
        own_launcher=f"--deepspeed_multinode_launcher {other}" if starts_others else "",
        remedy=STANDARD + ACCELERATE if starts_others else ACCELERATE,
    )


def _deepspeed(options: Mapping[str, str]) -> LaunchShape:
    # Without --no_ssh it starts the other nodes itself, so that each node would start all of them.
    alone = "no_ssh" not in options
    return LaunchShape(
        num_nodes="1" if alone else options.get("num_nodes"),
        per_node=options.get("num_gpus"),
        node_rank=options.get("node_rank"),
        address=options.get("master_addr"),
        remedy=DEEPSPEED,
    )


def _from_environment(variables: Mapping[str, str]) -> LaunchShape:
    return LaunchShape(
        num_nodes=variables.get("NNODES", FROM_ENVIRONMENT),
        per_node=variables.get("NPROC_PER_NODE", FROM_ENVIRONMENT),
        node_rank=variables.get("NODE_RANK", FROM_ENVIRONMENT),
        address=variables.get("MASTER_ADDR", FROM_ENVIRONMENT),
        remedy="no NNODES, NODE_RANK, NPROC_PER_NODE or MASTER_ADDR of your own: they are set for every launch",
    )
