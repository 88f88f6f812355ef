"""Layouts of trainer ranks and rollout engines that divide, to propose instead of another. Pure arithmetic.

Preflight decides about the layout of a run: the checks ``batch``, ``rollout.engines`` and ``resources.gpus``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_core.schemas.rollouts import MOST_IDLE, idle_share, uneven_heads
from rlhf_core.text.formatting import count

_NAMED = 3
"""Number of layouts that are named instead of one that does not divide."""


@dataclass(frozen=True)
class Layout:
    """Trainer ranks and rollout engines over all nodes."""

    trainers: int
    engines: int = 0
    """Engines in separate processes; 0 if the trainers sample."""
    tensor_parallel: int = 1
    """GPUs of each engine, or of each trainer rank's engine if the trainers sample."""
    engine_nodes: int = 0
    """Nodes that have only engines (``rollout.nodes``); 0 if engines share the nodes of the trainers."""

    def __str__(self) -> str:
        split = f" of {self.tensor_parallel} GPUs each" if self.tensor_parallel > 1 else ""
        alone = f" on {count(self.engine_nodes, 'node')} of their own" if self.engine_nodes else ""
        trainers = count(self.trainers, "trainer")
        if not self.engines:
            return f"{trainers} with in-process sampling"
        return f"{trainers} + {count(self.engines, 'engine')}{split}{alone}"


@dataclass(frozen=True)
class Cluster:
    """Nodes of an attempt, and the numbers that a layout must divide."""

    num_nodes: int
    gpus_per_node: int
    """0 on CPU, where any number of processes fits."""
    rows: frozenset[int] = frozenset()
    """Rows of a step of each loop, which are distributed evenly among the trainers; times the trainers that share each,
    if they are not sampled from."""
    prompts: frozenset[int] = frozenset()
    """Prompts of a step of each loop that samples, which are dealt to the engines."""
    num_heads: int | None = None
    """Attention heads of the model; None if unknown."""
    num_kv_heads: int | None = None
    """Key-value heads; None if unknown."""
    ranks_per_row: int = 1
    """Trainers that share each sequence (``trainer.sequence_parallel``)."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node


def nearest(layout: Layout, cluster: Cluster) -> list[Layout]:
    """Layouts that divide, nearest first: those that change the numbers of ranks, engines and GPUs per engine the
    least. Empty if the layout itself is one of them."""

    def distance(other: Layout) -> tuple[int, int]:
        changed = abs(other.trainers - layout.trainers) + abs(other.engines - layout.engines)
        split, moved = other.tensor_parallel - layout.tensor_parallel, other.engine_nodes - layout.engine_nodes
        return changed + 2 * abs(split) + 2 * abs(moved), -other.trainers

    same_kind = [
        one
        for one in layouts(cluster, layout.trainers + layout.engines + 1)
        if bool(one.engines) == bool(layout.engines) and bool(one.engine_nodes) == bool(layout.engine_nodes)
    ]
    return [] if layout in same_kind else sorted(same_kind, key=distance)[:_NAMED]


def layouts(cluster: Cluster, most: int = 0) -> Iterator[Layout]:
    """Every layout that divides and uses all GPUs or fewer.

    Args:
        most: maximum number of processes if there are no GPUs to count.
    """
    room, gpus = cluster.num_gpus or most, cluster.gpus_per_node
    splits = [width for width in (1, 2, 4, 8) if width <= (gpus or 1)]
    for alone in range(cluster.num_nodes):
        training = cluster.num_nodes - alone
        for trainers in range(training, (training * gpus or room) + 1, training):
            if trainers % cluster.ranks_per_row or any(rows % trainers for rows in cluster.rows):
                continue
            left = alone * gpus or room - trainers
            found = [] if alone else [Layout(trainers)]
            found += [
                Layout(trainers, engines, width, alone)
                for width in splits
                for engines in range(alone or 1, left // width + 1, alone or 1)
            ]
            yield from (one for one in found if _engines_divide(one, cluster) and _has_its_gpus(one, cluster))


def _engines_divide(layout: Layout, cluster: Cluster) -> bool:
    """True if the nodes have the same number of engines, or at most one each, and the engines as many prompts; and if
    the heads divide over the GPUs of an engine."""
    nodes = layout.engine_nodes or cluster.num_nodes
    return (
        (layout.engines <= nodes or layout.engines % nodes == 0)
        and not (layout.engines and any(idle_share(each, layout.engines) > MOST_IDLE for each in cluster.prompts))
        and not uneven_heads(cluster.num_heads, cluster.num_kv_heads, layout.tensor_parallel)
    )


def _has_its_gpus(layout: Layout, cluster: Cluster) -> bool:
    """True if every process has a GPU, or there are none."""
    trainers = layout.trainers // (cluster.num_nodes - layout.engine_nodes)
    engines = -(-layout.engines // (layout.engine_nodes or cluster.num_nodes)) * layout.tensor_parallel
    needed = max(trainers, engines) if layout.engine_nodes else trainers + engines
    return needed <= cluster.gpus_per_node or not cluster.gpus_per_node
