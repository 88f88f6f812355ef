"""Lookups of names that another node may have created just now.

An NFS client that does not find a name caches that answer for as long as it believes the folder to be unchanged, which
it checks with the server only every ``acdirmin`` to ``acdirmax`` seconds, by default 30 to 60 (nfs(5), "Directory entry
caching"). A process that polls for a file thus makes its node cache its absence. Opening the folder makes the client
check at once, as part of close-to-open consistency (``nfs_lookup_verify_inode`` in fs/nfs/dir.c of Linux), and discard
the cached answers if the folder has changed.

So everything in a run directory that may not exist yet is looked up through this module, or opened through
:func:`rlhf_core.files.reading.open_regular`, which uses it. A name that is found costs nothing extra. One that is not
costs a second lookup, and on NFS a single request regardless of the size of the folder.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def renew_lookup(path: Path) -> None:
    """Have the next lookup of a missing path ask the file server.

    This opens the nearest folder above it that exists: the folder of a new file may be new too.
    """
    for folder in path.parents:
        try:
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            continue
        except OSError:
            return  # the lookup itself reports the error
        return


def status_of(path: Path) -> os.stat_result | None:
    """Status of a file or folder; None if it is missing, even on a second lookup.

    Raises:
        OSError: the file system does not respond.
    """
    return _found_or_none(path.stat, path)


def is_there(path: Path) -> bool:
    """True if there is a file or folder, even if another node has created it just now.

    Raises:
        OSError: the file system does not respond.
    """
    return status_of(path) is not None


def paths_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Sorted paths in a folder whose names match a pattern; empty if the folder is missing, even on a second lookup.

    Raises:
        OSError: the file system does not respond, or does not permit listing the folder.
    """
    # Names first: to build and sort the paths of all entries takes longer than to list them.
    names = _found_or_none(lambda: os.listdir(folder), folder) or ()  # noqa: PTH208
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def looked_up(lookup: Callable[[], Found], path: Path) -> Found:
    """Result of a lookup, which is repeated once if it finds nothing.

    Raises:
        FileNotFoundError: it finds nothing the second time either.
    """
    try:
        return lookup()
    except FileNotFoundError:
        renew_lookup(path)
        return lookup()


def _found_or_none(lookup: Callable[[], Found], path: Path) -> Found | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return looked_up(lookup, path)
    return None
