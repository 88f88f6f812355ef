"""The cluster under a run, with its faults, and memory groups and left processes of this machine."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from process_tools import until
from slurm_cluster import throwaway

from rlhf_core.schemas.resources import JOB_VARIABLE


def left_behind(run_id: str, timeout_s: float = 15.0) -> list[str]:
    """Processes of a run that still exist some time after its end."""
    deadline = time.monotonic() + timeout_s
    while found := list(_processes_of(run_id)):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.5)
    return []


def _processes_of(run_id: str) -> Iterator[str]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marker = process.environ().get(JOB_VARIABLE, "")
            if marker.startswith(f"{run_id}/") and process.status() != psutil.STATUS_ZOMBIE:
                yield f"{process.pid} ({' '.join(process.cmdline())[:80]})"


MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def memory_group(name: str) -> Iterator[Path]:
    """A folder for a memory group in which the kernel can kill a process for lack of memory. Needs root."""
    group = MEMORY_GROUPS / name
    try:
        yield group
    finally:
        if group.is_dir():
            until(lambda: not (group / "cgroup.procs").read_text().strip(), "the memory group to be empty", 10)
            group.rmdir()


def has_memory_groups() -> bool:
    """True if such groups can be created here (control groups of version 1)."""
    return (MEMORY_GROUPS / "memory.limit_in_bytes").exists() and os.access(MEMORY_GROUPS, os.W_OK)


def _of_the_job(agent: int) -> list[psutil.Process]:
    """Processes of a job on an agent's node: Slurm's own, and all their descendants."""
    above = [one for one in psutil.Process(agent).parents() if "slurmstepd" in one.name()]
    return [one for root in above for one in (root, *root.children(recursive=True))]


class Cluster(throwaway.Cluster):
    """The throw-away Slurm of ``infra/slurm``, with the events that can happen to it."""

    def __init__(self, folder: Path, nodes: int, **options: Any) -> None:
        super().__init__(folder, nodes, **options)
        self._without_slurmd: set[str] = set()
        self._frozen: list[psutil.Process] = []
        self._cut: set[str] = set()

    def allocated(self, job_id: str) -> list[str]:
        """Nodes of a running job, in the order of its allocation."""
        nodes = self.command("squeue", "--noheader", "--jobs", job_id, "--format=%N")
        return self.command("scontrol", "show", "hostnames", nodes).split()

    def num_jobs(self, run_id: str) -> int:
        """Number of jobs ever submitted for a run that the cluster still remembers."""
        comments = self.command("squeue", "--noheader", "--states=all", "--format=%k").split()
        return sum(comment.startswith(f"{run_id}/") for comment in comments)

    def node_down(self, node: str) -> None:
        """Take a node out of service; its job ends with NODE_FAIL."""
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=fault")

    def back_in_service(self) -> None:
        """Return all nodes that were taken out of service, and wait until jobs can use them."""
        for node, state in self._node_states().items():
            if state.startswith(("down", "drain")):
                with contextlib.suppress(throwaway.ClusterError):  # a node that has just returned by itself
                    self.command("scontrol", "update", f"nodename={node}", "state=resume")
        # The star of a node that does not respond: on a busy machine, slurmd needs seconds to register.
        until(
            lambda: (
                not any(state.startswith(("down", "drain")) or "*" in state for state in self._node_states().values())
            )
        )

    def kill_node(self, node: str, agent: int) -> None:
        """SIGKILL a node's slurmd and everything of the job on it: to the other nodes, it seems to have lost power."""
        doomed = _of_the_job(agent)
        self.stop(f"slurmd-{node}", signal.SIGKILL)
        self._without_slurmd.add(node)
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def freeze_node(self, node: str, agent: int) -> None:
        """SIGSTOP a node's slurmd and everything of the job on it, until the run is over."""
        slurmd = self.pid(f"slurmd-{node}")
        self._frozen += [psutil.Process(slurmd), *_of_the_job(agent)]
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    @property
    def is_frozen(self) -> bool:
        """True if a node is frozen: processes on it cannot end."""
        return bool(self._frozen)

    def kill_stepd(self, agent: int) -> None:
        """SIGKILL the slurmstepd above an agent, and nothing below it."""
        for process in psutil.Process(agent).parents():
            if "slurmstepd" in process.name():
                process.kill()

    def cut_link(self, node: str) -> None:
        """Make the network swallow every packet of a node, until the run is over."""
        super().cut_link(node)
        self._cut.add(node)

    def is_at_work(self, run_id: str) -> bool:
        """True if a job of a run is in the queue."""
        comments = self.command("squeue", "--noheader", "--states=running,pending", "--format=%k").split()
        return any(comment.startswith(f"{run_id}/") for comment in comments)

    def preempt(self) -> None:
        """Submit a job to the partition ``first``, which has priority over all others; it takes all nodes for
        seconds."""
        words = (
            "--partition=first",
            f"--nodes={len(self.nodes)}",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=srun sleep 5",
        )
        self.command("sbatch", *words)

    def restore(self) -> None:
        """Remove all jobs and return all nodes to service."""
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._frozen.clear()
        for node in self._cut:
            self.mend_link(node)
        self._cut.clear()
        self.command("scancel", "--user=root")
        for node in sorted(self._without_slurmd):
            self.start(f"slurmd-{node}")
        self._without_slurmd.clear()
        self.back_in_service()
        until(lambda: set(self._node_states().values()) == {"idle"}, "all nodes to be idle", 60)

    def _node_states(self) -> dict[str, str]:
        lines = self.command("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)  # type: ignore[misc]
