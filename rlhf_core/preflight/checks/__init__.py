"""The static checks, by what they look at. Importing this package registers them all, in this order."""

from rlhf_core.preflight.checks import batch, data, model, memory, environment, resources, resume, turned_off  # isort: skip

__all__ = ["batch", "data", "environment", "memory", "model", "resources", "resume", "turned_off"]
