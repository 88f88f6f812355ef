"""The static checks, by what they look at. Importing this package registers them all, in this order."""

from rlhf_core.preflight.checks import batch, data, model, environment, resources, resume, trial  # isort: skip

__all__ = ["batch", "data", "environment", "model", "resources", "resume", "trial"]
