"""Imports of agents and ranks, made once by the fork server (:mod:`fork_server`) for all processes forked from it.

The garbage collector leaves the imported objects alone. DeepSpeed calls the collector whenever it creates an engine,
and each rank would otherwise scan all of torch.
"""

import atexit
import importlib
import os

from rlhf_core.garbage import collect_rarely, uncollected

MODULES = (
    "rlhf_core.worker.__main__",
    "rlhf_core.worker.agent.phases",
    "rlhf_core.worker.command.follower",
    "rlhf_core.weight_sync.session",
    # Modules that libraries import on first use.
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
)

with uncollected():
    from rlhf_core.training.warm import import_libraries

    for _module in MODULES:
        importlib.import_module(_module)
    import_libraries()
collect_rarely()  # as `python -m rlhf_core.worker` does

# The fork server and its forks exit at once, because C++ libraries complain at length about uncollected objects.
atexit.register(os._exit, 0)
