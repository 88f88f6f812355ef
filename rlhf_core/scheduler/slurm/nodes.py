"""Nodes of a Slurm cluster: their list, names, GPUs and reservations, and those that failed a job."""

import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from rlhf_core.errors import SchedulerError
from rlhf_core.scheduler.slurm import commands


@dataclass(frozen=True)
class ListedNode:
    """A node in one of its partitions, as a line of ``sinfo``."""

    name: str
    num_cpus: int
    memory_mb: int
    """1 if it is not configured."""
    gres: str
    """Its generic resources, for instance ``gpu:h100:8(S:0-1),nvme:1``."""
    state: str
    partition: str
    in_default_partition: bool
    features: tuple[str, ...]


def list_nodes() -> list[ListedNode]:
    """List all nodes, each once per partition.

    Raises:
        SchedulerUnavailable: Slurm does not answer.
        SchedulerError: it is not installed here.
    """
    # --all: a job may name a hidden partition, whose nodes may be in no other.
    text = commands.run("sinfo", "--all", "--noheader", "--Node", "--format=%N|%c|%m|%G|%T|%P|%f")
    return [_listed(row) for line in text.splitlines() if len(row := line.split("|")) == 7]


def _listed(row: Sequence[str]) -> ListedNode:
    name, cpus, memory, gres, state, partition, features = row
    return ListedNode(
        name=name,
        num_cpus=leading_number(cpus),
        memory_mb=leading_number(memory),
        gres=gres,
        state=state,
        partition=partition.rstrip("*"),
        in_default_partition=partition.endswith("*"),
        features=tuple(features.split(",")),
    )


def takes_no_job(state: str) -> bool:
    """True for a node state, in ``sinfo``'s spelling, in which the node gets no jobs until an administrator acts.

    A star marks a node that does not answer, and ``inval`` one that has less than its configuration says, for instance
    a GPU less. A busy node, or one powered down to save energy, takes jobs.
    """
    out = ("down", "drain", "fail", "error", "maint", "inval", "unknown", "future")
    return state.endswith("*") or state.startswith(out)


def num_gpus(gres: str) -> int:
    """Count the GPUs in a node's generic resources, for instance ``gpu:h100:8(S:0-1),nvme:1``."""
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def gpu_type(gres: str) -> str:
    """Return the type of a node's GPUs; empty if Slurm reports none, or several."""
    kinds = set(re.findall(r"(?:^|,)gpu:([^:,(]+):\d+", gres))
    return kinds.pop() if len(kinds) == 1 else ""


def leading_number(text: str) -> int:
    """Number at the start of a text such as ``128+``; 0 if there is none."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def reserved_nodes() -> dict[str, str]:
    """Query the nodes of each reservation, in Slurm's short form; empty if Slurm does not answer."""
    with suppress(SchedulerError):
        text = commands.run("scontrol", "--oneliner", "show", "reservation")
        found = re.findall(r"^ReservationName=(\S+).*? Nodes=(\S+)", text, re.MULTILINE)
        return {name: nodes for name, nodes in found if nodes != "(null)"}
    return {}


def node_names(nodes: str) -> tuple[str, ...]:
    """Expand ``node[1-3]`` to three names."""
    if not re.search(r"[\[,]", nodes):
        return (nodes,) if nodes else ()
    try:
        return _expanded(nodes)
    except SchedulerError:
        return (nodes,)


@functools.lru_cache(maxsize=1024)
def _expanded(nodes: str) -> tuple[str, ...]:
    """Expand names with scontrol, which does not need slurmctld. Cached, because every poll of a job calls it."""
    return tuple(commands.run("scontrol", "show", "hostnames", nodes).split())


# ---------------------------------------------------------------------------------------------------------------------
# Nodes that failed a job


def node_states(nodes: str) -> list[tuple[str, str]]:
    """Query the current state of nodes in ``sinfo``'s short spelling; empty if Slurm does not answer."""
    with suppress(SchedulerError):
        text = commands.run("sinfo", "--all", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %t")
        return [(row[0], row[1]) for line in text.splitlines() if len(row := line.split()) == 2]
    return []


def down_nodes(states: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """List the nodes that are out of service.

    A drained node counts only if no other is: an administrator may have drained it while the job ran, but Slurm also
    says ``drain`` of a node that was drained and went down.
    """
    for pattern in (r"down|fail|unk|inval|.*\*$", r"drain"):
        found = tuple(dict.fromkeys(node for node, state in states if re.match(pattern, state)))
        if found:
            return found
    return ()


def powered_off_nodes(states: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """List the nodes that Slurm switches on or off, as in a cloud. One that does not start in time, for lack of
    capacity for instance, is ``down~``."""
    return tuple(dict.fromkeys(node for node, state in states if state[-1] in "~#!%"))


_BEFORE_PROLOG = -timedelta(seconds=10)
"""A node that was drained earlier was drained for another job. Times of Slurm are in whole seconds."""
_PROLOG_WITHIN = timedelta(minutes=30)
"""Time after the start of a job in which its Prolog may fail; a later failure is that of another job on the node."""
_NOT_PREPARED = ("Prolog error", "Job env setup error")
"""Reasons with which Slurm drains such a node (``validate_node_specs`` in its ``node_mgr.c``)."""


def unprepared_nodes(nodes: str, start: datetime | None) -> tuple[str, ...]:
    """Query the nodes that Slurm drained because they could not be prepared for a job. It then cancels the job, unless
    the job may be requeued.

    Args:
        nodes: The job's nodes, in Slurm's short form.
        start: Its start; None if it has not started.
    """
    if not nodes or start is None:
        return ()
    with suppress(SchedulerError):
        text = commands.run("sinfo", "--all", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%H|%E")
        found = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
        failed = [(name, commands.parse_time(since)) for name, since, why in found if why.startswith(_NOT_PREPARED)]
        return tuple(dict.fromkeys(name for name, at in failed if at and _BEFORE_PROLOG < at - start < _PROLOG_WITHIN))
    return ()
