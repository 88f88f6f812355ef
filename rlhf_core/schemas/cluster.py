"""Settings of the resources that a run takes from a cluster."""

import re
from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import NonNegative, Positive, Schema
from rlhf_core.schemas.site import is_private
from rlhf_core.schemas.slurm_values import Lines, NodeName, OneLine, SbatchOption, VariableName, is_named

_FEATURES = re.compile(r"[\w.:+-]+((&[\w.:+-]+)*|(,[\w.:+-]+)*|(\|[\w.:+-]+)*)")
"""Constraints that can be compared with the features of nodes: all of these features, or one of them."""


class ResourceSpec(Schema):
    """Resources that the run needs from the cluster."""

    num_nodes: Positive = 1
    """Nodes of the allocation, including `rollout.nodes`; the others train."""
    min_nodes: NonNegative = 0
    """Minimum number of nodes of an attempt if the cluster cannot provide `num_nodes` (nodes are down, drained or
    excluded). The attempt requests the largest available number that divides the batch and has GPUs for the rollout
    engines; the global batch is unchanged, and a later attempt requests all nodes again once they are back. 0 always
    waits for all of them. `rollout.nodes` are included, and their number is unchanged."""
    ranks_per_node: Positive = 1
    """Trainer ranks on every training node: one per GPU, or per group of cores on CPU."""
    gpus_per_node: NonNegative = 0
    """GPUs on every node; 0 trains on CPU with gloo."""
    cpus_per_rank: Positive = 1
    """Processor cores per rank; on GPU nodes, usually the cores of a node divided by its GPUs."""
    memory_gb: Annotated[float, Field(ge=0, le=2**31 - 1, allow_inf_nan=False)] = 0.0
    """Main memory per node in GiB. 0 requests none: a Slurm job gets the default of its partition, often a few GiB per
    core, whereas predictions assume the whole node."""
    time_limit_s: Positive = 86_400
    """Time limit of one attempt in seconds, at most that of the partition. A run that takes longer resumes in a new
    attempt."""

    @model_validator(mode="after")
    def _least_is_least(self) -> Self:
        if self.min_nodes > self.num_nodes:
            raise ValueError(
                f"found resources.min_nodes = {self.min_nodes} and resources.num_nodes = {self.num_nodes}; expected at "
                f"most resources.num_nodes"
            )
        return self


