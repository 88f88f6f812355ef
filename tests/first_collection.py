"""Collection by one pytest-xdist worker before the others, which then find all modules of the tests compiled.

In a fresh checkout, half of the processor time of a collection goes into compiling, and all workers would compile the
same modules at the same time.
"""

import fcntl
import os
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect while other workers wait if this worker comes first, otherwise after the first one."""
    if not hasattr(session.config, "workerinput"):
        return (yield)
    lock = os.open(session.config.rootpath, os.O_RDONLY)  # of a folder: it ends with this process and leaves no file
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
            fcntl.flock(lock, fcntl.LOCK_UN)
        return (yield)
    finally:
        os.close(lock)
