"""Job requests of tests, with the same number of trainer ranks on each node."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.resources import GroupPlan, Placement, in_order


def run_id_of(folder: Path) -> str:
    """A run id for each test: jobs are found by their run, and other tests may be running."""
    return f"toy-20260101-000000-{zlib.crc32(str(folder).encode()) & 0xFFFFFF:06x}"


def job_request(
    scheduler_dir: Path,
    *command: str,
    run_id: str,
    num_ranks: int = 1,
    placed: dict[str, Any] | None = None,
    **options: Any,
) -> JobRequest:
    """A job request with a time limit of a few minutes.

    Args:
        command: the command that runs on each node.
        num_ranks: number of ranks on each node.
        placed: fields of the placement.
        options: other fields of the request.
    """
    given = {"attempt": 1, "num_nodes": 1, **(placed or {})}
    phases = in_order(GroupPlan.on_all_nodes(Role.TRAINER, num_ranks, given["num_nodes"]))
    plain = JobRequest(
        run_id=run_id,
        placement=Placement(phases=phases, **given),
        scheduler_dir=scheduler_dir,
        command=command,
        cpus_per_node=1,
        memory_gb=0.0,
        time_limit_s=600,
    )
    return replace(plain, **options)
