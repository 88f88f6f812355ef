"""Nodes and GPUs: those of a scheduler, and those of an attempt."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, StringConstraints, model_validator

from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import Finite, Int32, Label, Message, Schema
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.slurm_values import is_named


class PartitionSettings(Schema):
    """Limit of the jobs of a partition, and memory of those that request none."""

    time_limit_s: int = 0
    """Longest time limit of a job in seconds; 0 if there is none."""
    memory_gb_per_node: float = 0.0
    """Memory on each node in GiB, unless it depends on cores or GPUs; 0 if there is no default."""
    memory_gb_per_cpu: float = 0.0
    """Memory per requested core in GiB; 0 if there is no default."""
    memory_gb_per_gpu: float = 0.0
    """Memory per requested GPU in GiB, which precedes the other two; 0 if there is no default."""

    def default_memory_gb(self, cpus_per_node: int, gpus_per_node: int) -> float:
        """Memory per node, in GiB, of a job that requests none; 0 for that of the whole node."""
        per_gpu, per_cpu = self.memory_gb_per_gpu * gpus_per_node, self.memory_gb_per_cpu * cpus_per_node
        return per_gpu or per_cpu or self.memory_gb_per_node


class Inventory(Schema):
    """Resources of a scheduler."""

    node_names: tuple[str, ...]
    """Names of the available nodes."""
    cpus_per_node: int
    """Processor cores of the largest node."""
    memory_gb: float
    """Main memory of the largest node, in GiB; 0 if unknown."""
    gpus_per_node: int
    """GPUs of the node with most."""
    node_gpus: dict[str, int] = {}
    """GPUs of each node; empty if the scheduler does not distinguish them."""
    node_gpu_types: dict[str, str] = {}
    """Type of GPU of each node, as named by the scheduler, for instance ``h100``; only nodes with a known type."""
    node_cpus: dict[str, int] = {}
    """Processor cores of each node; empty if the scheduler does not distinguish them."""
    node_memory_gb: dict[str, float] = {}
    """Main memory of each node, in GiB; only nodes whose memory is known."""
    out_of_service: dict[str, str] = {}
    """Unavailable nodes with their state in the scheduler, for instance ``drained``."""
    node_partitions: dict[str, tuple[str, ...]] = {}
    """Partitions of each node; empty if the scheduler has none."""
    node_features: dict[str, tuple[str, ...]] = {}
    """Features of each node that a job can require; empty if the scheduler has none."""
    reservations: dict[str, str] = {}
    """Nodes of each reservation, in Slurm's short form."""
    default_partition: str = ""
    """Default partition of jobs; empty if the scheduler has none."""
    default_qos: str = ""
    """Quality of service of jobs that choose none; empty if unknown, and if the scheduler has none."""
    partition_settings: dict[str, PartitionSettings] = {}
    """Settings of each partition; empty if the scheduler has none, or did not tell them."""
    may_choose_partition: bool = False
    """True if the scheduler may place a job that names no partition in another one than the default."""
    federation: str = ""
    """Federation of Slurm clusters of which another one may start the jobs; empty if there is none."""
    cluster: str = ""
    """Name of the Slurm cluster; empty if unknown, and for the local scheduler."""

    def gpus_of(self, node: str) -> int:
        """GPUs of a node, which may differ from those of most."""
        return self.node_gpus.get(node, self.gpus_per_node)

    def counts_gpus(self, slurm: SlurmSpec) -> bool:
        """False if the scheduler does not know the GPUs of its nodes, because the cluster allocates whole nodes."""
        return slurm.gpus_as_gres or not self.node_partitions

    def cpus_for(self, slurm: SlurmSpec, gpus_per_node: int = 0) -> int:
        """Processor cores of the largest node that a job with these options may get."""
        of_nodes = (self.node_cpus.get(name, 0) for name in self.nodes_for(slurm, gpus_per_node))
        return max(of_nodes, default=0) or self.cpus_per_node

    def memory_for(self, slurm: SlurmSpec, gpus_per_node: int = 0) -> float:
        """Main memory of the largest node that a job with these options may get, in GiB; 0 if unknown."""
        of_nodes = (self.node_memory_gb.get(name, 0.0) for name in self.nodes_for(slurm, gpus_per_node))
        return max(of_nodes, default=0.0) or self.memory_gb

    def partitions_with(self, gpus_per_node: int) -> set[str]:
        """Partitions of the nodes with that many GPUs."""
        partitions = self.node_partitions.items()
        return {name for node, names in partitions if self.gpus_of(node) >= gpus_per_node for name in names}

    def partitions_for(self, slurm: SlurmSpec, gpus_per_node: int = 0) -> set[str]:
        """Partitions that a job with these options may run in; empty if the scheduler does not list its partitions."""
        listed = self.partitions_with(0)
        if slurm.partitions:
            return listed & slurm.partitions
        default = listed & {*self.default_partition.split(",")}
        enough = self.partitions_with(gpus_per_node if self.counts_gpus(slurm) else 0)
        return listed if self.may_choose_partition and enough.isdisjoint(default) else default

    def settings_for(self, slurm: SlurmSpec, gpus_per_node: int = 0) -> dict[str, PartitionSettings]:
        """Settings of the partitions that a job with these options may run in; empty if those of one are unknown."""
        names = sorted(self.partitions_for(slurm, gpus_per_node))
        known = {name: self.partition_settings[name] for name in names if name in self.partition_settings}
        return known if len(known) == len(names) else {}

    def nodes_for(self, slurm: SlurmSpec, gpus_per_node: int = 0) -> list[str]:
        """Nodes that a job with these options may get eventually, including those that are busy or out of service."""
        # Of a partition that the scheduler does not list, the nodes are unknown.
        allowed = self.partitions_for(slurm, gpus_per_node)
        # Only Slurm selects by type; it has partitions, and a node whose type it does not report may have any.
        kind = slurm.gpu_type.casefold() if self.node_partitions else ""
        # The nodes of a reservation that the scheduler does not list are unknown, too.
        reserved = [self.reservations.get(name, "") for name in slurm.reservations]
        known_gpus = gpus_per_node if self.counts_gpus(slurm) else 0
        return [
            name
            for name in self.node_names
            if not slurm.excludes(name)
            and self.gpus_of(name) >= known_gpus
            and (not allowed or not allowed.isdisjoint(self.node_partitions.get(name, ())))
            and (not kind or self.node_gpu_types.get(name, kind).casefold() == kind)
            and (name not in self.node_features or slurm.accepts(self.node_features[name]))
            and (not reserved or "" in reserved or is_named(name, reserved))
        ]


