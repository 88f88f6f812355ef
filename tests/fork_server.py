"""Fork servers for tests: processes that have imported the modules of agents and ranks once (``preloaded.py``)."""

import multiprocessing
import os
from collections import defaultdict
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from unittest import mock

PRELOADED = "preloaded"
WITH_VLLM = "preloaded_vllm"
"""The same modules and vLLM."""

_SERVERS: dict[str, ForkServer] = defaultdict(ForkServer)


def fork_server(preloaded: str = PRELOADED) -> ForkServerContext:
    """Multiprocessing context whose processes, until the next call, are forked from the fork server of a module.

    A test process has one such server per module, and who asks first starts it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
    server = _SERVERS[preloaded]
    server.set_forkserver_preload([preloaded])
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        server.ensure_running()
    forkserver.connect_to_new_process = server.connect_to_new_process
    return multiprocessing.get_context("forkserver")
