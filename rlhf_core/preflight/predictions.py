"""Predictions from a run's config and the model's dimensions: memory of a rank, seconds of a step."""

from dataclasses import dataclass

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.memory.gpus import gpu_memory_bytes
from rlhf_core.preflight.memory.roles import Estimate, trainer_estimate
from rlhf_core.preflight.size_estimates import shape_of_model
from rlhf_core.preflight.step_time import StepTime, step_time
from rlhf_core.schemas.cluster import ResourceSpec, SlurmSpec
from rlhf_core.schemas.resources import Inventory


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
    shape = shape_of_model(spec, facts.model_config, facts.model_folder)
    if shape is None:
        return Predictions()
    kinds = gpu_kinds(spec.resources, facts.slurm, facts.inventory)
    memories = [memory for kind in kinds if (memory := gpu_memory_bytes(kind)) is not None]
    gpu = min(memories, default=None) if spec.resources.gpus_per_node else None
    times = [found for kind in kinds if (found := step_time(spec, shape, kind)) is not None]
    estimate = trainer_estimate(spec, shape, gpu, pairs_have_answers=facts.pairs_have_answers)
    return Predictions(estimate, max(times, key=lambda found: found.seconds, default=None))


def gpu_kinds(resources: ResourceSpec, slurm: SlurmSpec, inventory: Inventory) -> set[str]:
    """Types of GPU that a run may get: the requested one, or all of the nodes that its job may get."""
    if slurm.gpu_type:
        return {slurm.gpu_type}
    nodes = inventory.nodes_for(slurm, resources.gpus_per_node)
    return {inventory.node_gpu_types[node] for node in nodes if node in inventory.node_gpu_types}
