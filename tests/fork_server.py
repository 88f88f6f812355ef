"""The fork server for tests: a process that has imported the modules of agents and ranks once (``preloaded.py``)."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

PRELOADED = "preloaded"
"""All in one module: a test process has one such server, and who asks first starts it."""


def fork_server() -> ForkServerContext:
    """Multiprocessing context whose processes are forked from the fork server."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        forkserver.ensure_running()  # type: ignore[attr-defined]  # not in the stubs
    return context
