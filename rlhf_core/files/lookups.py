"""Lookups of names that another node may have created a moment ago.

An NFS client that does not find a name keeps that answer for as long as it believes the folder to be unchanged, and it
asks the server whether it is only every ``acdirmin`` to ``acdirmax`` seconds, by default 30 to 60 (nfs(5), "Directory
entry caching"). A process that polls for a file is what makes its node remember that there is none. Opening the folder
has the client ask at once, which is part of close-to-open consistency (``nfs_lookup_verify_inode`` in fs/nfs/dir.c of
Linux), and a folder that has changed loses its remembered answers.

So everything in a run directory that may not exist yet is looked for through this module, or opened through
:func:`rlhf_core.files.reading.open_regular`, which uses it. A name that is found costs nothing more. One that is not
costs a second lookup, and on NFS a single request however large the folder is.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def renew_lookup(path: Path) -> None:
    """Have the next lookup of a path that was not found ask the file server.

    This opens the nearest folder above it that exists: the folder of a new file may be new too.
    """
    for folder in path.parents:
        try:
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            continue
        except OSError:
            return  # the lookup itself reports why a folder cannot be used
        return


def status_of(path: Path) -> os.stat_result | None:
    """Status of a file or folder; None if there is none, even at a second look.

    Raises:
        OSError: the file system does not answer.
    """
    return _if_there(path.stat, path)


def is_there(path: Path) -> bool:
    """True if there is a file or folder, even if another node has just created it.

    Raises:
        OSError: the file system does not answer.
    """
    return status_of(path) is not None


def paths_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Paths in a folder whose names match a pattern, sorted; none if there is no such folder, even at a second look.

    Raises:
        OSError: the file system does not answer, or the folder must not be listed.
    """
    return [
        path for path in _if_there(lambda: sorted(folder.iterdir()), folder) or () if fnmatchcase(path.name, pattern)
    ]


def looked_up(lookup: Callable[[], Found], path: Path) -> Found:
    """Result of a lookup, made a second time if it finds nothing.

    Raises:
        FileNotFoundError: it finds nothing then either.
    """
    try:
        return lookup()
    except FileNotFoundError:
        renew_lookup(path)
        return lookup()


def _if_there(lookup: Callable[[], Found], path: Path) -> Found | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return looked_up(lookup, path)
    return None
