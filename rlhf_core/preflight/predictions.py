"""Predictions from a run's config and the model's dimensions: memory of a rank, seconds of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.preflight.facts import ModelFolder
from rlhf_core.preflight.memory import Estimate, gpu_memory_bytes, shape_of, trainer_estimate
from rlhf_core.preflight.size_estimates import parameters_of, vocabulary_size
from rlhf_core.preflight.step_time import StepTime, step_time
from rlhf_core.schemas.resources import Inventory
from rlhf_core.schemas.run import RunSpec


@dataclass(frozen=True)
class Predictions:
    """Predictions of a run; each is None if the config does not determine it."""

    memory: Estimate | None = None
    """Memory of one trainer rank."""
    step: StepTime | None = None
    """Seconds of a step of the main loop, for the slowest of several kinds of GPU."""


def predict(spec: RunSpec, inventory: Inventory, config: Mapping[str, Any], folder: ModelFolder | None) -> Predictions:
    """Predict memory and step time of the native trainer; nothing for another program.

    Args:
        config: content of the model's ``config.json``.
        folder: ``model.path`` as found.
    """
    if spec.trainer.kind != "native":
        return Predictions()
    shape = shape_of(config, parameters_of(spec, config, folder), vocabulary_size(spec))
    if shape is None:
        return Predictions()
    rooms = [room for kind in gpu_kinds(spec, inventory) if (room := gpu_memory_bytes(kind)) is not None]
    gpu = min(rooms, default=None) if spec.resources.gpus_per_node else None
    times = [found for kind in gpu_kinds(spec, inventory) if (found := step_time(spec, shape, kind)) is not None]
    return Predictions(trainer_estimate(spec, shape, gpu), max(times, key=lambda found: found.seconds, default=None))


def gpu_kinds(spec: RunSpec, inventory: Inventory) -> set[str]:
    """Types of GPU that a run may get: the requested one, or all that the nodes have."""
    return {spec.slurm.gpu_type} if spec.slurm.gpu_type else set(inventory.node_gpu_types.values())
