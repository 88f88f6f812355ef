"""Requested resources compared with the machines of the site."""

from collections import Counter
from collections.abc import Iterator, Mapping

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.launch_arguments import arguments_of
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.scheduler.slurm.environment import OPTIONS_OF_THE_JOB
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.text.formatting import listed

_USED_WITHOUT_SLURM = ("environment", "exclude", "gpu_type", "pass_environment", "save_lead_s")
"""Settings in ``[slurm]`` that have an effect with any scheduler: on the job, its limits or the predictions."""


@check("resources.scheduler")
def scheduler(facts: Facts) -> Iterator[Finding]:
    """A config for a cluster that is checked or run without Slurm takes this machine, perhaps a login node."""
    if facts.scheduler == "slurm":
        return
    given, fields = facts.spec.slurm, type(facts.spec.slurm).model_fields
    unused = [
        f"slurm.{name}"
        for name, field in fields.items()
        if name not in _USED_WITHOUT_SLURM and getattr(given, name) != field.default
    ]
    if unused:
        yield warning(
            f"{', '.join(unused)}: no effect, because the scheduler is {facts.scheduler}",
            "the scheduler slurm for jobs of Slurm",
            f"{_for_a_cluster(facts)}remove {'it' if len(unused) == 1 else 'them'}",
        )


def _for_a_cluster(facts: Facts) -> str:
    """Begin advice that suits only this machine; empty if the nodes are those of a cluster."""
    if facts.scheduler == "slurm":
        return ""
    return "for a Slurm cluster, set RLHF_SCHEDULER=slurm in the environment; for this machine, "


@check("resources.nodes")
def nodes(facts: Facts) -> Iterator[Finding]:
    """Slurm refuses a job that requests more nodes than its partition has."""
    requested, available = facts.spec.resources.num_nodes, len(_nodes(facts))
    beside = facts.spec.rollout.nodes
    fewer = [number for number in facts.spec.possible_nodes if number <= available]
    if requested > available and fewer:
        yield warning(
            f"resources.num_nodes = {requested}, the scheduler has {available} for this job; resources.min_nodes "
            f"allows {fewer[0]}",
            f"{requested} nodes",
            f"it trains on {fewer[0]} with the same global batch but takes longer; set "
            f"resources.num_nodes={fewer[0]} if that is intended",
        )
    elif facts.scheduler == "local" and requested > 1:
        yield blocked(
            f"resources.num_nodes = {requested} with the local scheduler",
            "one node: the local scheduler is this machine",
            f"{_for_a_cluster(facts)}set resources.num_nodes=1 and resources.ranks_per_node to the number of ranks"
            + (", and rollout.nodes=0, so engines run beside them" if beside else ""),
        )
    elif requested > available:
        yield blocked(
            f"resources.num_nodes = {requested}, the scheduler has {available} nodes for this job",
            f"at most {available} nodes",
            f"set resources.num_nodes={max(available, 1)}"
            + (f", and fewer in rollout.nodes ({beside})" if beside else "")
            + (
                ", or other options in [slurm] that select nodes" if available < len(facts.inventory.node_names) else ""
            ),
        )
    else:
        kinds = f": {facts.spec.num_trainer_nodes} for training, {beside} for rollout engines" if beside else ""
        yield passed(f"{requested} of {available} nodes{kinds}")


@check("resources.slurm_options")
def slurm_options(facts: Facts) -> Iterator[Finding]:
    """An option of sbatch that the job sets itself makes it impossible to find, cancel or restart."""
    if facts.scheduler != "slurm":
        return
    given = facts.slurm.extra
    names = [option.removeprefix("--").partition("=")[0] for option in given]
    own = [name for name in names if name in OPTIONS_OF_THE_JOB]
    for name in own:
        yield blocked(
            f"slurm.extra contains --{name}, which the job sets itself",
            f"no such option: {OPTIONS_OF_THE_JOB[name]}",
            f"remove --{name} from slurm.extra",
        )
    if given and not own:
        yield passed(f"{', '.join(given)} for sbatch")


@check("resources.federation")
def federation(facts: Facts) -> Iterator[Finding]:
    """A job that another cluster of a federation runs looks as if it had ended, and a second one is submitted."""
    name, cluster = facts.inventory.federation, facts.inventory.cluster
    if name:
        yield blocked(
            f"the cluster {cluster} belongs to the federation {name}, of which any cluster may start the job",
            "jobs that stay on the cluster that is asked for them",
            f"set SLURM_CLUSTERS={cluster} in the environment of the services and of rlhf",
        )


