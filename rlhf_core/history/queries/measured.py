"""Step time and memory of earlier runs of a shape, for comparison with predictions."""

from collections import defaultdict
from statistics import median
from typing import Any, TypedDict

from sqlalchemy import Connection, exists, func, select

from rlhf_core.history.queries.baselines import newest_completed
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.sqlalchemy_core import ATTEMPTS, CURVE, FIGURES, NODES, RUNS

_MEMORY = ("workers_rss_gb", *(f"gpu{index}_memory_used_gb" for index in range(8)))


class MeasuredShape(TypedDict, total=False):
    """Step time and memory of runs of one shape; empty without a history."""

    runs: list[str]
    """Ids, newest first."""
    seconds: dict[str, float]
    """By ``time/...`` metric, the median over the runs of the median of their steps of the main loop."""
    workers_gb: float | None
    """Peak main memory of the workers of a node, in GiB, of means over some seconds; None if not measured."""
    gpu_gb: float | None
    """Peak memory of a GPU, likewise."""


def measured_shape(store: HistoryStore, shape: str, engine_nodes: int = 0) -> MeasuredShape:
    """Read step time and memory of the newest completed runs of a shape, without trials.

    Args:
        engine_nodes: number of last nodes of each attempt with only rollout engines (``rollout.nodes`` of the shape),
            which are excluded from the memory of trainers.
    """
    with store.reading() as connection:
        newest = newest_completed(shape).where(RUNS.c.trial_of == "")
        runs = [str(run_id) for run_id in connection.execute(newest).scalars()]
        peaks = _peaks(connection, runs, engine_nodes)
        of_gpus = [value for key, value in peaks.items() if key != "workers_rss_gb"]
        return {
            "runs": runs,
            "seconds": _seconds(connection, runs),
            "workers_gb": peaks.get("workers_rss_gb"),
            "gpu_gb": max(of_gpus, default=None),
        }


def _seconds(connection: Connection, runs: list[str]) -> dict[str, float]:
    of_runs: dict[str, list[float]] = defaultdict(list)
    for run_id in runs:
        warm_start = select(RUNS.c.spec).where(RUNS.c.run_id == run_id)
        first = _warm_start_steps(connection.execute(warm_start).scalar_one())
        query = select(CURVE.c.key, CURVE.c.value).where(
            CURVE.c.run_id == run_id, CURVE.c.key.like("time/%"), CURVE.c.step > first, CURVE.c.value.is_not(None)
        )
        steps: dict[str, list[float]] = defaultdict(list)
        for key, value in connection.execute(query):
            steps[key].append(value)
        for key, values in steps.items():
            of_runs[key].append(median(values))
    return {key: median(values) for key, values in sorted(of_runs.items())}


def _warm_start_steps(spec: dict[str, Any]) -> int:
    warm_start = (spec.get("loops") or {}).get("warm_start") or {}
    return int(warm_start.get("num_steps", 0))


def _peaks(connection: Connection, runs: list[str], engine_nodes: int) -> dict[str, float]:
    query = (
        select(FIGURES.c.key, func.max(FIGURES.c.value))
        .where(FIGURES.c.run_id.in_(runs), FIGURES.c.key.in_(_MEMORY))
        .group_by(FIGURES.c.key)
    )
    if engine_nodes:
        of_engines = exists().where(
            NODES.c.run_id == FIGURES.c.run_id,
            NODES.c.attempt == FIGURES.c.attempt,
            NODES.c.node == FIGURES.c.node,
            ATTEMPTS.c.run_id == NODES.c.run_id,
            ATTEMPTS.c.number == NODES.c.attempt,
            NODES.c.node_index >= ATTEMPTS.c.num_nodes - engine_nodes,
        )
        query = query.where(~of_engines)
    return {key: float(value) for key, value in connection.execute(query)}
