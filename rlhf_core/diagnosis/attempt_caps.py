"""Caps on the total resources of all attempts of a run, independent of their progress. Pure.

The count is reset when the user starts or resumes the run, so resuming a run at its cap allows the same amount again. A
cap on hours limits each attempt: its time limit is the remaining time, so that it saves and exits in time.
"""

import math
from dataclasses import dataclass

from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import count

HOUR_S = 3600.0
MARGIN_S = 60.0
"""Margin in seconds: Slurm counts in minutes, so it may request the save up to a minute early."""


@dataclass(frozen=True)
class Used:
    """Resources used by the attempts of a run so far."""

    attempts: int = 0
    allocated_s: float = 0.0
    """Total time of their allocations, in seconds; an allocation with fewer nodes than requested counts
    proportionally."""


def refusal(spec: RunSpec, used: Used, step_s: float = 0.0) -> str:
    """Describe the cap that forbids another attempt; empty if none does.

    Args:
        step_s: Longest recent step of an allocation of full size, in seconds; 0 if unknown.
    """
    supervise = spec.supervise
    if supervise.max_total_attempts and used.attempts >= supervise.max_total_attempts:
        return f"supervise.max_total_attempts = {supervise.max_total_attempts}: {count(used.attempts, 'attempt')} made"
    for name, cap, units, unit in _hours(spec):
        left_s = cap * HOUR_S / units - used.allocated_s
        if left_s <= step_s + spec.slurm.save_lead_s + MARGIN_S:
            spent = f"{used.allocated_s * units / HOUR_S:.2f} {unit} used in {count(used.attempts, 'attempt')}"
            return f"supervise.{name} = {cap:g}: {spent}; the remaining time is too short to train and save"
    return ""


def time_limit_s(spec: RunSpec, used: Used, num_nodes: int = 0) -> int:
    """Time limit of the next attempt: ``resources.time_limit_s``, or the time that a cap leaves, whichever is shorter.

    Args:
        num_nodes: number of its nodes; 0 for as many as the run requests.
    """
    share = spec.resources.num_nodes / (num_nodes or spec.resources.num_nodes)
    left = [(cap * HOUR_S / units - used.allocated_s) * share for _, cap, units, _ in _hours(spec)]
    return max(1, math.floor(min([spec.resources.time_limit_s, *left])))


def _hours(spec: RunSpec) -> list[tuple[str, float, int, str]]:
    """List the caps that are set: name, hours, units per hour of an allocation, and the unit."""
    nodes = spec.resources.num_nodes
    caps = [
        ("max_gpu_hours", spec.supervise.max_gpu_hours, nodes * spec.resources.gpus_per_node, "GPU-hours"),
        ("max_node_hours", spec.supervise.max_node_hours, nodes, "node-hours"),
    ]
    return [one for one in caps if one[1]]
