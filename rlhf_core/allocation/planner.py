"""Placement of an attempt: request and inventory -> :class:`Placement`."""

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from rlhf_core.errors import BadInput
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.cluster import ResourceSpec, SlurmSpec
from rlhf_core.schemas.resources import GroupPlan, Inventory, Phases, Placement, in_order
from rlhf_core.schemas.run import RunSpec


def plan(
    spec: RunSpec,
    inventory: Inventory,
    *,
    attempt: int,
    slurm: SlurmSpec | None = None,
    resume_from: CheckpointDir | None = None,
    excluded_nodes: Mapping[str, str] | None = None,
    config_diff: Mapping[str, JsonValue] | None = None,
    longest_gaps_s: Mapping[str, float] | None = None,
    usual_speeds: Mapping[str, dict[str, dict[str, float]]] | None = None,
    size_reason: str = "",
) -> Placement:
    """Place one attempt: a probe, the trainer's ranks on every node, then as many evaluator ranks in the same places.

    Separate rollout engines run next to the trainers, on the GPUs that follow those of the ranks. With
    ``rollout.nodes``, that many nodes, the last ones, run engines alone, and the ranks run on the others. Agent 0, on
    the first node, shares it with trainer ranks in both cases.

    Args:
        attempt: its number, from 1.
        slurm: options of its job, those of the site included; default: those of the run alone.
        resume_from: the checkpoint to resume from; None starts from the beginning.
        excluded_nodes: nodes to exclude, with the reasons.
        config_diff: settings changed by this attempt and earlier ones.
        longest_gaps_s: longest silences in earlier runs of the same shape: ``role/phase`` to seconds.
        usual_speeds: measurements of earlier probes: node to device to reading.
        size_reason: reason for fewer nodes than the run requests.

    Raises:
        BadInput: the inventory can never hold it; the message states what is missing.
    """
    excluded = dict(excluded_nodes or {})
    shortage = shortages(spec.resources, slurm or spec.slurm, inventory, tuple(excluded))
    if shortage:
        raise BadInput(f"attempt {attempt} cannot be placed: {'; '.join(shortage)}")
    return Placement(
        attempt=attempt,
        num_nodes=spec.resources.num_nodes,
        cluster=inventory.cluster,
        size_reason=size_reason,
        phases=_phases(spec),
        gpus_per_node=spec.resources.gpus_per_node,
        excluded_nodes=tuple(excluded),
        exclusion_reasons=excluded,
        config_diff=dict(config_diff or {}),
        longest_gaps_s=dict(longest_gaps_s or {}),
        usual_speeds=dict(usual_speeds or {}),
        resume_checkpoint=resume_from.root.name if resume_from else "",
        resumed_from_step=resume_from.step if resume_from else 0,
    )


def _phases(spec: RunSpec) -> Phases:
    resources = spec.resources

    def workers(role: Role, num_nodes: int) -> GroupPlan:
        return GroupPlan.on_all_nodes(role, resources.ranks_per_node, num_nodes, resources.gpus_per_node)

    probe = in_order(workers(Role.PROBE, resources.num_nodes)) if spec.preflight.probe else ()
    training = _with_engines(spec, workers(Role.TRAINER, spec.num_trainer_nodes))
    if not spec.is_evaluated:
        return (*probe, training)
    evaluators = workers(Role.EVALUATOR, spec.num_trainer_nodes)
    evaluation = _with_engines(spec, evaluators) if spec.evaluates_with_engines else (evaluators,)
    return (*probe, training, evaluation)


def _with_engines(spec: RunSpec, workers: GroupPlan) -> tuple[GroupPlan, ...]:
    """Trainers or evaluators, and the rollout engines next to them or on separate nodes.

    Raises:
        BadInput: the engines cannot be distributed evenly, or there are too few GPUs for them.
    """
    if not spec.rollout.engines:
        return (workers,)
    gpus = spec.resources.gpus_per_node
    layout = spec.rollout.layout(spec.resources.num_nodes)
    if layout is None:
        num_nodes = spec.rollout.nodes or spec.resources.num_nodes
        raise BadInput(f"rollout.engines = {spec.rollout.engines} cannot be spread evenly over {num_nodes} nodes")
    ranks = 0 if spec.rollout.nodes else spec.resources.ranks_per_node  # on the nodes of the engines
    needed = ranks + layout.per_node * spec.rollout.gpus_per_engine
    if gpus and needed > gpus:
        beside = f"{ranks} trainer ranks and " if ranks else ""
        raise BadInput(f"{beside}{layout.per_node} rollout engines need {needed} GPUs of a node, found {gpus}")
    engines = GroupPlan(
        role=Role.ROLLOUT,
        nodes=layout.nodes,
        workers_per_node=layout.per_node,
        gpus=tuple(range(ranks, needed)) if gpus else (),
        restart="alone",
    )
    return (workers.model_copy(update={"gpus": workers.gpus[: spec.resources.ranks_per_node]}), engines)


def shortages(
    resources: ResourceSpec, slurm: SlurmSpec, inventory: Inventory, excluded_nodes: Sequence[str] = ()
) -> list[str]:
    """List the resources that the inventory lacks for the request, one sentence each; empty if it fits.

    Nodes that are out of service are counted: a job waits for them, whereas a job that could never have enough nodes is
    refused.

    Processor cores are not counted: sharing them is slow, not impossible (a preflight warning says so).
    """
    found = []
    if inventory.counts_gpus(slurm) and resources.gpus_per_node > inventory.gpus_per_node:
        found.append(f"{resources.gpus_per_node} GPUs per node requested, {inventory.gpus_per_node} there")
    usable = [name for name in inventory.nodes_for(slurm, resources.gpus_per_node) if name not in set(excluded_nodes)]
    if not found and resources.num_nodes > len(usable):
        within = f" in {', '.join(sorted(slurm.partitions))}" if slurm.partitions else ""
        kind = f"{slurm.gpu_type} " if slurm.gpu_type else ""
        having = f" with {resources.gpus_per_node} {kind}GPUs" if resources.gpus_per_node else ""
        options = ("constraint", "reservation")
        having += "".join(f", {name} {value}" for name in options if (value := slurm.chosen(name)))
        without = f" without the excluded {', '.join(excluded_nodes)}" if excluded_nodes else ""
        found.append(f"{resources.num_nodes} nodes requested, {len(usable)} available{within}{having}{without}")
    memory_gb = inventory.memory_for(slurm, resources.gpus_per_node)
    if memory_gb and resources.memory_gb > memory_gb:
        found.append(f"{resources.memory_gb:g} GiB of memory per node requested, {memory_gb:.1f} there")
    return found