class GroupPlan(Schema):
    """One group of workers of an attempt, identified by its role, which is unique in its phase."""

    role: Role
    """The role."""
    nodes: Annotated[tuple[Int32, ...], Field(min_length=1)]
    """Indices of its nodes in the allocation, ascending, from 0."""
    workers_per_node: Int32
    """Workers on each of these nodes."""
    gpus: tuple[Int32, ...] = ()
    """GPUs for the group on each of these nodes, as indices from 0."""
    restart: Literal["together", "alone"] = "together"
    """Workers to restart when one of them has failed: all of them, or only that one."""

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
        """Create a group on all nodes with all of their GPUs."""
        nodes, gpus = tuple(range(num_nodes)), tuple(range(gpus_per_node))
        return cls(role=role, nodes=nodes, workers_per_node=workers_per_node, gpus=gpus)


Phases = tuple[tuple[GroupPlan, ...], ...]


def in_order(*groups: GroupPlan) -> Phases:
    """Build consecutive phases of one group each."""
    return tuple((group,) for group in groups)


class Placement(Schema):
    """The groups of workers of one attempt, and their nodes (``attempts/<n>/placement.json``)."""

    attempt: Int32
    """Number of the attempt, from 1."""
    num_nodes: Int32
    """Nodes of the allocation."""
    cluster: Label = ""
    """Slurm cluster that the attempt is planned for; empty if unknown, and for the local scheduler."""
    size_reason: Message = ""
    """Reason why there are fewer than requested; empty if there are not."""
    phases: Phases
    """Groups of one phase run side by side: one that restarts together and, beside it, those that serve it and restart
    alone. A phase starts when the previous one has succeeded."""
    gpus_per_node: Int32 = 0
    """GPUs requested on every node."""
    excluded_nodes: tuple[Label, ...] = ()
    """Nodes excluded from this attempt."""
    resume_checkpoint: Label = ""
    """Name of the checkpoint folder to resume from; empty for a start from scratch."""
    resumed_from_step: Int32 = 0
    """Step of that checkpoint; 0 for a start from scratch."""
    config_diff: dict[str, JsonValue] = {}
    """Settings changed for this attempt, including changes of earlier attempts: dotted name to new value."""
    longest_gaps_s: dict[str, float] = {}
    """Longest gaps between heartbeats in earlier runs of the same shape, in seconds: ``role/phase`` to gap."""
    exclusion_reasons: dict[str, Message] = {}
    """Reason for each excluded node."""
    usual_speeds: dict[str, dict[str, dict[str, float]]] = {}
    """Medians of earlier probes of all runs: node to device to reading."""

    @model_validator(mode="before")
    @classmethod
    def _read_roles(cls, content: Any) -> Any:
        """Read ``roles`` from version 0.1: consecutive roles, each on all nodes."""
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
            restarts = [group.restart for group in phase]
            if restarts != ["together", *["alone"] * (len(phase) - 1)]:
                found = ", ".join(restarts) or "none"
                raise ValueError(
                    f"found groups restarted {found}, expected the first together, and those beside it alone"
                )
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
"""A scheduler's id of a job. Because it is used in command lines, it must not look like an option or several jobs."""


class Submission(Schema):
    """Answer of the scheduler to a submission (``attempts/<n>/submission.json``)."""

    attempt: Int32
    """Number of the attempt, from 1."""
    scheduler: Label
    """``local`` or ``slurm``."""
    job_id: JobId
    """Job id of the scheduler."""
    command: tuple[str, ...]
    """Command line that the scheduler starts on every node."""
    host: Label = ""
    """Host that submitted the job."""
    cluster: Label = ""
    """Slurm cluster of the job; empty if unknown, and for the local scheduler."""
    process_started: Finite = 0.0
    """Only for the local scheduler: start time of the job's process in seconds since the epoch, to detect a reused
    process id."""
    marker: Label = ""
    """Value of ``RLHF_JOB`` in the environment of every process of the job."""


PASSED_VARIABLE = "RLHF_PASSED_ENVIRONMENT"
"""Environment variable with the comma-separated names of variables passed to the job as secrets."""
JOB_VARIABLE = "RLHF_JOB"
"""Environment variable of every process of a job, to find left-over processes."""
JOB_END_VARIABLE = "RLHF_JOB_ENDS_AT"
"""Environment variable of a job with the time at which its time limit ends it, in seconds since the epoch."""


def job_marker(run_id: str, attempt: int) -> str:
    """Build the value of :data:`JOB_VARIABLE`, in Slurm also the comment of the job."""
    return f"{run_id}/{attempt}"


def parse_job_marker(text: str) -> tuple[str, int] | None:
    """Parse run and attempt from a marker; return None if the text is not a marker."""
    run_id, _, attempt = text.rpartition("/")
    return (run_id, int(attempt)) if run_id and attempt.isdecimal() else None
