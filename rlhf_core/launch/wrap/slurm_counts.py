"""Nodes, tasks and GPUs that the options of a Slurm job request. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.launch.wrap.draft import number


@dataclass(frozen=True)
class GpuRequest:
    """GPUs that one option requests."""

    count: int
    kind: str
    """Type, such as ``h100``; empty for any."""
    text: str
    """The request as given."""


def derived_nodes(options: Mapping[str, str]) -> int | None:
    """Number of nodes that follows from a total and a number per node, of tasks or of GPUs; None without both."""
    tasks, tasks_per_node = number(options.get("ntasks")) or 0, number(options.get("ntasks_per_node")) or 0
    gpus = {name: request.count for name, request in gpu_requests(options).items()}
    gpus_per_task = gpus.get("gpus_per_task", 0)
    total = gpus.get("gpus") or gpus_per_task * tasks
    per_node = gpus.get("gpus_per_node") or gpus.get("gres") or gpus_per_task * tasks_per_node
    for whole, part in ((tasks, tasks_per_node), (total, per_node)):
        if whole and part:
            return math.ceil(whole / part)
    return None


def tasks_per_node(options: Mapping[str, str], nodes: int) -> int | None:
    """Number of tasks on every node; None if it is not given, or not the same on all nodes."""
    total, most = number(options.get("ntasks")), number(options.get("ntasks_per_node"))
    if most:
        return min(most, total or most)  # next to a total, Slurm takes it as a maximum
    return total // nodes if total and total % nodes == 0 else None


def gpus_per_node(requests: Mapping[str, GpuRequest], nodes: int, tasks: int) -> tuple[str, int] | None:
    """Number of GPUs on every node, with the option that decides it; None as for tasks_per_node.

    Args:
        tasks: Tasks on every node.
    """
    for name in ("gpus_per_node", "gres", "gpus", "gpus_per_task"):
        if name not in requests:
            continue
        found = requests[name].count
        if name == "gpus":
            return (name, found // nodes) if found % nodes == 0 else None
        return name, found * tasks if name == "gpus_per_task" else found
    return None


def gpu_requests(options: Mapping[str, str]) -> dict[str, GpuRequest]:
    """Parse the options that request GPUs, by name; others, and values that are not understood, are left out."""
    found = {}
    for name in ("gpus_per_node", "gpus", "gpus_per_task"):
        kind, _, text = options.get(name, "").rpartition(":")
        count = number(text)
        if count:
            found[name] = GpuRequest(count, kind, options[name])
    for resource in options.get("gres", "").split(","):
        request = _gpus_of(resource)
        if request:
            found["gres"] = request
    return found


def other_resources(gres: str) -> list[str]:
    """Resources of a ``--gres`` that are not GPUs."""
    return [resource for resource in gres.split(",") if resource and not _gpus_of(resource)]


def _gpus_of(resource: str) -> GpuRequest | None:
    name, *parts = resource.split(":")
    count = number(parts[-1]) if parts else 1
    if name not in ("gpu", "gres/gpu") or not count:
        return None
    return GpuRequest(count, parts[0] if len(parts) > 1 else "", resource)
