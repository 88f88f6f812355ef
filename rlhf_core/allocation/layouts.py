"""Layouts of trainer ranks and rollout engines: which ones divide, and the nearest that do. Pure arithmetic."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhf_core.schemas.rollouts import EVEN_HEADS, uneven_heads

_NAMED = 3
"""Layouts that are named beside one that does not divide."""


@dataclass(frozen=True)
class Layout:
    """Trainer ranks and rollout engines over all nodes."""

    trainers: int
    engines: int = 0
    """Engines in processes of their own; 0 where the trainers sample."""
    tensor_parallel: int = 1
    """GPUs of each engine, or of each trainer rank's engine where these sample."""

    def __str__(self) -> str:
        split = f" of {self.tensor_parallel} GPUs each" if self.tensor_parallel > 1 else ""
        engines = f"{self.engines} engine{'' if self.engines == 1 else 's'}{split}" if self.engines else ""
        trainers = f"{self.trainers} trainer{'' if self.trainers == 1 else 's'}"
        return f"{trainers} + {engines}" if engines else f"{trainers} that sample themselves"


@dataclass(frozen=True)
class Cluster:
    """Nodes of an attempt, and what a layout must divide."""

    num_nodes: int
    gpus_per_node: int
    """0 on CPU, where as many processes fit as are asked for."""
    rows: Mapping[str, int]
    """Rows of a step by loop; each is dealt evenly to the trainers."""
    num_heads: int | None = None
    """Attention heads of the model; None where they are not known."""
    num_kv_heads: int | None = None
    """Key-value heads, likewise."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True)
class Problem:
    """Reason why a layout is refused."""

    found: str
    expected: str


def problems(layout: Layout, cluster: Cluster) -> list[Problem]:
    """Reasons against a layout; empty if it divides."""
    return [
        *_uneven_batch(layout, cluster),
        *_uneven_nodes(layout, cluster),
        *_uneven_engines(layout),
        *_uneven_heads(layout, cluster),
        *_too_few_gpus(layout, cluster),
    ]


def nearest(layout: Layout, cluster: Cluster, number: int = _NAMED) -> list[Layout]:
    """Layouts that divide, nearest first: as few ranks, engines and GPUs of an engine changed as possible."""

    def distance(other: Layout) -> tuple[int, int]:
        changed = abs(other.trainers - layout.trainers) + abs(other.engines - layout.engines)
        return changed + 2 * abs(other.tensor_parallel - layout.tensor_parallel), -other.trainers

    same_kind = [
        one
        for one in layouts(cluster, layout.trainers + layout.engines + 1)
        if bool(one.engines) == bool(layout.engines)
    ]
    return sorted(same_kind, key=distance)[:number]


def layouts(cluster: Cluster, most: int = 0) -> Iterator[Layout]:
    """Every layout that divides, and uses all GPUs or fewer.

    Args:
        most: processes at most where there are no GPUs to count.
    """
    room = cluster.num_gpus or most
    for trainers in range(cluster.num_nodes, room + 1, cluster.num_nodes):
        splits = [width for width in (1, 2, 4, 8) if width <= (cluster.gpus_per_node or 1)]
        found = [Layout(trainers)]
        found += [
            Layout(trainers, engines, width) for width in splits for engines in range(1, (room - trainers) // width + 1)
        ]
        yield from (one for one in found if not problems(one, cluster))


def _uneven_batch(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    for loop, rows in cluster.rows.items():
        if rows % layout.trainers:
            divisors = [count for count in range(1, rows + 1) if rows % count == 0]
            below = max(count for count in divisors if count <= layout.trainers)
            above = min((count for count in divisors if count > layout.trainers), default=below)
            yield Problem(
                f"{rows} rows of a step of loops.{loop} for {layout.trainers} trainers",
                f"a number of trainers that divides them, as {below} or {above}: else ranks wait for one with more",
            )


def _uneven_nodes(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    if layout.trainers % cluster.num_nodes:
        yield Problem(
            f"{layout.trainers} trainers on {cluster.num_nodes} nodes", "the same number of trainers on every node"
        )
    if layout.engines > cluster.num_nodes and layout.engines % cluster.num_nodes:
        yield Problem(
            f"{layout.engines} engines on {cluster.num_nodes} nodes",
            "the same number of engines on each node, or at most one a node",
        )


def _uneven_engines(layout: Layout) -> Iterator[Problem]:
    few, many = sorted((layout.trainers, layout.engines))
    if few and many % few:
        yield Problem(
            f"{layout.trainers} trainers against {layout.engines} engines",
            "one number that divides the other: else some engines sample for more trainers than others, and each step "
            "waits for them",
        )


def _uneven_heads(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    width = layout.tensor_parallel
    if uneven := uneven_heads(cluster.num_heads, cluster.num_kv_heads, width):
        yield Problem(f"{uneven} over {width} GPUs of an engine", EVEN_HEADS)


def _too_few_gpus(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    if not cluster.gpus_per_node:
        return
    engines = -(-layout.engines // cluster.num_nodes)
    trainers = -(-layout.trainers // cluster.num_nodes)
    asked = trainers + engines * layout.tensor_parallel
    if asked > cluster.gpus_per_node:
        yield Problem(
            f"{trainers} trainers and {engines} engines of {layout.tensor_parallel} GPUs on a node with "
            f"{cluster.gpus_per_node}",
            "a GPU for every trainer and every part of an engine",
        )
