"""Nodes: what there is, what was asked for, what was given."""

from enum import StrEnum
from typing import Annotated

from pydantic import JsonValue, StringConstraints

from rlhf_core.schemas.base import Finite, Int32, Label, Message, Schema


class Role(StrEnum):
    """What a worker is there for."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    REWARD = "reward"
    EVALUATOR = "evaluator"
    PROBE = "probe"


class Inventory(Schema):
    """What a scheduler can give."""

    node_names: tuple[str, ...]
    """Names of the nodes that can take work."""
    cpus_per_node: int
    """Processor cores of the smallest node."""
    memory_gb: float
    """Main memory of the smallest node, in GiB."""
    gpus_per_node: int
    """GPUs of the smallest node."""
    node_gpus: dict[str, int] = {}
    """GPUs of each node; empty where the scheduler does not tell them apart."""
    node_gpu_types: dict[str, str] = {}
    """Type of GPU of each node, in the scheduler's words, for instance ``h100``; only nodes whose type is known."""


class RolePlan(Schema):
    """One role of an attempt: how many workers on each node."""

    role: Role
    """The role."""
    workers_per_node: Int32
    """Workers of this role on every node."""


class Placement(Schema):
    """Which nodes have which role in one attempt (``attempts/<n>/placement.json``)."""

    attempt: Int32
    """Number of the attempt, from 1."""
    num_nodes: Int32
    """Nodes of the allocation."""
    roles: tuple[RolePlan, ...]
    """Roles in the order in which they run; each starts when the one before it has ended well."""
    gpus_per_node: Int32 = 0
    """GPUs asked for on every node."""
    excluded_nodes: tuple[Label, ...] = ()
    """Nodes this attempt must not get."""
    resume_checkpoint: Label = ""
    """Name of the checkpoint folder to go on from; empty to start from the beginning."""
    resumed_from_step: Int32 = 0
    """Step of that checkpoint; 0 from the beginning."""
    config_diff: dict[str, JsonValue] = {}
    """Settings that this attempt changes: dotted name to new value. What earlier attempts changed is in it too."""
    longest_gaps_s: dict[str, float] = {}
    """Longest gaps between beats of earlier runs of the same shape, in seconds: ``role/phase`` to gap."""
    exclusion_reasons: dict[str, Message] = {}
    """Why each excluded node is: for a person."""
    usual_speeds: dict[str, dict[str, dict[str, float]]] = {}
    """Medians of what earlier probes of all runs measured: node to device to reading."""


JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+]{0,63}$")]
"""A scheduler's id of a job. It stands in command lines: nothing that could be an option or name several jobs."""


class Submission(Schema):
    """What the scheduler answered (``attempts/<n>/submission.json``)."""

    attempt: Int32
    """Number of the attempt, from 1."""
    scheduler: Label
    """``local`` or ``slurm``."""
    job_id: JobId
    """The scheduler's id of the job."""
    command: tuple[str, ...]
    """The command line that the scheduler starts on every node."""
    host: Label = ""
    """Host the job was submitted from."""
    process_started: Finite = 0.0
    """Local scheduler only: start time of the job's process in seconds since the epoch, so that a reused process id is
    not taken for the job."""
    marker: Label = ""
    """What every process of the job carries in its environment as ``RLHF_JOB``."""


PASSED_VARIABLE = "RLHF_PASSED_ENVIRONMENT"
"""Environment variable with the names, separated by commas, of variables that were handed to the job as secrets."""
JOB_VARIABLE = "RLHF_JOB"
"""Environment variable that every process of a job carries, so that what was left behind is found by its owner."""


def job_marker(run_id: str, attempt: int) -> str:
    """Value of :data:`JOB_VARIABLE`; in Slurm also the comment of the job."""
    return f"{run_id}/{attempt}"


def parse_job_marker(text: str) -> tuple[str, int] | None:
    """Run and attempt that a marker names; None where the text is none."""
    run_id, _, attempt = text.rpartition("/")
    return (run_id, int(attempt)) if run_id and attempt.isdecimal() else None
