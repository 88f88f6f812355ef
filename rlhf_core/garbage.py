"""Less work for Python's garbage collector in programs with many long-lived objects.

    python -m rlhf_core.garbage MODULE [ARGUMENT]...    runs a module of another package with fewer collections

Importing Prefect or torch creates hundreds of thousands of objects, nearly all of which live until the process exits.
By default, the collector traverses them repeatedly while they are created, and once more at exit.
"""

import atexit
import contextlib
import gc
import runpy
import sys
from collections.abc import Iterator

RARE = 10_000
"""Allocations between collections; Python's default of 700 is meant for programs with few objects."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the collector for the block, such as a large import, and freeze the objects that exist at its end."""
    was_enabled = gc.isenabled()  # False in a nested block: the outer one goes on
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


def collect_rarely() -> None:
    """Make collections rarer in this process, and skip the one at exit."""
    gc.set_threshold(RARE)
    atexit.register(gc.freeze)


def run_module() -> None:
    """Run the module that this program's arguments name, with the rest of them and rare collections."""
    collect_rarely()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_module()