class SlurmSpec(Schema):
    """Settings of a Slurm job besides nodes, GPUs, cores, memory and time. The site's own values come first."""

    partition: OneLine = ""
    """Partition; empty for the cluster's default."""
    account: OneLine = ""
    """Account to charge."""
    qos: OneLine = ""
    """Quality of service."""
    constraint: OneLine = ""
    """Required features of nodes, in the format of `sbatch --constraint`."""
    gpu_type: OneLine = ""
    """Type of GPU, as in `gpu:h100:8`; empty for any."""
    gpus_as_gres: bool = True
    """Request GPUs with `--gpus-per-node`. False for a cluster that allocates whole nodes and does not manage their
    GPUs (`sinfo -o %G` shows no `gpu`): jobs request `--exclusive` instead, only the probe of the nodes counts their
    GPUs, and `gpu_type` only tells the checks the memory of one."""
    gres: OneLine = ""
    """More generic resources, in the format of `sbatch --gres`."""
    reservation: OneLine = ""
    """Reservation to run in."""
    exclude: tuple[NodeName, ...] = ()
    """Nodes to exclude; suspects of failures are added automatically."""
    setup: tuple[Lines, ...] = ()
    """Shell lines to run in every job before its agents start, for instance `module load cuda`."""
    container_kind: Literal["", "pyxis", "apptainer"] = ""
    """Run the agents in a container: through `srun --container-image` (pyxis) or `apptainer exec`."""
    container_image: OneLine = ""
    """Image of that container."""
    container_mounts: tuple[OneLine, ...] = ()
    """Mounts, each `from:to`; the run directory is mounted automatically."""
    environment: dict[VariableName, Lines] = {}
    """Variables set for the agents and workers with any scheduler; they are stored and shown like any setting."""
    pass_environment: tuple[VariableName, ...] = ()
    """Names of variables with secret values. The values are read at submission from the environment of the submitting
    process, or from the file `RLHF_JOB_SECRETS`, and passed to the job with any scheduler; they are never stored or
    shown."""
    save_lead_s: Positive = 120
    """Time before the limit at which Slurm requests a checkpoint, in seconds; Slurm counts in minutes, so it may be
    early."""
    extra: tuple[SbatchOption, ...] = ()
    """More `sbatch` options, each as `--option=value`."""

    @property
    def partitions(self) -> frozenset[str]:
        """Partitions that the job may run in; empty for the cluster's default."""
        return frozenset(filter(None, self.chosen("partition").split(",")))

    @property
    def reservations(self) -> tuple[str, ...]:
        """Reservations of which the job may get the nodes; empty if it runs in none."""
        return tuple(filter(None, self.chosen("reservation").split(",")))

    def accepts(self, features: Collection[str]) -> bool:
        """False if the job never gets a node with these features, because of its constraint. Constraints with numbers,
        brackets or parentheses are evaluated only by Slurm."""
        constraint = self.chosen("constraint")
        if not _FEATURES.fullmatch(constraint):
            return True
        wanted = [feature in features for feature in re.split(r"[&,|]", constraint)]
        return any(wanted) if "|" in constraint else all(wanted)

    @property
    def selects_nodes(self) -> bool:
        """True if the job may get only some nodes of its partitions, by something that perhaps only Slurm evaluates."""
        options = (
            "constraint",
            "gpus",
            "gpus-per-node",
            "gpus-per-task",
            "gres",
            "nodefile",
            "nodelist",
            "reservation",
        )
        return bool(self.constraint or self.gres or self.reservation or any(map(self.in_extra, options)))

    def excludes(self, node: str) -> bool:
        """True if the job never gets a node, by name or by Slurm's short form; files of ``--exclude`` are not read."""
        return is_named(node, [*self.exclude, *(value for value in self.in_extra("exclude") if "/" not in value)])

    def chosen(self, option: str) -> str:
        """Value of an option that is a setting too: in extra, it overrides the setting."""
        return str([getattr(self, option), *self.in_extra(option)][-1])

    def in_extra(self, option: str) -> list[str]:
        """Values of an option of sbatch in ``extra``, in their order; the name may stand there without its dashes."""
        options = [one.removeprefix("--").partition("=") for one in self.extra]
        return [value for name, _, value in options if name == option]

    def over(self, site: "SlurmSpec") -> "SlurmSpec":
        """Return these settings, with the site's for all that are not set here; lists and variables are combined."""
        changed = {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        }
        both = {
            "exclude": (*site.exclude, *self.exclude),
            "setup": (*site.setup, *self.setup),
            "container_mounts": (*site.container_mounts, *self.container_mounts),
            "extra": (*site.extra, *self.extra),
            # If one of them passes a variable as a secret and the other sets it openly, the run decides.
            "environment": {
                **{name: value for name, value in site.environment.items() if name not in self.pass_environment},
                **self.environment,
            },
            "pass_environment": tuple(
                name
                for name in dict.fromkeys((*site.pass_environment, *self.pass_environment))
                if name not in self.environment
            ),
        }
        return site.model_copy(update={**changed, **both})

    @model_validator(mode="after")
    def _is_passed_one_way(self) -> Self:
        for name in self.pass_environment:
            if name in self.environment:
                raise ValueError(
                    f"found {name} in slurm.environment and slurm.pass_environment; give it in one of them"
                )
            if is_private(name):
                raise ValueError(
                    f"slurm.pass_environment names {name}, which is private to the site and not passed to jobs"
                )
        return self

    @model_validator(mode="after")
    def _whole_container(self) -> Self:
        if bool(self.container_kind) != bool(self.container_image):
            raise ValueError("found one of slurm.container_kind and slurm.container_image; give both or neither")
        return self