@check("resources.min_nodes")
def min_nodes(facts: Facts) -> Iterator[Finding]:
    """A run that may continue with fewer nodes still waits if none of these numbers suits its batch and engines."""
    resources, possible = facts.spec.resources, facts.spec.possible_nodes
    if not resources.min_nodes:
        return
    setting = f"resources.min_nodes = {resources.min_nodes} of {resources.num_nodes}"
    if facts.spec.trainer.kind == "command":
        yield blocked(
            f'{setting} with trainer.kind = "command"',
            "the native trainer, which keeps the global batch on any number of nodes",
            "set resources.min_nodes=0; another program divides its batch by its own arguments",
        )
    elif len(possible) == 1 and resources.min_nodes < resources.num_nodes:
        rows = {name: loop.algorithm.rows_per_step for name, loop in facts.spec.loops.named.items()}
        rows_per_loop = ", ".join(f"loops.{name} {count}" for name, count in rows.items())
        beside = facts.spec.rollout.nodes
        of = f"for training, beside {beside} with engines, " if beside else ""
        engines = facts.spec.rollout.engines
        room = f" and suits {engines} rollout engines" if engines else ""
        yield blocked(
            f"{setting}, but no smaller number of nodes {of}x {resources.ranks_per_node} ranks divides the rows of a "
            f"step ({rows_per_loop}){room}",
            f"a number of nodes below resources.num_nodes that divides the rows of every loop{room}",
            "lower resources.min_nodes, or change the rows per step" + (" or rollout.engines" if engines else ""),
        )
    else:
        numbers = ", ".join(map(str, sorted(possible)))
        yield passed(f"{setting}: an attempt may have {numbers} nodes; the global batch stays the same")


@check("resources.gpus")
def gpus(facts: Facts) -> Iterator[Finding]:
    """A job for GPUs that no node has waits forever; unused GPUs cost money; two ranks on one GPU run out of memory."""
    resources = facts.spec.resources
    requested, ranks = resources.gpus_per_node, resources.ranks_per_node
    counted = facts.inventory.counts_gpus(facts.slurm)
    available = max(map(facts.inventory.gpus_of, _nodes(facts)), default=facts.inventory.gpus_per_node)
    available = available if counted else requested
    rollout, engines = facts.spec.rollout, facts.spec.engines_beside_trainers
    users = ranks + engines * rollout.gpus_per_engine
    of_engines = facts.spec.engines_per_node * rollout.gpus_per_engine
    elsewhere = _partitions_with_the_gpus(facts)
    if elsewhere:
        chosen = facts.inventory.may_choose_partition
        yield (warning if chosen else blocked)(
            f"resources.gpus_per_node = {requested}, which no node of the default partition "
            f"{facts.inventory.default_partition} has; those of {listed(elsewhere, 8)} do",
            "a partition with such nodes",
            f"set slurm.partition={elsewhere[0]}"
            + (", unless a plug-in of the cluster places such jobs; otherwise Slurm refuses the job" if chosen else ""),
        )
        if not chosen:
            return
    if requested > available:
        unmanaged = facts.scheduler == "slurm" and not facts.inventory.gpus_per_node
        yield blocked(
            f"resources.gpus_per_node = {requested}, the nodes have {available}",
            f"at most {available} GPUs per node",
            f"{_for_a_cluster(facts)}set resources.gpus_per_node={available}"
            + ("" if available else " to train on CPU")
            + (", or slurm.gpus_as_gres=false if the nodes have GPUs that Slurm does not list" if unmanaged else ""),
        )
    elif requested and ranks > requested:
        yield blocked(
            f"resources.ranks_per_node = {ranks} on {requested} GPUs per node",
            "a GPU for every rank",
            f"set resources.ranks_per_node={requested}",
        )
    elif requested > users and not _places_its_ranks(facts):
        beside = f" and {engines} rollout engines" if engines else ""
        yield warning(
            f"resources.gpus_per_node = {requested} for {ranks} ranks{beside} per node: {requested - users} GPUs idle",
            "as many ranks as GPUs",
            f"set resources.ranks_per_node={requested - users + ranks}, or resources.gpus_per_node={users}",
        )
    elif rollout.nodes and 0 < of_engines < requested:
        yield warning(
            f"resources.gpus_per_node = {requested}, and engines on {of_engines} of them on each of rollout.nodes = "
            f"{rollout.nodes}: {requested - of_engines} GPUs idle",
            "engines on all GPUs of their nodes",
            f"set rollout.engines={requested // rollout.gpus_per_engine * rollout.nodes}, or rollout.nodes=0 to place "
            "them beside the trainers",
        )
    elif not requested and available:
        yield warning(
            f"resources.gpus_per_node = 0, but the nodes have {available} GPUs",
            "training on the available GPUs",
            f"set resources.gpus_per_node={available} and resources.ranks_per_node={available}, unless CPU is intended",
        )
    else:
        unknown = "" if counted else ", which Slurm does not count"
        yield passed(f"{requested} GPUs per node for {ranks} ranks{unknown}" if requested else "CPU, no GPU requested")


