"""Predictions from a run's config, the model's dimensions and the nodes that the run may get: memory of a rank, seconds
of a step."""

from dataclasses import dataclass

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.memory.gpus import gpu_memory_bytes
from rlhf_core.preflight.memory.roles import Estimate, trainer_estimate
from rlhf_core.preflight.memory.shapes import Shape
from rlhf_core.preflight.size_estimates import shape_of_model
from rlhf_core.preflight.step_time import StepTime, step_time


@dataclass(frozen=True)
class Predictions:
    """Predictions of a run; each is None if the config does not determine it."""

    memory: Estimate | None = None
    """Memory of one trainer rank."""
    step: StepTime | None = None
    """Seconds of a step of the main loop, for the slowest of several kinds of GPU."""


def predict(facts: Facts) -> Predictions:
    """Predict memory and step time of the native trainer; nothing for another program."""
    spec = facts.spec
    if spec.trainer.kind != "native":
        return Predictions()
    shape = shape_of_model(facts)
    if shape is None:
        return Predictions()
    estimate = trainer_estimate(spec, shape, smallest_gpu_bytes(facts), pairs_have_answers=facts.pairs_have_answers)
    return Predictions(estimate, slowest_step(facts, shape)[1])


def gpu_kinds(facts: Facts) -> set[str]:
    """Types of GPU that a run may get: the requested one, or all of the nodes that its job may get."""
    slurm, inventory = facts.slurm, facts.inventory
    if slurm.gpu_type:
        return {slurm.gpu_type}
    nodes = inventory.nodes_for(slurm, facts.spec.resources.gpus_per_node)
    return {inventory.node_gpu_types[node] for node in nodes if node in inventory.node_gpu_types}


def smallest_gpu_bytes(facts: Facts) -> int | None:
    """Usable memory of the smallest GPU that the run may get, which must suffice; None without a GPU of known size."""
    if not facts.spec.resources.gpus_per_node:
        return None
    sizes = (gpu_memory_bytes(kind) for kind in gpu_kinds(facts))
    return min((size for size in sizes if size is not None), default=None)


def slowest_step(facts: Facts, shape: Shape) -> tuple[str, StepTime | None]:
    """The type of GPU on which a step of the main loop takes longest, and that step; empty and None if unknown."""
    times = {kind: time for kind in gpu_kinds(facts) if (time := step_time(facts.spec, shape, kind)) is not None}
    return max(times.items(), key=lambda found: found[1].seconds, default=("", None))


def node_memory_gb(facts: Facts) -> float:
    """Main memory of a node of the job in GiB; 0 if unknown, as where no node has the GPUs."""
    resources, inventory = facts.spec.resources, facts.inventory
    known = inventory.nodes_for(facts.slurm, resources.gpus_per_node)
    return resources.memory_gb or (inventory.memory_for(facts.slurm, resources.gpus_per_node) if known else 0.0)
