"""Imports of agents and of ranks: the fork server makes them once (:mod:`fork_server`), for all that it forks.

The collector leaves alone what they made. DeepSpeed collects by hand whenever it makes an engine, and each rank would
go through all of torch.
"""

import atexit
import importlib
import os

from rlhf_core.garbage import uncollected

MODULES = (
    "rlhf_core.worker.__main__",
    "rlhf_core.worker.agent.phases",
    "rlhf_core.worker.groups.elastic",
    "rlhf_core.weight_sync.session",
    # What libraries import when it is first asked for.
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
)

with uncollected():
    from rlhf_core.training.warm import import_libraries

    for _module in MODULES:
        importlib.import_module(_module)
    import_libraries()

# The fork server ends at once, as what it forks does: libraries in C++ complain at length of what the collector leaves.
atexit.register(os._exit, 0)