def _partitions_with_the_gpus(facts: Facts) -> list[str]:
    """List the partitions with the requested GPUs if none is chosen and the default one lacks them."""
    inventory = facts.inventory
    default = inventory.partitions_for(facts.slurm)
    if facts.slurm.partitions or not default or not inventory.counts_gpus(facts.slurm):
        return []
    enough = inventory.partitions_with(facts.spec.resources.gpus_per_node)
    return sorted(enough) if enough.isdisjoint(default) else []


def _places_its_ranks(facts: Facts) -> bool:
    """Return True for a program that is started once on a node, without a launcher, and may use all its GPUs (Ray)."""
    trainer = facts.spec.trainer
    is_once = isinstance(trainer, CommandTrainer) and trainer.launch == "per_node"
    return is_once and arguments_of(facts).line.launcher in ("python", "")


@check("resources.uneven_gpus")
def uneven_gpus(facts: Facts) -> Iterator[Finding]:
    """A node with a missing GPU makes the job wait forever, or every rank wait for that node."""
    resources, nodes = facts.spec.resources, _nodes(facts)
    requested = resources.gpus_per_node
    available = {node: count for node, count in facts.inventory.node_gpus.items() if node in nodes}
    if not requested or requested > max(available.values(), default=0):
        return  # reported by resources.gpus
    enough = [node for node, count in available.items() if count >= requested]
    less = {node: count for node, count in available.items() if 0 < count < requested}
    if len(enough) < resources.num_nodes:
        lacking = less or {node: count for node, count in available.items() if count < requested}
        fewer = f" or resources.gpus_per_node to {min(less.values())}" if less else ""
        yield blocked(
            f"{resources.num_nodes} nodes with {requested} GPUs are requested, {_count(len(enough))} that many"
            + (f"; these have fewer: {_shown(lacking)}" if lacking else ""),
            f"{resources.num_nodes} nodes with at least {requested} GPUs",
            f"lower resources.num_nodes to {len(enough)}{fewer}, or have the GPUs of these nodes checked",
        )
        return
    deviating = _deviating_nodes(available, facts.inventory.node_gpu_types)
    if deviating and any(count < requested for count in deviating.values()):
        yield warning(
            f"{_shown(deviating)}; the other nodes of the kind have more, and {requested} are requested",
            "the same number of GPUs on every node of a kind",
            "the job will not run there; if a GPU dropped off its bus, have these nodes checked",
        )
    elif deviating:
        usual = max(available.values())
        yield warning(
            f"{_shown(deviating)}, the others {usual}: with resources.gpus_per_node = {requested} these have "
            f"{usual - requested} idle",
            "a number of GPUs that matches most nodes",
            f"set slurm.exclude to {list(deviating)} and resources.gpus_per_node={usual}",
        )
    else:
        yield passed(f"{len(enough)} nodes have {requested} GPUs or more")


CORES_PER_GPU = 4
"""Cores of a node for each GPU below which a rank usually waits for them. A rule of thumb; GPU nodes have 12 to 16."""


