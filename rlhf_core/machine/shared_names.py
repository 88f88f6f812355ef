"""Names of shared memory that are removed together with a folder of its user.

Shared memory of POSIX has its name in a folder of the node that all programs share, and keeps it when its processes are
killed. So its user claims a prefix, which is recorded in a folder that another process removes in the end.
"""

import contextlib
import glob
import shutil
from collections.abc import Iterator
from multiprocessing import shared_memory
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from secrets import token_hex
from typing import Any

from rlhf_core.machine.variables import with_variables

SHARED_MEMORY = Path("/dev/shm")
"""The node's in-memory file system, which has its shared memory by name."""
PREFIX_VARIABLE = "RLHF_SHARED_NAMES"
"""Environment variable with the prefix of processes that were spawned to share memory."""
_RECORD = ".names"


def claim_names(folder: Path, prefix: str) -> None:
    """Record that shared memory with such names is removed with a folder.

    Args:
        prefix: beginning of the names, for this folder alone.
    """
    (folder / f"{prefix}{_RECORD}").touch()


def remove_names(folder: Path) -> None:
    """Remove what has names in shared memory that were claimed in a folder. The memory itself is released with the last
    process that uses it, however that ends. A no-op if the folder is missing."""
    for record in folder.rglob(f"?*{_RECORD}"):
        for left in SHARED_MEMORY.glob(f"{glob.escape(record.name.removesuffix(_RECORD))}*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def remove_with_names(folder: Path) -> None:
    """Remove a folder, and what has names in shared memory that were claimed in it. A no-op if it is missing."""
    remove_names(folder)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def naming_shared_memory(prefix: str) -> Iterator[None]:
    """Let new shared memory of Python have names with a prefix, in the block and in processes forked in it.

    Processes spawned in it find the prefix in :data:`PREFIX_VARIABLE`, for :func:`name_shared_memory`.
    """
    plain = shared_memory.SharedMemory
    name_shared_memory(prefix)
    try:
        with with_variables({PREFIX_VARIABLE: prefix}):
            yield
    finally:
        shared_memory.SharedMemory = plain  # type: ignore[misc]


def name_shared_memory(prefix: str) -> None:
    """Let new shared memory of Python in this process have names with a prefix."""

    class Named(SharedMemory):
        def __init__(self, name: str | None = None, create: bool = False, size: int = 0, **further: Any) -> None:
            super().__init__(f"{prefix}-{token_hex(8)}" if create and name is None else name, create, size, **further)

    shared_memory.SharedMemory = Named  # type: ignore[misc]
