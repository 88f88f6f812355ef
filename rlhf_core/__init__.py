"""rlhf-flows: an orchestrated job system for RLHF training on SLURM clusters.

The picture of the floors is in docs/architecture.md; the words (Run, Stage, Attempt, Restart ...) are in README.md.
"""

__version__ = "0.2.0"
