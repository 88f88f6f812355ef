"""Common interface of all schedulers.

A missing answer does not mean that a job ended: its state is then ``UNKNOWN``, and the caller keeps the last known one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rlhf_core.machine.gpus import HIDDEN_FROM_HIP, HIP_VARIABLE, VISIBLE_VARIABLE
from rlhf_core.scheduler.passed_environment import PassedEnvironment
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import JOB_VARIABLE, PASSED_VARIABLE, Inventory, Placement, Submission, job_marker


class JobState(StrEnum):
    """State of a job, as far as its scheduler knows."""

    PENDING = "pending"
    """Accepted; waits for nodes."""
    RUNNING = "running"
    """Its agents are running."""
    ENDED = "ended"
    """No part of it is running any more. Its result is in ``outcome.json``."""
    UNKNOWN = "unknown"
    """The scheduler did not answer, or cannot know from this host. Says nothing about the job."""


@dataclass(frozen=True)
class JobStatus:
    """A scheduler's answer about one job."""

    state: JobState
    """State of the job."""
    reason: str = ""
    """Reason for the state, from the scheduler or as a sentence: the cause of the wait or of the end."""
    nodes: tuple[str, ...] = ()
    """Nodes allocated to the job."""
    scheduler_state: str = ""
    """The scheduler's own name for the state, for instance ``NODE_FAIL``; the classifier reads it."""
    lost_nodes: tuple[str, ...] = ()
    """Failed nodes that made the job end."""
    needs_action: bool = False
    """True for a pending job that will not start before its user or an administrator changes something."""


@dataclass(frozen=True)
class JobRequest:
    """An attempt ready for submission."""

    run_id: str
    """The run."""
    placement: Placement
    """Number of the attempt, nodes, GPUs, exclusions."""
    scheduler_dir: Path
    """Folder for the scheduler's own files (script, output of the agents), and working folder of the job."""
    command: tuple[str, ...]
    """Command line of the agent, started once on every node. Together with the environment it is the only interface
    between controller and agents: nothing is pickled, as the nodes may have another interpreter with other packages."""
    cpus_per_node: int
    """Processor cores on every node."""
    memory_gb: float
    """Main memory per node in GiB; 0 leaves it to the scheduler."""
    time_limit_s: int
    """Time limit of the job, in seconds."""
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    """Additional options for Slurm; other schedulers ignore them."""
    passed: PassedEnvironment = field(default_factory=PassedEnvironment)
    """Secret variables of the job; every scheduler looks up their values when it starts the job."""

    def environment(self) -> dict[str, str]:
        """Variables added to the environment of the job: those of the settings, and the marker by which all its
        processes are found.

        Without GPUs, those of the node are hidden, so that a CPU run does not initialise, or fill, any of them.
        """
        variables = {JOB_VARIABLE: job_marker(self.run_id, self.placement.attempt)}
        if self.passed.names:
            variables[PASSED_VARIABLE] = ",".join(self.passed.names)
        if self.placement.gpus_per_node == 0:
            variables |= {VISIBLE_VARIABLE: "", HIP_VARIABLE: HIDDEN_FROM_HIP}
        return variables | self.slurm.environment


@dataclass(frozen=True)
class LivingJob:
    """Active job of this user, with the attempt named by its marker."""

    run_id: str
    submission: Submission


class Scheduler(Protocol):
    """Interface of a scheduler. No method waits for a job, except that :meth:`cancel` waits until it is gone.

    A job that has ended and one that never existed are treated alike: ended, not found, cancelled with success.
    ``tests/scheduler/test_scheduler_contract.py`` tests this for all of them.
    """

    name: str
    """``local`` or ``slurm``."""

    def inventory(self) -> Inventory:
        """Return the resources of the scheduler.

        Raises:
            SchedulerUnavailable: it does not answer.
            SchedulerError: it cannot be used from this machine.
        """

    def script(self, request: JobRequest) -> str:
        """Render the script that would be submitted."""

    def submit(self, request: JobRequest) -> Submission:
        """Start the job once.

        Raises:
            SubmissionFailed: it was not accepted; no part of it is running. If it may be accepted later,
                :class:`SubmissionDeferred`.
            SchedulerUnavailable: it does not answer; the job may have been accepted.
        """

    def status(self, submissions: Sequence[Submission]) -> dict[str, JobStatus]:
        """Query the state of several jobs at once, by job id."""

    def find(self, run_id: str, attempt: int, cluster: str = "") -> Submission | None:
        """Find the active job of an attempt whose submission was not recorded, in order to adopt it; of several, the
        first one submitted. None if there is none or it has ended: schedulers may forget ended jobs.

        Args:
            cluster: Slurm cluster that the attempt was planned for; empty if unknown, and for the local scheduler.

        Raises:
            SchedulerUnavailable: it does not answer.
            SchedulerError: this host belongs to another cluster; the job may exist.
        """

    def living(self) -> Sequence[LivingJob]:
        """List the active jobs of this user that carry the marker of an attempt, at any site.

        Raises:
            SchedulerUnavailable: it does not answer.
        """

    def cancel(self, submission: Submission) -> bool:
        """End all processes of the job, including those its agent left behind. Returns True once they are proven gone,
        which may take minutes.

        Safe to call for a job that has ended or is pending.

        Raises:
            SchedulerUnavailable: it does not answer; the job may still be running.
            SchedulerError: this host belongs to another cluster; the job may still be running.
        """
