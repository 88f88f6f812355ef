"""The GPUs that the workers of a group see."""

import os
from collections.abc import Mapping

from rlhf_core.schemas.resources import GroupPlan

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def gpus_of(plan: GroupPlan, local_rank: int) -> tuple[int, ...]:
    """GPUs that one worker computes on, of those that its group has on the node: an equal share where it is restarted
    alone, otherwise the one of its number."""
    if not plan.gpus:
        return ()
    share = max(1, len(plan.gpus) // plan.workers_per_node) if plan.restart == "alone" else 1
    first = local_rank * share % len(plan.gpus)
    return plan.gpus[first : first + share]


def visible_gpus(
    plan: GroupPlan, gpus_per_node: int, local_rank: int | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Environment variables that show a worker its GPUs; nothing where it may see all that the node was given.

    Args:
        plan: Its group.
        gpus_per_node: GPUs of the allocation on the node.
        local_rank: Of a worker that is restarted alone, which gets its share of the group's GPUs; None where all
            workers of the group see the same.
        environment: That of the agent, in which the scheduler may have named the GPUs of the allocation.
    """
    gpus = plan.gpus if local_rank is None else gpus_of(plan, local_rank)
    if not gpus or gpus == tuple(range(gpus_per_node)):
        return {}
    given = environment.get(VISIBLE_VARIABLE, "")
    names = [name.strip() for name in given.split(",")] if given else []
    return {VISIBLE_VARIABLE: ",".join(names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus)}
