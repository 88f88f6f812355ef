"""The static checks, grouped by subject. Importing this package registers them all, in this order."""

from rlhf_core.preflight.checks import batch, data, content, model, memory, environment, job_environment, resources  # isort: skip
from rlhf_core.preflight.checks import launch_line, promote, resume, trial, disabled_checks  # isort: skip

__all__ = [
    "batch",
    "content",
    "data",
    "disabled_checks",
    "environment",
    "job_environment",
    "launch_line",
    "memory",
    "model",
    "promote",
    "resources",
    "resume",
    "trial",
]
