"""The process of a warm spare: it makes the imports of a worker, waits for its order, and becomes that worker."""

import json
import os
import sys
from collections.abc import Callable

from rlhf_core.garbage import uncollected
from rlhf_core.worker.roles import WARM, load
from rlhf_core.worker.warm_workers import READY, TAKEN
from rlhf_core.worker.worker_process import prepare_signals


def wait_for_order(orders: int, answers: int, become: Callable[[list[str]], int]) -> int:
    """Make the imports, and become a worker once an order comes. An agent that is gone sends none: this process ends.

    Args:
        orders: file descriptor from which the order is read, one line of JSON.
        answers: file descriptor to which the answers are written.
        become: runs the command line of the worker in this process.
    """
    prepare_signals()
    with uncollected():
        load(WARM)()
    os.write(answers, READY)
    with os.fdopen(orders, "rb") as pipe:
        line = pipe.readline()
    if not line.endswith(b"\n"):
        return 0
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environment"])
    arguments = order["arguments"]
    sys.argv[1:] = arguments
    os.write(answers, TAKEN)
    os.close(answers)
    return become(arguments)
