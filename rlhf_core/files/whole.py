"""Files that are written as a whole: by write-then-rename, or once, by the first process."""

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from rlhf_core.files.private import FILE_MODE
from rlhf_core.files.reading import UnfitFile, read_document

Model = TypeVar("Model", bound=BaseModel)


NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems that cannot make a hard link, or not this one."""

PLACED_S = 5.0
"""Time after which the creator of an empty file has been killed before it gave the file its content."""

_USUAL_MODE = 0o666
SECRET_BYTES = 32
_SECRET = re.compile(rb"[0-9a-f]{%d}" % (2 * SECRET_BYTES))


def write_text(path: Path, text: str, mode: int = _USUAL_MODE) -> None:
    """Write a whole file such that readers see either the old or the new one, never a part; it survives a power cut.

    Args:
        mode: Its permissions, reduced by the umask.

    Raises:
        OSError: the file system is full, read-only or gone. The old file is then untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        _write_new(temporary, text, mode)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``, for the block to write; it replaces ``path`` if the block succeeds."""
    temporary = _temporary(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def _write_new(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_model(path: Path, model: BaseModel, mode: int = _USUAL_MODE) -> None:
    """Write a schema as JSON, whole (see :func:`write_text`)."""
    write_text(path, model.model_dump_json(indent=2) + "\n", mode)


def read_model(path: Path, schema: type[Model]) -> Model | None:
    """Read a schema; None if there is no file, or if it is not (yet) complete.

    Raises:
        OSError: the file system does not respond.
    """
    try:
        return schema.model_validate_json(read_document(path))
    except (FileNotFoundError, NotADirectoryError, UnfitFile, ValidationError):
        return None


def read_object(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file; empty if there is none."""
    try:
        content = from_json(read_document(path, follow_link=True))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_all(paths: Iterable[Path], schema: type[Model]) -> list[Model]:
    """Read a schema from each of several files, in order, without those for which :func:`read_model` has none."""
    return [model for path in paths if (model := read_model(path, schema)) is not None]


def create_once(path: Path, text: str, mode: int = _USUAL_MODE) -> bool:
    """Write a whole file that must not exist yet; False if another process was first.

    It is never seen while it is incomplete, not even after a kill.

    Args:
        mode: Its permissions, reduced by the umask.

    Raises:
        OSError: the file system is full, read-only or gone.
    """
    temporary = _temporary(path)
    try:
        _write_new(temporary, text, mode)
        place_once(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def place_once(made: Path, path: Path) -> None:
    """Give a whole file its name, which it must be the first to have.

    On a file system without hard links, the name is first taken by an empty file, which a rename replaces at once.

    Args:
        made: the file, in the folder of ``path`` and not empty; the caller removes what is left of it.

    Raises:
        FileExistsError: another process was first.
        OSError: the file system is full, read-only or gone.
    """
    try:
        path.hardlink_to(made)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            if not _stays_empty(path):
                raise
        made.replace(path)


def _stays_empty(path: Path) -> bool:
    """True if a file is still empty after a time in which its creator, if alive, would have replaced it."""
    deadline = time.monotonic() + PLACED_S
    while path.stat().st_size == 0:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def write_for_user(path: Path, text: str) -> None:
    """Write a new file to a folder of the user. If this fails, a partial file is removed.

    Raises:
        FileExistsError: the path exists.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def shared_secret(path: Path) -> bytes:
    """A random secret in a file that only its owner may read, the same for all callers; the first one creates it.

    Raises:
        OSError: it can be neither created nor read.
        ValueError: the file holds something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Before the lookup: on a network file system, creating it makes the file of another node visible.
    create_once(path, secrets.token_hex(SECRET_BYTES), FILE_MODE)
    with path.open("rb") as file:
        content = file.read(4 * SECRET_BYTES)
    if not _SECRET.fullmatch(content):
        raise ValueError(f"{path} contains no key: found {len(content)} bytes, expected {2 * SECRET_BYTES} hex digits")
    return content


def is_disk_full(error: OSError) -> bool:
    """Return True if no space is left, on the disk or in the user's quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b")


def comes_from_full_disk(error: BaseException | None) -> bool:
    """Return True if a full disk is the cause: torch and safetensors hide the system's error inside their own."""
    while error is not None:
        if isinstance(error, OSError) and is_disk_full(error):
            return True
        if _NO_SPACE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


GONE = ".gone"
"""Suffix of a folder that is being removed."""

RESERVE_BYTES = 64 << 10


@dataclass(frozen=True)
class Reserve:
    """A few blocks held back, so that the end of a run can be recorded on a disk that the run has filled.

    Args:
        num_files: further files held back, for a file system or a quota that allows no more of them.
    """

    path: Path
    num_files: int = 0

    def hold(self) -> None:
        """Allocate the blocks. If there is no space even now, the first write that does not fit raises an error."""
        try:
            with self.path.open("wb") as file:
                # Random bytes: some file systems store holes and zeros without allocating blocks.
                file.write(os.urandom(RESERVE_BYTES))
                file.flush()
                os.fsync(file.fileno())
            for further in self._further():
                further.touch()
        except OSError:
            self.free()

    def free(self, keep: int = 0) -> None:
        """Release the blocks, and all of the further files but ``keep``."""
        for file in (self.path, *self._further()[keep:]):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)

    def _further(self) -> list[Path]:
        return [self.path.with_name(f".{self.path.name}.{number}") for number in range(self.num_files)]


def remove_tree(path: Path) -> bool:
    """Remove a folder so that a reader never finds it partly removed under its own name; or a single file.

    Returns:
        False if some of its files could not be removed, and stay under a hidden name.
    """
    if not path.exists():
        return True
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return True
    doomed = path
    if path.suffix != GONE:  # left by an earlier removal
        doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}{GONE}")
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    return not doomed.exists()
