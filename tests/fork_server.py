"""The process that tests fork others from: it has made the imports of agents and of ranks once."""

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

PRELOADED = (
    "rlhf_core.worker.__main__",
    "rlhf_core.worker.agent",
    "rlhf_core.worker.groups.elastic",
    "rlhf_core.training.evaluation",
    "rlhf_core.training.trainers.run",
    "rlhf_core.weight_sync.session",
)
"""All in one list: a test process has one such server, and who asks first starts it."""


def fork_server() -> ForkServerContext:
    """Context whose processes are forked from it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context
