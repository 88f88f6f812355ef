"""The static checks, grouped by subject. Importing this package registers them all, in this order."""

# ruff: noqa: F401
from rlhf_core.preflight.checks import algorithm, batch, content, reward_trials, data  # isort: skip
from rlhf_core.preflight.checks import environment, job_environment, memory, model  # isort: skip
from rlhf_core.preflight.checks import resources, durations, reward, rollout  # isort: skip
from rlhf_core.preflight.checks import command, command_launch, command_progress, command_arguments  # isort: skip
from rlhf_core.preflight.checks import promote, resume, trial, disabled_checks  # isort: skip
