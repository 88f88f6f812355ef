"""Environment that every scheduler gives a job. The command line is passed on unchanged.

The command line is the seam between the two towers. Nothing is pickled across it: the nodes may have another
interpreter, with other packages.
"""

from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.resources import JOB_VARIABLE, PASSED_VARIABLE, job_marker


def job_environment(request: JobRequest) -> dict[str, str]:
    """Variables added to the environment of a job; among them the marker by which everything of the job is found again.

    Without GPUs, CUDA devices are hidden: a CPU run must not wake up, or fill, a GPU that was not asked for.
    """
    variables = dict(request.environment)
    variables[JOB_VARIABLE] = job_marker(request.run_id, request.placement.attempt)
    if request.passed.names:
        variables[PASSED_VARIABLE] = ",".join(request.passed.names)
    if request.placement.gpus_per_node == 0:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables
