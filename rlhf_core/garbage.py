"""Python's garbage collector, kept off what a program is made of.

    python -m rlhf_core.garbage MODULE [ARGUMENT]...    runs a program of another package like that

A process of ours makes some hundred thousand objects by importing Prefect or torch, nearly all of which stay until it
ends. The collector looks through them time and again while they are made, and once more as the process ends.
"""

import atexit
import contextlib
import gc
import runpy
import sys
from collections.abc import Iterator

RARE = 10_000
"""New objects between two looks of the collector; Python's own 700 is meant for programs of few."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Make large imports without the garbage collector, and keep it off what they made."""
    was_enabled = gc.isenabled()  # not where it is used inside another one, which goes on
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


def collect_rarely() -> None:
    """Have the collector look less often in this process, and not at all as it ends."""
    gc.set_threshold(RARE)
    atexit.register(gc.freeze)


if __name__ == "__main__":
    collect_rarely()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
