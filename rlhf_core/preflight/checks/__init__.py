"""The static checks, grouped by subject. Importing this package registers them all, in this order."""

# ruff: noqa: F401
from rlhf_core.preflight.checks import algorithm, batch, content, data, environment, job_environment  # isort: skip
from rlhf_core.preflight.checks import memory, model, resources, durations, reward, rollout  # isort: skip
from rlhf_core.preflight.checks import command, command_launch, command_progress, command_arguments  # isort: skip
from rlhf_core.preflight.checks import promote, resume, trial, disabled_checks  # isort: skip
