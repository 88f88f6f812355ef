"""Schedulers, behind one interface. submitit lives here and nowhere else."""

from rlhf_core.errors import BadInput
from rlhf_core.scheduler.base import JobRequest, JobState, JobStatus, Scheduler

__all__ = ["JobRequest", "JobState", "JobStatus", "Scheduler", "get_scheduler"]


def get_scheduler(name: str) -> Scheduler:
    """The scheduler of that name; imports its library only now.

    Raises:
        BadInput: there is none of that name.
    """
    if name == "local":
        from rlhf_core.scheduler.local import LocalScheduler

        return LocalScheduler()
    if name == "slurm":
        from rlhf_core.scheduler.slurm import SlurmScheduler

        return SlurmScheduler()
    raise BadInput(f"RLHF_SCHEDULER={name} is no scheduler; use local or slurm")
