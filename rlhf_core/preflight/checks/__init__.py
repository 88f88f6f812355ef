"""The static checks, grouped by subject. Importing this package registers them all, in this order."""

from rlhf_core.preflight.checks import batch, data, content, model, memory, environment, job_environment, resources  # isort: skip
from rlhf_core.preflight.checks import command, command_launch, command_progress, command_arguments  # isort: skip
from rlhf_core.preflight.checks import promote, resume, trial, disabled_checks  # isort: skip

__all__ = [
    "batch",
    "command",
    "command_arguments",
    "command_launch",
    "command_progress",
    "content",
    "data",
    "disabled_checks",
    "environment",
    "job_environment",
    "memory",
    "model",
    "promote",
    "resources",
    "resume",
    "trial",
]
