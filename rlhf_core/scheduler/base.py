"""Common interface of all schedulers.

A missing answer is not an end: a state that a scheduler does not know is ``UNKNOWN``, and the caller keeps the last
known one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rlhf_core.scheduler.passed_environment import PassedEnvironment
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import Inventory, Placement, Submission


class JobState(StrEnum):
    """State of a job, as far as its scheduler knows."""

    PENDING = "pending"
    """Accepted; waits for nodes."""
    RUNNING = "running"
    """Its agents are running."""
    ENDED = "ended"
    """Nothing of it runs any more. Its result is in ``outcome.json``."""
    UNKNOWN = "unknown"
    """The scheduler did not answer, or cannot know from this host. No evidence about the job."""


@dataclass(frozen=True)
class JobStatus:
    """Answer of the scheduler about one job."""

    state: JobState
    """State of the job."""
    reason: str = ""
    """Reason for the state, from the scheduler or in a sentence: why it waits, how it ended."""
    nodes: tuple[str, ...] = ()
    """Nodes it has."""
    exit_code: int | None = None
    """Exit code, where the scheduler knows it."""
    scheduler_state: str = ""
    """The scheduler's own name of the state, for instance ``NODE_FAIL``; the classifier reads it."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes of a job that ended because of them."""


@dataclass(frozen=True)
class JobRequest:
    """Attempt that is ready to be submitted."""

    run_id: str
    """The run."""
    placement: Placement
    """Number of the attempt, nodes, GPUs, exclusions."""
    scheduler_dir: Path
    """Folder for the scheduler's own files: script, output of the agents. The job runs in it."""
    command: tuple[str, ...]
    """Command line of the agent, started once on every node."""
    cpus_per_node: int
    """Processor cores on every node."""
    memory_gb: float
    """Main memory per node in GiB; 0 leaves it to the scheduler."""
    time_limit_s: int
    """Time limit of the job, in seconds."""
    environment: Mapping[str, str]
    """Variables added to the environment of the job."""
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    """Additional options for Slurm; other schedulers ignore them."""
    passed: PassedEnvironment = field(default_factory=PassedEnvironment)
    """Secret variables of the job; every scheduler looks up their values when it starts the job."""


@dataclass(frozen=True)
class LivingJob:
    """Active job of this user, with the attempt named by its marker."""

    run_id: str
    submission: Submission


class Scheduler(Protocol):
    """Interface of a scheduler. Only :meth:`cancel` waits for a job: until it is gone.

    A job that has ended and one that never was are the same: ended, not found, cancelled with success.
    ``tests/scheduler/test_scheduler_contract.py`` tests this for all of them.
    """

    name: str
    """``local`` or ``slurm``."""

    def inventory(self) -> Inventory:
        """Return the resources of the scheduler.

        Raises:
            SchedulerError: it does not answer.
        """

    def script(self, request: JobRequest) -> str:
        """Render the script that would be submitted."""

    def submit(self, request: JobRequest) -> Submission:
        """Start the job once.

        Raises:
            SubmissionFailed: it was not accepted; nothing of it runs.
        """

    def status(self, submissions: Sequence[Submission]) -> dict[str, JobStatus]:
        """Query the state of several jobs at once, by job id."""

    def find(self, run_id: str, attempt: int) -> Submission | None:
        """Find the active job of an attempt whose submission was not recorded, to adopt it; of several, the first
        submitted one. None if there is none, or if it has ended, which a scheduler may not remember.

        Raises:
            SchedulerError: it does not answer; the job may exist.
        """

    def living(self) -> Sequence[LivingJob]:
        """List the active jobs of this user that carry the marker of an attempt, of any site.

        Raises:
            SchedulerError: it does not answer.
        """

    def cancel(self, submission: Submission) -> bool:
        """End all processes of the job, also those its agent left behind; True once they are proven gone, which may
        take minutes.

        Harmless for a job that has ended, or that waits.

        Raises:
            SchedulerError: it does not answer; the job may still run.
        """
