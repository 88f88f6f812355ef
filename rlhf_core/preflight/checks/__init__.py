"""The static checks, grouped by subject. Importing this package registers them all, in this order."""

from rlhf_core.preflight.checks import (
    algorithm,
    batch,
    content,
    data,
    environment,
    job_environment,
    memory,
    model,
    resources,
    reward,
    rollout,
)  # isort: skip

from rlhf_core.preflight.checks import command, command_launch, command_progress, command_arguments  # isort: skip
from rlhf_core.preflight.checks import promote, resume, trial, disabled_checks  # isort: skip

__all__ = [
    "algorithm",
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
    "reward",
    "rollout",
    "trial",
]
