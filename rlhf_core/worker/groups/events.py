"""Events for starts and exits of workers."""

from collections.abc import Sequence
from functools import partial

from pydantic import JsonValue

from rlhf_core.schemas.attempts import Role
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import Exit, Started


class GroupEvents:
    """Logs starts and exits of a node's workers."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def started(self, role: Role, workers: Sequence[Started], generation: int | None = None) -> None:
        """Log a start.

        Args:
            generation: Start number of the group; None for the group whose restarts are counted.
        """
        listed = ", ".join(f"rank {worker.rank} = pid {worker.pid}" for worker in workers)
        ranks: dict[str, JsonValue] = {str(worker.local_rank): worker.rank for worker in workers}
        pids: dict[str, JsonValue] = {str(worker.local_rank): worker.pid for worker in workers}
        if generation is None:
            self._events.add("workers_started", f"workers started: {listed}", role, ranks=ranks, pids=pids)
        else:
            message = f"workers of {role} started, generation {generation}: {listed}"
            self._events.add("workers_started", message, role, ranks=ranks, pids=pids, generation=generation)

    def exited(self, role: Role, worker: Started, end: Exit, generation: int | None = None) -> None:
        """Log an exit; for ``generation`` see :meth:`started`."""
        how = f"exit code {end.code}" if end.code >= 0 else f"signal {-end.code}"
        by_agent = ", ended by the agent" if end.by_agent else ""
        of_role = "" if generation is None else f" of {role}"
        message = f"rank {worker.rank}{of_role} ended with {how}{by_agent}"
        of_start: dict[str, JsonValue] = {} if generation is None else {"generation": generation}
        own_role = None if generation is None else role
        add = partial(self._events.add, "worker_exited", message, own_role, **of_start)
        add(rank=worker.rank, pid=worker.pid, code=end.code)
