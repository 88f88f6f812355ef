"""Number of nodes of an attempt: as many as the run requests, or as many as the cluster has (``resources.min_nodes``).

Busy nodes are counted, because a job waits for them. Nodes that are out of service or excluded are not. Nodes that the
cluster does not have are dropped from the exclusions: Slurm refuses a job that names one.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.allocation.planner import shortages
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import Inventory
from rlhf_core.schemas.run import RunSpec


@dataclass(frozen=True)
class Size:
    """Nodes of one attempt."""

    num_nodes: int
    excluded: Mapping[str, str]
    """Nodes to exclude, with the reasons."""
    spared: Sequence[str] = ()
    """Suspect nodes that are not excluded, because too few nodes would be left."""
    reason: str = ""
    """Reason for fewer nodes than the run requests; empty if it gets all of them."""


def size_of(
    spec: RunSpec, slurm: SlurmSpec, inventory: Inventory, excluded: Mapping[str, str], new_suspects: Collection[str]
) -> Size:
    """Choose the number of nodes of the next attempt, and the suspects to exclude.

    A new suspect is excluded from at least one attempt. After that it is used again if the attempt would be smaller
    without it: it may have been repaired. If not even the minimum number of nodes is available, the job waits for all
    of them, as without ``resources.min_nodes``, and the oldest suspects are used again.

    Args:
        slurm: options of its job, those of the site included.
        excluded: nodes to exclude, with the reasons, oldest suspects first.
        new_suspects: those of them that no attempt has excluded yet.
    """
    excluded = {node: why for node, why in excluded.items() if node in inventory.node_names}
    possible = spec.possible_nodes
    best = _largest(possible, len(usable_nodes(spec, slurm, inventory, new_suspects)))
    for kept in _ever_fewer(excluded, new_suspects) if len(possible) > 1 else ():
        size = _largest(possible, len(usable_nodes(spec, slurm, inventory, kept)))
        if size and size >= best:
            spared = [node for node in excluded if node not in kept]
            return Size(size, kept, spared, _reason(spec, slurm, inventory, kept, size))
    kept, spared = dict(excluded), []
    while kept and shortages(spec.resources, slurm, inventory, tuple(kept)):
        spared.append(next(iter(kept)))
        del kept[spared[-1]]
    return Size(spec.resources.num_nodes, kept, spared)


def usable_nodes(spec: RunSpec, slurm: SlurmSpec, inventory: Inventory, excluded: Collection[str]) -> list[str]:
    """Nodes that a job of the run may get, now or once they are no longer busy."""
    fitting = inventory.nodes_for(slurm, spec.resources.gpus_per_node)
    return [name for name in fitting if name not in excluded and name not in inventory.out_of_service]


def _ever_fewer(excluded: Mapping[str, str], new_suspects: Collection[str]) -> Iterator[dict[str, str]]:
    """The exclusions, then with one fewer each time, dropping the oldest first; new suspects stay excluded."""
    kept = dict(excluded)
    yield dict(kept)
    for node in [node for node in excluded if node not in new_suspects]:
        del kept[node]
        yield dict(kept)


def _largest(possible: Sequence[int], available: int) -> int:
    """The largest possible number of nodes that is available; 0 if there is none."""
    return next((number for number in possible if number <= available), 0)


def _reason(spec: RunSpec, slurm: SlurmSpec, inventory: Inventory, excluded: Mapping[str, str], size: int) -> str:
    if size == spec.resources.num_nodes:
        return ""
    states = {**inventory.out_of_service, **dict.fromkeys(excluded, "excluded")}
    fitting = inventory.nodes_for(slurm, spec.resources.gpus_per_node)
    lacking = [f"{node} is {states[node]}" for node in fitting if node in states]
    why = f" ({', '.join(lacking[:8])})" if lacking else ""
    return (
        f"the cluster cannot give {spec.resources.num_nodes} nodes{why}: continuing with {size}, at least "
        f"resources.min_nodes = {spec.resources.min_nodes}; the global batch is unchanged"
    )
