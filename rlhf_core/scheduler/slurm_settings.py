"""Settings of a Slurm cluster that decide about a job which does not choose: its partition, for instance."""

import contextlib
import re
from collections.abc import Mapping

from rlhf_core.errors import SchedulerError
from rlhf_core.scheduler import slurm_queue


def cluster_settings() -> Mapping[str, str]:
    """Query the settings of the cluster by name, as ``scontrol show config`` lists them; empty if Slurm does not
    answer."""
    with contextlib.suppress(SchedulerError):
        text = slurm_queue.run("scontrol", "show", "config")
        return dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
    return {}


def may_choose_partitions(settings: Mapping[str, str]) -> bool:
    """Return True if a plug-in of the site reads every job at its submission, and may place one that names no
    partition."""
    plugins = (settings.get(name, "(null)") for name in ("JobSubmitPlugins", "CliFilterPlugins"))
    return any(names not in ("", "(null)") for names in plugins)
