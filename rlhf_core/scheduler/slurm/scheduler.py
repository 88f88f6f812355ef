"""Slurm, through submitit, which only writes the batch script.

Three things differ from plain submitit. The script runs the agent's own command line, so no pickle is loaded in the
compute environment. The job's name, folder and comment tell the run and the attempt, so that a job whose submission was
never acknowledged can be found. And the job's state comes from the queue (:mod:`rlhf_core.scheduler.slurm.queue`):
submitit asks ``sacct``, which many clusters lack and which lags behind on the others.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.errors import SchedulerError, SchedulerUnavailable, SubmissionFailed
from rlhf_core.scheduler.base import JobRequest, JobState, JobStatus, LivingJob
from rlhf_core.scheduler.slurm import commands, queue
from rlhf_core.scheduler.slurm.jobs import has_ended, only_the_lost_remain, query_job, status_of
from rlhf_core.scheduler.slurm.nodes import gpu_type, leading_number, list_nodes, num_gpus, reserved_nodes, takes_no_job
from rlhf_core.scheduler.slurm.script import AgentExecutor
from rlhf_core.scheduler.slurm.settings import cluster_settings, federation, may_choose_partitions, partition_settings
from rlhf_core.schemas.resources import Inventory, Submission, job_marker, parse_job_marker

CANCEL_S = 90.0
"""Time that a cancelled job has to disappear; Slurm's own KillWait is 30 s by default."""
COMPLETING_S = 300.0
"""The same once Slurm is completing it, which needs no further order: the epilog of a site may take minutes."""
KILL_AFTER_S = 15.0
"""Time after which Slurm is ordered to kill the job."""


