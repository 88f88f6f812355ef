"""Settings of a Slurm cluster and its partitions: limits of jobs, and defaults for what a job does not request."""

import contextlib
import os
import re
from collections.abc import Mapping

from rlhf_core.errors import SchedulerError, SchedulerUnavailable
from rlhf_core.scheduler.slurm import commands
from rlhf_core.schemas.resources import PartitionSettings
from rlhf_core.schemas.slurm_values import slurm_seconds


def cluster_settings() -> Mapping[str, str]:
    """Query the settings of the cluster by name, as ``scontrol show config`` lists them; empty if Slurm does not show
    them to the user.

    Raises:
        SchedulerUnavailable: Slurm does not answer. Without the plug-ins that place jobs, it would look as if no node
            had the GPUs of a job.
    """
    try:
        text = commands.run("scontrol", "show", "config")
    except SchedulerUnavailable:
        raise
    except SchedulerError:
        return {}
    return dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))


def may_choose_partitions(settings: Mapping[str, str]) -> bool:
    """Return True if a plug-in of the site reads every job at its submission, and may place one that names no
    partition."""
    plugins = (settings.get(name, "(null)") for name in ("JobSubmitPlugins", "CliFilterPlugins"))
    return any(names not in ("", "(null)") for names in plugins)


def federation() -> str:
    """Query the name of the federation whose other clusters may start a job; empty if there is none, or if
    ``SLURM_CLUSTERS`` keeps jobs on one cluster."""
    if os.environ.get("SLURM_CLUSTERS"):
        return ""
    with contextlib.suppress(SchedulerError):
        text = commands.run("scontrol", "show", "federation")
        found = re.search(r"^Federation:[ \t]*(\S+)", text, re.MULTILINE)
        return found[1] if found and "Sibling:" in text else ""
    return ""


def partition_settings(cluster: Mapping[str, str]) -> dict[str, PartitionSettings]:
    """Query the settings of all partitions, with the defaults of the cluster; empty if Slurm does not answer."""
    of_cluster = " ".join(f"{name}={value}" for name, value in cluster.items() if name in _OF_JOBS)
    with contextlib.suppress(SchedulerError):
        text = commands.run("scontrol", "--all", "--oneliner", "show", "partition")
        lines = re.findall(r"^PartitionName=(\S+) (.*)", text, re.MULTILINE)
        return {name: _settings(values, of_cluster) for name, values in lines}
    return {}


_OF_JOBS = ("DefMemPerCPU", "DefMemPerNode", "JobDefaults")
"""Settings of a cluster that hold for a job without a request; a partition has them too."""


def _settings(of_partition: str, of_cluster: str) -> PartitionSettings:
    longest = re.search(r"\bMaxTime=(\S+)", of_partition)
    texts = (of_partition, of_cluster)
    # A partition has a default per core or per node: either replaces that of the cluster.
    of_cores = next((text for text in texts if _gigabytes(text, "CPU") or _gigabytes(text, "Node")), "")
    return PartitionSettings(
        time_limit_s=(slurm_seconds(longest[1]) or 0) if longest else 0,
        memory_gb_per_node=_gigabytes(of_cores, "Node"),
        memory_gb_per_cpu=_gigabytes(of_cores, "CPU"),
        memory_gb_per_gpu=next(filter(None, (_gigabytes(text, "GPU") for text in texts)), 0.0),
    )


def _gigabytes(settings: str, kind: str) -> float:
    """Default memory per node, core or GPU in GiB, which Slurm gives in MiB; 0 if there is none."""
    found = re.search(rf"\bDefMemPer{kind}=(\d+)", settings)
    return int(found[1]) / 1024 if found else 0.0