@check("resources.cores")
def cores(facts: Facts) -> Iterator[Finding]:
    """Ranks that share cores slow each other down, and every collective waits for the slowest."""
    resources = facts.spec.resources
    available = facts.inventory.cpus_for(facts.slurm, resources.gpus_per_node)
    requested = facts.spec.processes_per_node * resources.cpus_per_rank
    of_engines = facts.spec.engines_per_node * facts.spec.rollout.gpus_per_engine
    word = "or" if facts.spec.rollout.nodes else "and"
    engines = f" {word} {of_engines} processes of engines" if of_engines else ""
    found = (
        f"{resources.ranks_per_node} ranks{engines} x {resources.cpus_per_rank} cores = {requested} cores per node, "
        f"{available} available"
    )
    if requested > available:
        can_be_lowered = {
            "resources.ranks_per_node": resources.ranks_per_node > 1,
            "resources.cpus_per_rank": resources.cpus_per_rank > 1,
            "rollout.engines": of_engines > 0,
        }
        settings = " or ".join(setting for setting, can_be in can_be_lowered.items() if can_be)
        yield warning(found, f"at most {available} cores per node", f"lower {settings}")
        return
    processes, gpus = facts.spec.processes_per_node, resources.gpus_per_node
    enough = min(CORES_PER_GPU * gpus, available // processes * processes)
    # Only Slurm confines a job to the cores that it requests.
    if facts.scheduler == "slurm" and requested < enough and not facts.slurm.in_extra("cpus-per-task"):
        yield warning(
            f"{found}, for {gpus} GPUs",
            f"about {CORES_PER_GPU} cores for each GPU: for its rank, the loading of data, compilation and engines",
            f"set resources.cpus_per_rank={-(-enough // processes)}; more if the job has its nodes to itself",
        )
    else:
        yield passed(found)


@check("resources.memory")
def memory(facts: Facts) -> Iterator[Finding]:
    """A job that requests more memory than any node has waits forever; without a request, it may get very little."""
    requested = facts.spec.resources.memory_gb
    available = facts.inventory.memory_for(facts.slurm, facts.spec.resources.gpus_per_node)
    default, share = _default_memory_gb(facts), _share_of_memory_gb(facts, available)
    if available and requested > available:
        yield blocked(
            f"resources.memory_gb = {requested:g}, the nodes have {available:.1f}",
            f"at most {available:.1f} GiB",
            f"set resources.memory_gb={int(available)}, or 0 to leave it to the scheduler",
        )
    elif not requested and 0 < default < share / 2:
        yield warning(
            f"resources.memory_gb = 0, for which the cluster gives the job {default:.1f} GiB of the "
            f"{available:.1f} GiB of a node",
            f"the share of its GPUs: {share:.1f} GiB",
            f"set resources.memory_gb={int(share)}",
        )


def _default_memory_gb(facts: Facts) -> float:
    """Least memory on a node, in GiB, of a job for GPUs that requests none; 0 if it may use the whole node."""
    asks = any(map(facts.slurm.in_extra, ("mem", "mem-per-cpu", "mem-per-gpu", "exclusive")))
    gpus, cpus = facts.spec.resources.gpus_per_node, facts.spec.processes_per_node * facts.spec.resources.cpus_per_rank
    if asks or not gpus or not facts.slurm.gpus_as_gres:
        return 0.0
    settings = facts.inventory.settings_for(facts.slurm, gpus).values()
    return min(filter(None, (one.default_memory_gb(cpus, gpus) for one in settings)), default=0.0)


def _share_of_memory_gb(facts: Facts, available: float) -> float:
    """Share of a node's memory for the requested part of its GPUs, in GiB."""
    gpus = facts.spec.resources.gpus_per_node
    most = max([gpus, *map(facts.inventory.gpus_of, _nodes(facts))])
    return available * gpus / most if gpus else 0.0


def _nodes(facts: Facts) -> list[str]:
    """Nodes that the job may get, however many GPUs they have; if only a plug-in of the cluster can find it a
    partition, those with enough."""
    few = facts.inventory.nodes_for(facts.slurm)
    enough = facts.inventory.nodes_for(facts.slurm, facts.spec.resources.gpus_per_node)
    return few if set(enough) <= set(few) else enough


def _deviating_nodes(gpus: Mapping[str, int], types: Mapping[str, str]) -> dict[str, int]:
    """Nodes with fewer GPUs than most nodes of their kind."""
    deviating: dict[str, int] = {}
    for kind in {types.get(node, "") for node in gpus}:
        counts = {node: count for node, count in gpus.items() if count and types.get(node, "") == kind}
        if counts:
            (usual, times), *_ = Counter(counts.values()).most_common(1)
            if times > 1:
                deviating |= {node: count for node, count in counts.items() if count < usual}
    return deviating


def _count(nodes: int) -> str:
    return {0: "no node has", 1: "one node has"}.get(nodes, f"{nodes} nodes have")


def _shown(gpus: Mapping[str, int]) -> str:
    return listed([f"{node} ({count})" for node, count in gpus.items()], 8)
