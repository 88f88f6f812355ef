"""Nodes and GPUs: those that there are, and those that an attempt has."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, StringConstraints, model_validator

from rlhf_core.schemas.base import Finite, Int32, Label, Message, Schema


class Role(StrEnum):
    """The purpose of a worker."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    REWARD = "reward"
    EVALUATOR = "evaluator"
    PROBE = "probe"


class Inventory(Schema):
    """Resources of a scheduler."""

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
    out_of_service: dict[str, str] = {}
    """Nodes that take no job now, and their state in the scheduler's words, for instance ``drained``."""
    node_partitions: dict[str, tuple[str, ...]] = {}
    """Partitions of each node; empty where the scheduler has none."""
    default_partition: str = ""
    """Partition of jobs that name none; empty where the scheduler has none."""


class GroupPlan(Schema):
    """One group of workers of an attempt. It is known by its role, which no other group of its phase has."""

    role: Role
    """The role."""
    nodes: Annotated[tuple[Int32, ...], Field(min_length=1)]
    """Indices of its nodes in the allocation, ascending, from 0."""
    workers_per_node: Int32
    """Workers on each of these nodes."""
    gpus: tuple[Int32, ...] = ()
    """GPUs that it may use on each of these nodes, as indices from 0."""
    restart: Literal["together", "alone"] = "together"
    """Workers that are started again when one of them has failed: all of them, or that one."""

    @model_validator(mode="after")
    def _check_nodes(self) -> "GroupPlan":
        if list(self.nodes) != sorted(set(self.nodes)) or self.nodes[0] < 0:
            raise ValueError(f"found the nodes {self.nodes}, expected indices from 0, ascending")
        return self

    @property
    def num_workers(self) -> int:
        """Workers on all nodes."""
        return len(self.nodes) * self.workers_per_node

    @classmethod
    def on_all_nodes(cls, role: Role, workers_per_node: int, num_nodes: int, gpus_per_node: int = 0) -> "GroupPlan":
        """A group on every node, with all of its GPUs."""
        nodes, gpus = tuple(range(num_nodes)), tuple(range(gpus_per_node))
        return cls(role=role, nodes=nodes, workers_per_node=workers_per_node, gpus=gpus)


Phases = tuple[tuple[GroupPlan, ...], ...]


def in_order(*groups: GroupPlan) -> Phases:
    """Phases of one group each, which follow each other."""
    return tuple((group,) for group in groups)


class Placement(Schema):
    """The groups of workers of one attempt, and their nodes (``attempts/<n>/placement.json``)."""

    attempt: Int32
    """Number of the attempt, from 1."""
    num_nodes: Int32
    """Nodes of the allocation."""
    size_reason: Message = ""
    """Reason why these are fewer than the run asks for, in words; empty if they are not."""
    phases: Phases
    """Groups of one phase run side by side; a phase starts when the one before it has ended well."""
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
    """Reason for each excluded node, in words."""
    usual_speeds: dict[str, dict[str, dict[str, float]]] = {}
    """Medians of what earlier probes of all runs measured: node to device to reading."""

    @model_validator(mode="before")
    @classmethod
    def _read_roles(cls, content: Any) -> Any:
        """Read ``roles`` as version 0.1 wrote them: roles on all nodes, one after the other."""
        if not isinstance(content, dict) or "roles" not in content:
            return content
        nodes, gpus = list(range(content.get("num_nodes", 1))), list(range(content.get("gpus_per_node", 0)))
        phases = [[{"nodes": nodes, "gpus": gpus, **role}] for role in content["roles"]]
        return {"phases": phases, **{name: value for name, value in content.items() if name != "roles"}}

    @model_validator(mode="after")
    def _check_groups(self) -> "Placement":
        for phase in self.phases:
            roles = [group.role.value for group in phase]
            if len(roles) != len(set(roles)):
                raise ValueError(f"found the groups {', '.join(roles)} in one phase, expected each role once")
            for group in phase:
                if group.nodes[-1] >= self.num_nodes:
                    raise ValueError(
                        f"found node {group.nodes[-1]} for {group.role}, expected less than {self.num_nodes}"
                    )
        return self

    @property
    def groups(self) -> Sequence[GroupPlan]:
        """The groups of all phases, in order."""
        return [group for phase in self.phases for group in phase]


JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+]{0,63}$")]
"""A scheduler's id of a job. It stands in command lines: nothing that could be an option or name several jobs."""


class Submission(Schema):
    """The answer of the scheduler (``attempts/<n>/submission.json``)."""

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
    """Value of ``RLHF_JOB`` in the environment of every process of the job."""


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
