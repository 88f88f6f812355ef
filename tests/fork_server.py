"""Fork servers for tests: processes that have imported the modules of agents and ranks once (``preloaded.py``)."""

import multiprocessing
import os
import site
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from unittest import mock

from rlhf_core.schemas.content import ContentReport

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


def content_report(spec: Path, code: Path) -> ContentReport:
    """Answer of the command ``check-content``, which takes longer to import what it needs than to check a small spec.

    Args:
        spec: file of the spec.
        code: folder to import the user's functions from.
    """
    from rlhf_core.training.probes.content import check_content

    # Not a pool of multiprocessing, whose processes may have no children: reward functions are tried in some.
    with ProcessPoolExecutor(1, fork_server(), site.addsitedir, (str(code),)) as pool:
        return pool.submit(check_content, spec).result()
