"""Events for starts and exits of a node's workers."""

from collections.abc import Collection

from pydantic import JsonValue

from rlhf_core.schemas.attempts import Role
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import Exit, Started


def log_start(events: EventLog, role: Role, workers: Collection[Started], generation: int | None = None) -> None:
    """Log a start of workers.

    Args:
        generation: Start number of the group; None for the group whose restarts are counted.
    """
    listed = ", ".join(f"rank {worker.rank} = pid {worker.pid}" for worker in workers)
    data: dict[str, JsonValue] = {
        "ranks": {str(worker.local_rank): worker.rank for worker in workers},
        "pids": {str(worker.local_rank): worker.pid for worker in workers},
    }
    what = "workers started"
    if generation is not None:
        what, data["generation"] = f"workers of {role} started, generation {generation}", generation
    events.add("workers_started", f"{what}: {listed}", role, **data)


def log_exit(events: EventLog, role: Role, worker: Started, end: Exit, generation: int | None = None) -> None:
    """Log an exit; for ``generation`` see :func:`log_start`."""
    how = f"exit code {end.code}" if end.code >= 0 else f"signal {-end.code}"
    by_agent = ", ended by the agent" if end.by_agent else ""
    of_role = "" if generation is None else f" of {role}"
    message = f"rank {worker.rank}{of_role} ended with {how}{by_agent}"
    data: dict[str, JsonValue] = {"rank": worker.rank, "pid": worker.pid, "code": end.code}
    if generation is not None:
        data["generation"] = generation
    events.add("worker_exited", message, None if generation is None else role, **data)
