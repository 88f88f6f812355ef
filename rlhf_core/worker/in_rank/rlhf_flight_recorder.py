"""Contents of torch's flight recorders in this process, and its process groups.

Uses the standard library alone and works with Python 3.8: the ranks of external trainers load it, too.
"""

import json
import sys

_MODULE = "torch._C._distributed_c10d"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of that module, each for one recorder: NCCL keeps its own, and torch without CUDA has only the other."""


def dumps(part):  # type: ignore[no-untyped-def]  # untyped: must run on Python 3.8
    """Contents of the recorders that have this part, ``entries`` or ``pg_status``, NCCL's first."""
    for name in _DUMPS:
        dump = getattr(sys.modules.get(_MODULE), name, None)
        if dump is not None:
            found = json.loads(dump(includeCollectives=part == "entries", onlyActive=False))
            if found.get(part):
                yield found


def contents() -> str:
    """All recorders, this process's rank in the default group, and the members of each of its groups by name, as JSON.

    The recorders do not tell the members, except NCCL's. Groups that are in no list of torch, such as those between a
    trainer and its rollout engines, number their ranks in their own way and are left out.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return "{}"
    world = distributed._world  # private, but the only list of all groups
    members = {
        world.pg_names[group]: sorted(ranks, key=ranks.get)
        for group, ranks in list(world.pg_group_ranks.items())  # the main thread may add groups meanwhile
        if group in world.pg_names  # else it stands for all groups without this process
    }
    return json.dumps({"recorders": list(dumps("entries")), "rank": distributed.get_rank(), "groups": members})
