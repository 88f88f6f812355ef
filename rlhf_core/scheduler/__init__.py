"""Schedulers behind one interface. Only this package imports submitit."""

from rlhf_core.errors import BadInput
from rlhf_core.scheduler.base import JobRequest, JobState, JobStatus, Scheduler

__all__ = ["JobRequest", "JobState", "JobStatus", "Scheduler", "get_scheduler"]


def get_scheduler(name: str) -> Scheduler:
    """The scheduler of that name. Imports its library lazily.

    Raises:
        BadInput: no scheduler has that name.
    """
    if name == "local":
        from rlhf_core.scheduler.local import LocalScheduler

        return LocalScheduler()
    if name == "slurm":
        from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler

        return SlurmScheduler()
    raise BadInput(f"RLHF_SCHEDULER={name} is not a scheduler; use local or slurm")
