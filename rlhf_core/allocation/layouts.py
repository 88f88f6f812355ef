"""Layouts of trainer ranks and rollout engines: the valid ones, and the nearest to an invalid one. Pure arithmetic."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhf_core.schemas.rollouts import EVEN_HEADS, uneven_heads

_NAMED = 3
"""Number of valid layouts that are named next to an invalid one."""


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
        alone = f" on {_counted(self.engine_nodes, 'node')} of their own" if self.engine_nodes else ""
        trainers = _counted(self.trainers, "trainer")
        if not self.engines:
            return f"{trainers} with in-process sampling"
        return f"{trainers} + {_counted(self.engines, 'engine')}{split}{alone}"


@dataclass(frozen=True)
class Cluster:
    """Nodes of an attempt, and the numbers that a layout must divide."""

    num_nodes: int
    gpus_per_node: int
    """0 on CPU, where any number of processes fits."""
    rows: Mapping[str, int]
    """Rows of a step by loop; each loop's rows are distributed evenly among the trainers."""
    num_heads: int | None = None
    """Attention heads of the model; None if unknown."""
    num_kv_heads: int | None = None
    """Key-value heads; None if unknown."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    def trainer_nodes(self, layout: Layout) -> int:
        """Nodes that train in a layout."""
        return self.num_nodes - layout.engine_nodes


@dataclass(frozen=True)
class Problem:
    """Reason why a layout is refused."""

    found: str
    expected: str


def problems(layout: Layout, cluster: Cluster) -> list[Problem]:
    """Reasons against a layout; empty if it is valid."""
    if cluster.trainer_nodes(layout) < 1:
        return [Problem(f"{layout} of {_counted(cluster.num_nodes, 'node')}", "at least one training node")]
    return [
        *_uneven_batch(layout, cluster),
        *_uneven_nodes(layout, cluster),
        *_uneven_engines(layout),
        *_uneven_heads(layout, cluster),
        *_too_few_gpus(layout, cluster),
    ]


def nearest(layout: Layout, cluster: Cluster) -> list[Layout]:
    """Valid layouts, nearest first: those that change the numbers of ranks, engines and GPUs per engine the least."""

    def distance(other: Layout) -> tuple[int, int]:
        changed = abs(other.trainers - layout.trainers) + abs(other.engines - layout.engines)
        split, moved = other.tensor_parallel - layout.tensor_parallel, other.engine_nodes - layout.engine_nodes
        return changed + 2 * abs(split) + 2 * abs(moved), -other.trainers

    same_kind = [
        one
        for one in layouts(cluster, layout.trainers + layout.engines + 1)
        if bool(one.engines) == bool(layout.engines) and bool(one.engine_nodes) == bool(layout.engine_nodes)
    ]
    return sorted(same_kind, key=distance)[:_NAMED]


def layouts(cluster: Cluster, most: int = 0) -> Iterator[Layout]:
    """Every valid layout that uses all GPUs or fewer.

    Args:
        most: maximum number of processes if there are no GPUs to count.
    """
    room, gpus = cluster.num_gpus or most, cluster.gpus_per_node
    splits = [width for width in (1, 2, 4, 8) if width <= (gpus or 1)]
    for alone in range(cluster.num_nodes):
        training = cluster.num_nodes - alone
        for trainers in range(training, (training * gpus or room) + 1, training):
            if any(rows % trainers for rows in cluster.rows.values()):
                continue  # invalid for any number of engines: this skips most layouts of a large cluster
            left = alone * gpus or room - trainers
            found = [] if alone else [Layout(trainers)]
            found += [
                Layout(trainers, engines, width, alone)
                for width in splits
                for engines in range(alone or 1, left // width + 1, alone or 1)
            ]
            yield from (one for one in found if not problems(one, cluster))


def _uneven_batch(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    training = cluster.trainer_nodes(layout)
    most = training * cluster.gpus_per_node
    for loop, rows in cluster.rows.items():
        if rows % layout.trainers:
            possible = range(training, (min(rows, most) if most else rows) + 1, training)
            fitting = [count for count in possible if rows % count == 0]
            closest = sorted(sorted(fitting, key=lambda count: abs(count - layout.trainers))[:2])
            expected = f"a multiple of {layout.trainers} rows: no number of trainers on these nodes divides {rows}"
            if closest:
                expected = (
                    f"a number of trainers that divides them, such as {' or '.join(map(str, closest))}: otherwise "
                    "ranks wait for the fullest one"
                )
            yield Problem(f"{rows} rows of a step of loops.{loop} for {layout.trainers} trainers", expected)


def _uneven_nodes(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    training, alone = cluster.trainer_nodes(layout), layout.engine_nodes
    if layout.trainers % training:
        yield Problem(f"{layout.trainers} trainers on {training} nodes", "the same number of trainers on every node")
    if alone and (not layout.engines or layout.engines % alone):
        yield Problem(f"{layout.engines} engines on {alone} nodes of their own", "the same number of engines on each")
    elif not alone and layout.engines > cluster.num_nodes and layout.engines % cluster.num_nodes:
        yield Problem(
            f"{layout.engines} engines on {cluster.num_nodes} nodes",
            "the same number of engines on each node, or at most one per node",
        )


def _uneven_engines(layout: Layout) -> Iterator[Problem]:
    few, many = sorted((layout.trainers, layout.engines))
    if few and many % few:
        yield Problem(
            f"{layout.trainers} trainers against {layout.engines} engines",
            "one number that divides the other: otherwise some engines serve more trainers than others, and each "
            "step waits for them",
        )


def _uneven_heads(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    width = layout.tensor_parallel
    if uneven := uneven_heads(cluster.num_heads, cluster.num_kv_heads, width):
        yield Problem(f"{uneven} over {width} GPUs of an engine", EVEN_HEADS)


def _too_few_gpus(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    if not cluster.gpus_per_node:
        return
    engines = -(-layout.engines // (layout.engine_nodes or cluster.num_nodes))
    trainers = -(-layout.trainers // cluster.trainer_nodes(layout))
    of_trainers = _counted(trainers, "trainer")
    of_engines = f"{_counted(engines, 'engine')} of {_counted(layout.tensor_parallel, 'GPU')}"
    on_a_node = {f"{of_trainers} and {of_engines}": trainers + engines * layout.tensor_parallel}
    if layout.engine_nodes:
        on_a_node = {of_trainers: trainers, of_engines: engines * layout.tensor_parallel}
    for processes, requested in on_a_node.items():
        if requested > cluster.gpus_per_node:
            yield Problem(
                f"{processes} on a node with {cluster.gpus_per_node}",
                "a GPU for every trainer and every part of an engine",
            )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
