"""Caps on what all attempts of a run together may use, whatever progress they make. Pure.

They count from where a person last started or resumed the run: to resume one that came to its cap is to allow as much
again. A cap on hours acts while an attempt runs: its time limit is what is left, so that it saves and ends in time.
"""

import math
from dataclasses import dataclass

from rlhf_core.formatting import count
from rlhf_core.schemas.run import RunSpec

HOUR_S = 3600.0
MARGIN_S = 60.0
"""Slurm counts in minutes, and may ask to save by as much earlier."""


@dataclass(frozen=True)
class Used:
    """Use of the attempts of a run so far."""

    attempts: int = 0
    allocated_s: float = 0.0
    """Time for which they had their allocations, all together, in seconds."""


def refusal(spec: RunSpec, used: Used) -> str:
    """The cap that forbids another attempt, and how much of it was used; empty where none does."""
    supervise = spec.supervise
    if supervise.max_total_attempts and used.attempts >= supervise.max_total_attempts:
        return f"supervise.max_total_attempts = {supervise.max_total_attempts}: {count(used.attempts, 'attempt')} made"
    for name, cap, units, unit in _hours(spec):
        left_s = cap * HOUR_S / units - used.allocated_s
        if left_s <= spec.slurm.save_lead_s + MARGIN_S:
            spent = f"{used.allocated_s * units / HOUR_S:.2f} {unit} used in {count(used.attempts, 'attempt')}"
            return f"supervise.{name} = {cap:g}: {spent}; what is left is too short to train and to save"
    return ""


def time_limit_s(spec: RunSpec, used: Used) -> int:
    """Longest life of the next attempt: ``resources.time_limit_s``, or what a cap leaves, whichever is shorter."""
    left = [cap * HOUR_S / units - used.allocated_s for _, cap, units, _ in _hours(spec)]
    return max(1, math.floor(min([spec.resources.time_limit_s, *left])))


def _hours(spec: RunSpec) -> list[tuple[str, float, int, str]]:
    """Caps that are set: name, hours, how many hours count for one of an allocation, and of what."""
    nodes = spec.resources.num_nodes
    caps = [
        ("max_gpu_hours", spec.supervise.max_gpu_hours, nodes * spec.resources.gpus_per_node, "GPU-hours"),
        ("max_node_hours", spec.supervise.max_node_hours, nodes, "node-hours"),
    ]
    return [one for one in caps if one[1]]