class SlurmScheduler:
    """Scheduler that runs jobs on a Slurm cluster; :mod:`rlhf_core.scheduler.base` documents the interface."""

    name = "slurm"

    def inventory(self) -> Inventory:
        """Count all nodes, including busy and down ones: jobs for these wait. Cores, memory and GPUs are those of the
        largest node, because a job may request it; Slurm has the last word. Nodes that accept no jobs are named.

        Raises:
            SchedulerUnavailable: Slurm does not answer.
            SchedulerError: it is not installed here, or has no nodes.
        """
        commands.require_controller()
        listed = list_nodes()
        if not listed:
            raise SchedulerError("sinfo lists no nodes")
        nodes = {one.name: one for one in listed}
        partitions: dict[str, tuple[str, ...]] = {}
        for one in listed:
            partitions[one.name] = (*partitions.get(one.name, ()), one.partition)
        settings = cluster_settings()
        # Slurm gives 1 MB to nodes whose memory is not configured.
        memory_gb = {name: node.memory_mb / 1024 for name, node in nodes.items() if node.memory_mb > 1}
        return Inventory(
            node_names=tuple(nodes),
            cpus_per_node=max(node.num_cpus for node in nodes.values()),
            memory_gb=max(memory_gb.values(), default=0.0),
            gpus_per_node=max(num_gpus(node.gres) for node in nodes.values()),
            node_gpus={name: num_gpus(node.gres) for name, node in nodes.items()},
            node_cpus={name: node.num_cpus for name, node in nodes.items()},
            node_memory_gb=memory_gb,
            node_gpu_types={name: kind for name, node in nodes.items() if (kind := gpu_type(node.gres))},
            out_of_service={name: node.state for name, node in nodes.items() if takes_no_job(node.state)},
            node_partitions=partitions,
            node_features={name: node.features for name, node in nodes.items()},
            reservations=reserved_nodes(),
            # sbatch uses these variables if the job names no partition or QOS.
            default_partition=os.environ.get("SBATCH_PARTITION")
            or next((one.partition for one in listed if one.in_default_partition), ""),
            default_qos=os.environ.get("SBATCH_QOS", ""),
            partition_settings=partition_settings(settings),
            may_choose_partition=may_choose_partitions(settings),
            federation=federation(),
            cluster=commands.cluster_name(),
        )

    def script(self, request: JobRequest) -> str:
        """Render the batch script."""
        return AgentExecutor(request).text("dry-run")

    def submit(self, request: JobRequest) -> Submission:
        """Submit the batch script once.

        Raises:
            SubmissionDeferred: Slurm refused it for now; the message quotes Slurm.
            SubmissionFailed: Slurm refused it for good, or a variable of ``slurm.pass_environment`` has no value here.
            SchedulerUnavailable: Slurm does not answer, or the file system fails. The job may have been accepted;
                :meth:`find` can tell.
        """
        commands.require_controller()
        if not Path(request.command[0]).is_absolute() and shutil.which(request.command[0]) is None:
            raise SubmissionFailed(
                f"{request.command[0]} is not a program on this machine; set RLHF_COMPUTE_PYTHON to an absolute path"
            )
        executor = AgentExecutor(request)
        cluster = commands.cluster_name()  # not asked for between the acceptance of the job and its record
        try:
            request.scheduler_dir.mkdir(parents=True, exist_ok=True)
            job_id = executor.submit_script()
        except OSError as error:
            raise SchedulerUnavailable(f"the batch script could not be written: {error}") from error
        return _submission(request.run_id, request.placement.attempt, job_id, request.command, cluster)

    def status(self, submissions: Sequence[Submission]) -> dict[str, JobStatus]:
        """Query the state of jobs, by job id, with one query for all jobs of this user."""
        found = queue.listing()
        if found.problem:
            return {one.job_id: JobStatus(JobState.UNKNOWN, found.problem) for one in submissions}
        return {one.job_id: _status_in(found, one) for one in submissions}

    def find(self, run_id: str, attempt: int, cluster: str = "") -> Submission | None:
        """Find the active job of an attempt by its marker; the first of several.

        Raises:
            SchedulerUnavailable: Slurm does not answer.
            SchedulerError: it is another cluster than the one the attempt was planned for.
        """
        _require_cluster(cluster)
        found = queue.listing(max_age_s=0.0)
        if found.problem:
            raise SchedulerUnavailable(found.problem)
        marker = job_marker(run_id, attempt)
        matching = [row for row in found.rows.values() if row.marker == marker and not has_ended(row)]
        first = min(matching, key=lambda row: leading_number(row.job_id), default=None)
        return None if first is None else _submission(run_id, attempt, first.job_id, (), commands.cluster_name())

    def living(self) -> Sequence[LivingJob]:
        """List this user's jobs whose marker names an attempt, with one query; without those that Slurm is completing,
        which no order can end any sooner.

        Raises:
            SchedulerUnavailable: Slurm does not answer.
        """
        found = queue.listing()
        if found.problem:
            raise SchedulerUnavailable(found.problem)
        rows = [row for row in found.rows.values() if not has_ended(row) and row.state != "COMPLETING"]
        marked = [(parse_job_marker(row.marker), row.job_id) for row in rows]
        cluster = commands.cluster_name()
        return [
            LivingJob(marker[0], _submission(*marker, job_id, (), cluster))
            for marker, job_id in marked
            if marker is not None
        ]

    def cancel(self, submission: Submission) -> bool:
        """Cancel the job and wait until it has left the queue; by then its processes have ended, even those that ignore
        SIGTERM.

        Takes up to ``CANCEL_S`` seconds, or ``COMPLETING_S`` if Slurm is completing it by then. Nodes that do not
        answer are not waited for: agents there have lost agent 0 by then and have ended their own processes, and the
        next agent ends those that a killed agent left behind.

        Raises:
            SchedulerUnavailable: the controller did not answer in that time.
            SchedulerError: the submission is not a Slurm job, or one of another cluster.
        """
        job_id = commands.require_job_id(submission.job_id)
        _require_cluster(submission.cluster)
        began = time.monotonic()
        killed, limit_s = False, CANCEL_S
        while True:
            found = queue.listing(max_age_s=0.0)
            if not found.problem:
                status = _status_in(found, submission)
                if status.state is JobState.ENDED or only_the_lost_remain(status):
                    return True
                limit_s = COMPLETING_S if status.scheduler_state == "COMPLETING" else CANCEL_S
                if not killed and time.monotonic() - began > KILL_AFTER_S:
                    killed = True
                    for words in (("--full", job_id), (f"{job_id}.0",)):
                        with contextlib.suppress(SchedulerError):
                            commands.run("scancel", "--signal=KILL", *words)
                elif not killed:
                    with contextlib.suppress(SchedulerError):
                        commands.run("scancel", job_id)
            if time.monotonic() - began > limit_s:
                if found.problem:
                    raise SchedulerUnavailable(f"the state of job {job_id} is unknown: {found.problem}")
                return False
            time.sleep(queue.FRESH_S if killed else 0.5)


def _status_in(found: queue.Listing, submission: Submission) -> JobStatus:
    """State of a job by a listing of the queue; one that is too new for it, or forgotten, is asked for by itself."""
    row = found.rows.get(submission.job_id)
    # Another cluster does not know the job, or has a different one with its number.
    if (row is None or row.marker != submission.marker) and (problem := commands.another_cluster(submission.cluster)):
        return JobStatus(JobState.UNKNOWN, problem)
    return query_job(submission) if row is None else status_of(row, submission.marker)


def _submission(run_id: str, attempt: int, job_id: str, command: tuple[str, ...], cluster: str) -> Submission:
    marker = job_marker(run_id, attempt)
    return Submission(
        attempt=attempt, scheduler="slurm", job_id=job_id, command=command, marker=marker, cluster=cluster
    )


def _require_cluster(name: str) -> None:
    problem = commands.another_cluster(name)
    if problem:
        raise SchedulerError(problem) if commands.cluster_name() else SchedulerUnavailable(problem)
