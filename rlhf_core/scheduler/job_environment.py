"""Environment that every scheduler gives a job. The command line is passed on unchanged.

That command line is the only interface between controller and agents. Nothing is pickled across it, because the nodes
may have another interpreter with other packages.
"""

from rlhf_core.machine.gpus import HIDDEN_FROM_HIP, HIP_VARIABLE, VISIBLE_VARIABLE
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.resources import JOB_VARIABLE, PASSED_VARIABLE, job_marker


def job_environment(request: JobRequest) -> dict[str, str]:
    """Variables added to the environment of a job: those of the settings, and the marker by which all its processes are
    found.

    Without GPUs, those of the node are hidden, so that a CPU run does not initialise, or fill, any of them.
    """
    variables = {JOB_VARIABLE: job_marker(request.run_id, request.placement.attempt)}
    if request.passed.names:
        variables[PASSED_VARIABLE] = ",".join(request.passed.names)
    if request.placement.gpus_per_node == 0:
        variables |= {VISIBLE_VARIABLE: "", HIP_VARIABLE: HIDDEN_FROM_HIP}
    return variables | request.slurm.environment
