"""Environment variables of Slurm's commands, which read options from them. Variables of a user's shell, or of an
allocation that a run is submitted from, must not change what a job requests or which jobs a query lists."""

from collections.abc import Mapping

from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import JOB_END_VARIABLE

_QUERIES = ("SQUEUE_", "SINFO_", "SCONTROL_", "SACCT_", "SCANCEL_", "SLURM_TIME_FORMAT")
"""Prefixes of the options of queries: a filter such as SQUEUE_PARTITION would hide jobs that are running."""

_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_")
"""Prefixes of the variables that Slurm sets in a job. Those of an outer job contradict the options of a new one."""
_OF_THE_CLUSTER = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
"""Variables with these prefixes that are needed to reach the cluster."""

_OF_THE_SCRIPT = frozenset(
    f"SBATCH_{name}"
    for name in (
        *("ARRAY_INX", "CPUS_PER_GPU", "ERROR", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "INPUT", "JOB_NAME"),
        *("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE", "NO_KILL", "OPEN_MODE", "OUTPUT", "REQUEUE", "SIGNAL"),
        *("TIMELIMIT", "WAIT", "CLUSTERS"),
    )
)
"""Options that every job sets itself or that would contradict it; sbatch prefers variables to the batch script."""
_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_GRES": "gres",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
}
"""Defaults of options, used if ``[slurm]`` does not set them."""

OPTIONS_OF_THE_JOB = {
    "array": "a run has one job per attempt",
    "chdir": "the job starts in its own folder of the run directory, by which it is found",
    "clusters": "jobs are queried and cancelled on one cluster; set SLURM_CLUSTERS where the services start",
    "comment": "it names the run and the attempt",
    "error": "the log is in the run directory",
    "job-name": "it is the name of the run, by which the job is found",
    "nodes": "set resources.num_nodes",
    "ntasks": "one agent runs on every node; set resources.ranks_per_node",
    "ntasks-per-node": "one agent runs on every node; set resources.ranks_per_node",
    "output": "the log is in the run directory",
    "requeue": "rlhf-flows submits the next attempt itself",
    "signal": "set slurm.save_lead_s",
    "time": "set resources.time_limit_s",
    "wait": "a submission returns at once",
}
"""Options of sbatch that ``slurm.extra`` must not contain, each with the reason or the setting to use."""


def for_queries(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which squeue, sinfo, scontrol, sacct and scancel take no options from variables."""
    return {name: value for name, value in environment.items() if not name.startswith(_QUERIES)}


def for_submission(environment: Mapping[str, str], slurm: SlurmSpec) -> dict[str, str]:
    """An environment in which sbatch reads only defaults from variables, and only those that the job does not set."""

    def is_kept(name: str) -> bool:
        if name.startswith(_JOB):
            return name in _OF_THE_CLUSTER
        return name not in _OF_THE_SCRIPT and not (name in _DEFAULTS and getattr(slurm, _DEFAULTS[name]))

    return {name: value for name, value in environment.items() if is_kept(name)}


def end_of_job(request: JobRequest) -> str:
    """Line of a job's script that exports the time at which the limit ends the job.

    Slurm itself tells it from 23.02 on. Before, it is counted from the start of the script, which follows the start of
    the job by the time of its prolog.
    """
    return f'export {JOB_END_VARIABLE}="${{SLURM_JOB_END_TIME:-$(($(date +%s) + {request.time_limit_s}))}}"'


def export_option(request: JobRequest, environment: Mapping[str, str]) -> list[str]:
    """Names that sbatch must export if the job does not export everything; it takes the values from its own
    environment."""
    exported = next(reversed(request.slurm.in_extra("export")), "") or environment.get("SBATCH_EXPORT") or "ALL"
    if not request.passed.names or "ALL" in exported.upper().split(","):
        return []
    kept = [] if exported.upper() in ("NONE", "NIL") else [exported]
    return [f"--export={','.join([*kept, *request.passed.names])}"]
