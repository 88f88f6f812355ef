"""GPU visibility of a group's workers."""

import os
from collections.abc import Mapping

from rlhf_core.machine.gpus import HIP_VARIABLE, VISIBLE_VARIABLE, numbered_gpus
from rlhf_core.schemas.resources import GroupPlan


def gpus_of(plan: GroupPlan, local_rank: int) -> tuple[int, ...]:
    """GPUs that one worker uses, out of its group's GPUs on the node: an equal share if workers restart individually,
    otherwise the GPU with its local rank."""
    if not plan.gpus:
        return ()
    share = max(1, len(plan.gpus) // plan.workers_per_node) if plan.restart == "alone" else 1
    first = local_rank * share % len(plan.gpus)
    return plan.gpus[first : first + share]


def visible_gpus(
    plan: GroupPlan, gpus_per_node: int, local_rank: int | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Environment variables that limit a worker to its GPUs; empty if it may see all GPUs of the node's allocation.

    Args:
        plan: Its group.
        gpus_per_node: Number of GPUs allocated on the node.
        local_rank: Local rank of an individually restarted worker, which gets its share of the group's GPUs; None if
            all workers of the group see the same GPUs.
        environment: The agent's environment, in which the scheduler may have listed the allocated GPUs.
    """
    gpus = plan.gpus if local_rank is None else gpus_of(plan, local_rank)
    if not gpus or gpus == tuple(range(gpus_per_node)):
        return {}
    given = numbered_gpus(environment)
    names = [name.strip() for name in given.split(",")] if given else []
    listed = ",".join(names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus)
    # HIP prefers its own variable, and torch counts by no other one beside ROCR_VISIBLE_DEVICES. Slurm may set that for
    # NVIDIA's GPUs too, but then together with CUDA's.
    is_amd = given and (environment.get(HIP_VARIABLE) or not environment.get(VISIBLE_VARIABLE))
    return {VISIBLE_VARIABLE: listed} | ({HIP_VARIABLE: listed} if is_amd else {})
