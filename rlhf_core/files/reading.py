"""Files that another process writes, read so that none of them can hold or exhaust the reader.

Only regular files are opened: a FIFO, a device or a socket in the place of one would block the reader, and a
symbolic link would have another file read. No more of a file is held in memory than its reader can use: a document or
a line beyond the limit is refused or left out, whatever its size.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rlhf_core.files.lookups import looked_up

MAX_LINE_BYTES = 1 << 20
"""Longest line of an appended file, unless its reader takes longer ones."""
MAX_DOCUMENT_BYTES = 64 << 20
"""Largest file that is read as one JSON document: an evaluation with ten thousand kept samples has about 20 MiB."""

_SKIP_BYTES = 1 << 30
"""Most that is skipped of a line at a time: a hole of a terabyte must not hold the reader of all runs."""
_CHUNK_BYTES = 1 << 20

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnfitFile(OSError):
    """A file that is no regular one, or larger than any that is written in its place. Unlike other errors of the
    operating system it does not pass."""


def open_regular(path: Path, *, follow_link: bool = False) -> BufferedReader:
    """Open a regular file for reading, without waiting for anything. One that is missing is looked for a second time.

    Args:
        follow_link: open what a symbolic link of that name points to, as for files that a user names.

    Raises:
        UnfitFile: it is something else: a FIFO, a device, a folder, or a link.
        OSError: it is not there or cannot be opened.
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
        OSError: it is not there or cannot be read.
    """
    with open_regular(path, follow_link=follow_link) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise UnfitFile(errno.EFBIG, f"found more than {limit_bytes} bytes, expected at most that", str(path))
    return content


def bring_to_disk(path: Path) -> None:
    """Have the operating system write a file's content, or a folder's list of names, to the disk now.

    Raises:
        OSError: it is not there or cannot be written.
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
    """A whole line, without its newline."""

    begin: int
    """Byte of the file at which it begins."""
    text: bytes | None
    """None for a line that is too long, which is not held in memory."""


class FileLines(NamedTuple):
    """Lines that were read from a place on."""

    lines: list[FileLine]
    end: int
    """Offset at which to read on."""
    is_inside: bool
    """True if that is in the middle of a line that is too long, which is among ``lines`` already."""


def lines_of(
    file: BinaryIO, offset: int, limit_bytes: int, *, is_inside: bool = False, longest: int | None = None
) -> FileLines:
    """Whole lines of an open file from ``offset`` on, about ``limit_bytes`` of them, in bounded memory.

    Args:
        is_inside: the offset lies in a line that was too long; its rest is skipped.
        longest: longest line that is taken, in bytes. Default: ``MAX_LINE_BYTES``.
    """
    longest = MAX_LINE_BYTES if longest is None else longest
    file.seek(offset)
    if is_inside:
        offset, is_inside = _skip_line(file, offset)
        if is_inside:
            return FileLines([], offset, is_inside=True)
        file.seek(offset)
    block = file.read(limit_bytes)
    if len(block) == limit_bytes <= longest and b"\n" not in block:
        block += file.readline(longest + 1 - len(block))
    if len(block) > longest and b"\n" not in block:
        return FileLines([FileLine(offset, None)], *_skip_line(file, offset + len(block)))
    end = block.rfind(b"\n") + 1
    # Not splitlines(): that would also split at a stray carriage return, and positions of lines would no longer add up.
    lines, begin = [], offset
    for text in block[:end].split(b"\n")[:-1]:
        lines.append(FileLine(begin, text if len(text) <= longest else None))
        begin += len(text) + 1
    return FileLines(lines, offset + end, is_inside=False)


def _skip_line(file: BinaryIO, offset: int) -> tuple[int, bool]:
    """Offset after the line that ``offset`` lies in, or as far as it was skipped, and whether it goes on there."""
    limit = offset + _SKIP_BYTES
    while offset < limit and (chunk := file.read(_CHUNK_BYTES)):
        found = chunk.find(b"\n")
        if found >= 0:
            return offset + found + 1, False
        offset += len(chunk)
    return offset, True
