"""A worker group with a single worker whose process exists already."""

import time
from pathlib import Path

from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.groups.base import GroupSeat, Started, WorkerGroup


class GivenProcess(WorkerGroup):
    """Worker group for a test."""

    def __init__(self, plan: GroupPlan, pid: int, folder: RestartDir | Path, seat: GroupSeat) -> None:
        super().__init__(plan, 0, seat)
        self._pid = pid
        self._folder = folder if isinstance(folder, RestartDir) else RestartDir(folder, 1, 0)

    def start(self) -> None:
        """Use the given process as the worker, with what its slot has already."""
        self.workers = {0: self._start_worker(0)}
        self.started = True

    def _start_worker(self, local_rank: int) -> Started:
        return Started(local_rank, 0, self._pid, time.monotonic_ns(), oom_kills_before=0)

    def folder(self, local_rank: int) -> RestartDir:
        """The folder that was given."""
        return self._folder
