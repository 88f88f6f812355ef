"""Reads of files that other processes write, such that no file can block or exhaust the reader.

Only regular files are opened: a FIFO, a device or a socket in the place of one would block the reader, and a symbolic
link would redirect it to another file. The memory used is bounded: a document beyond the limit is refused, and a line
beyond it is skipped, whatever its size.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rlhf_core.files.lookups import looked_up

MAX_LINE_BYTES = 1 << 20
"""Longest line of an appended file, unless the reader sets another limit."""
MAX_DOCUMENT_BYTES = 64 << 20
"""Largest file that is read as one JSON document: an evaluation with ten thousand samples has about 20 MiB."""

MAX_SKIP_BYTES = 1 << 30
"""Most bytes of a line skipped at a time: a sparse file of a terabyte must not block the reader of all runs. What
follows counts as another line."""
_CHUNK_BYTES = 1 << 20

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnfitFile(OSError):
    """A file that is not a regular file, or is larger than any valid one. Unlike other errors of the operating system,
    this is not temporary."""


def open_regular(path: Path, *, follow_link: bool = False) -> BufferedReader:
    """Open a regular file for reading, without blocking. A missing file is looked up a second time.

    Args:
        follow_link: open the target of a symbolic link, as for files that a user names.

    Raises:
        UnfitFile: it is not a regular file, but a FIFO, a device, a folder or a link.
        OSError: it does not exist or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    try:
        descriptor = looked_up(lambda: os.open(path, flags), path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _unfit(path, "a symbolic link") from None
        if error.errno == errno.ENXIO:
            raise _unfit(path, "a socket or a device without a driver") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise _unfit(path, next((kind for is_kind, kind in _KINDS if is_kind(mode)), "something else"))


def read_document(path: Path, limit_bytes: int = MAX_DOCUMENT_BYTES, *, follow_link: bool = False) -> bytes:
    """Read a whole regular file that is not larger than the limit.

    Raises:
        UnfitFile: it is larger, or not a regular file.
        OSError: it does not exist or cannot be read.
    """
    try:
        content = _read(path, limit_bytes + 1, follow_link=follow_link)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        # On NFS, a file that another node replaces between its opening and its reading is gone: read the new one.
        content = _read(path, limit_bytes + 1, follow_link=follow_link)
    if len(content) > limit_bytes:
        raise UnfitFile(errno.EFBIG, f"found more than {limit_bytes} bytes, expected at most that", str(path))
    return content


def _read(path: Path, num_bytes: int, *, follow_link: bool) -> bytes:
    with open_regular(path, follow_link=follow_link) as file:
        return file.read(num_bytes)


def bring_to_disk(path: Path) -> None:
    """Sync a file's content, or a folder's list of names, to disk.

    Raises:
        OSError: it does not exist or cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unfit(path: Path, found: str) -> UnfitFile:
    return UnfitFile(errno.EINVAL, f"found {found}, expected a regular file", str(path))


# ---------------------------------------------------------------------------------------------------------------------
# Lines


class FileLine(NamedTuple):
    """A complete line, without its newline."""

    begin: int
    """Byte offset of the line in the file."""
    text: bytes | None
    """None for a line that is too long, which is not held in memory."""


class FileLines(NamedTuple):
    """Lines read from an offset on."""

    lines: list[FileLine]
    end: int
    """Offset at which to continue."""


def lines_of(file: BinaryIO, offset: int, limit_bytes: int, *, longest: int | None = None) -> FileLines:
    """Complete lines of an open file from ``offset`` on, about ``limit_bytes`` of them, in bounded memory.

    Args:
        longest: longest accepted line in bytes. Default: ``MAX_LINE_BYTES``.
    """
    longest = MAX_LINE_BYTES if longest is None else longest
    file.seek(offset)
    block = file.read(limit_bytes)
    if len(block) == limit_bytes <= longest and b"\n" not in block:
        block += file.readline(longest + 1 - len(block))
    if len(block) > longest and b"\n" not in block:
        return FileLines([FileLine(offset, None)], _end_of_line(file, offset + len(block)))
    end = block.rfind(b"\n") + 1
    # Not splitlines(): it also splits at a stray carriage return, and the offsets of lines would no longer add up.
    lines, begin = [], offset
    for text in block[:end].split(b"\n")[:-1]:
        lines.append(FileLine(begin, text if len(text) <= longest else None))
        begin += len(text) + 1
    return FileLines(lines, offset + end)


def _end_of_line(file: BinaryIO, offset: int) -> int:
    """Offset after the line around ``offset``, or the one reached."""
    limit = offset + MAX_SKIP_BYTES
    while offset < limit and (chunk := file.read(_CHUNK_BYTES)):
        found = chunk.find(b"\n")
        if found >= 0:
            return offset + found + 1
        offset += len(chunk)
    return offset
