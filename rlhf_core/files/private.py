"""Files and folders private to one user, whatever the umask. Links planted by other users are not followed.

Permissions are set on creation and only ever reduced afterwards. Files of other users are left alone.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_OTHERS = 0o077
_GROUP_READS = 0o050
_MAX_SQUATTED = 100


def make_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, along with its missing parents; if this user already has the folder,
    close it to others.

    Raises:
        OSError: it cannot be created, or is not a folder.
    """
    for missing in reversed([one for one in path.parents if not one.exists()]):
        missing.mkdir(mode=FOLDER_MODE, exist_ok=True)
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    close(path)


def close(path: Path) -> None:
    """Remove the permissions of group and others from a path that this user owns; does nothing if it does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & _OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)


def is_open(path: Path) -> bool:
    """True if group or others have any permission on an existing file or folder."""
    try:
        return bool(path.stat().st_mode & _OTHERS)
    except OSError:
        return False


def give_rights_of(parent: Path, folder: Path) -> None:
    """Let the group of ``parent`` read a folder of this user in it, if the group, but not others, may read ``parent``.

    If others may enter ``parent`` too, the group's permission means nothing: the usual umask grants it.
    """
    mode = FOLDER_MODE | (_GROUP_READS if is_for_group(parent) else 0)
    folder.chmod(mode | stat.S_IMODE(folder.stat().st_mode) & stat.S_ISGID)


def is_for_group(folder: Path) -> bool:
    """True if the group of a folder, but not others, may read it."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return mode & _GROUP_READS == _GROUP_READS and not mode & 0o007


def write_new(path: Path, text: str) -> None:
    """Write a new file that only its owner may read.

    Raises:
        FileExistsError: the path exists, for instance as a link.
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def own_folder(parent: Path) -> Path:
    """Return this user's private folder for temporary files, the same at every call.

    If another user has taken the name, another name is used.

    Args:
        parent: World-writable folder, for instance ``/dev/shm``.

    Raises:
        OSError: none can be created.
    """
    base = f"rlhf-{os.geteuid()}"
    for name in (base, *(f"{base}-{number}" for number in range(1, _MAX_SQUATTED))):
        path = parent / name
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=FOLDER_MODE)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            close(path)
            return path
    return Path(tempfile.mkdtemp(prefix="rlhf-", dir=parent))
