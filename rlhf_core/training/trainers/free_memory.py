"""Free memory that a process keeps: glibc's heap holds what was freed, for later allocations.

Activations of long sequences on CPU come and go in pieces of different sizes, few of which fit where others were.
Between two passes the heap then holds as much again as is in use.
"""

import ctypes
from collections.abc import Callable

KEPT_BYTES = 72 * 2**20
"""Free memory that is left to the heap: to return it and have it back costs more than it is worth."""


LONG_SEQUENCE = 1024
"""Tokens from which passes return free memory. Passes over short sequences reuse it, and would spend a third of their
time on having it back."""


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2`` (mallinfo(3))."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def return_free_memory() -> bool:
    """Return the pages of the heap's free memory to the system if they are many; true if it did.

    Takes 0.1 ms where they are few, and about 10 ms for 200 MiB. Does nothing without glibc 2.33 or newer.
    """
    if _mallinfo2 is None or _mallinfo2().fordblks <= KEPT_BYTES:
        return False
    return bool(_LIBC.malloc_trim(0))


_LIBC = ctypes.CDLL(None)
_mallinfo2: Callable[[], _MallocInfo] | None = getattr(_LIBC, "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallocInfo  # type: ignore[attr-defined]
