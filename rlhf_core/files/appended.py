"""Line-based files: appended by one writer, read up to the last newline.

A line that does not parse is skipped, because a killed writer may leave a torn one behind.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from rlhf_core.files.reading import FileLine, FileLines, UnfitFile, lines_of, open_regular

Model = TypeVar("Model", bound=BaseModel)


class LineWriter:
    """Appends schemas as JSON lines to a file that only this process writes.

    If the previous writer was killed in the middle of a line, the torn rest is terminated with a newline, so that it
    cannot swallow the next line. A file that is deleted or replaced while it is written is created again, with its
    earlier lines: they are still in the open file, as long as its file system keeps it.

    Args:
        on_loss: called with a sentence, before the next line is written, if the file was deleted, replaced or
            truncated.
    """

    def __init__(self, path: Path, on_loss: Callable[[str], None] = lambda text: None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._on_loss = on_loss
        self._open()

    @property
    def end(self) -> int:
        """Size of the file after the last line of this writer."""
        return self._end

    def write(self, model: BaseModel) -> None:
        """Append one line and pass it to the operating system: it survives a kill of this process."""
        lost = self._mend()
        if lost:
            self._on_loss(lost)
        self._append(model.model_dump_json().encode() + b"\n")
        self._end = os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Sync the written lines to disk: they survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        # Unbuffered: lines refused by a full disk must not stay in a buffer and appear later, after other lines.
        self._file = self._path.open("a+b", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        if self._end > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._append(b"\n")
                self._end += 1

    def _append(self, content: bytes) -> None:
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            error.filename = str(self._path)  # the system names a file only when it is opened
            raise

    def _mend(self) -> str:
        """Make sure that the next line goes into the file at this path. Returns a description of a loss, or an empty
        text."""
        own = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except OSError:
            if not self._path.parent.is_dir():
                return ""  # the folder itself is gone; the next access reports it
            there = None
        is_own = there is not None and (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
        if is_own and own.st_size >= self._end:
            return ""
        if is_own:
            lost = self._end - own.st_size
            self._file.close()
            self._open()  # terminates a torn line, which would swallow the next one
            return f"{self._path.name} was truncated during writing: {lost} bytes are lost"
        what = "deleted" if there is None else "replaced"
        return f"{self._path.name} was {what} during writing: {self._restore()}"

    def _restore(self) -> str:
        expected = self._end
        try:
            self._file.seek(0)
            kept = self._file.read()
        except OSError:  # deleted on another machine: NFS keeps open files only if deleted on this one
            kept = b""
        self._file.close()
        self._open()
        self._file.seek(0)
        found = self._file.read()
        if len(kept) < expected or not (kept.startswith(found) or found.startswith(kept)):
            return "its earlier lines are lost, later ones are kept"
        self._append(kept[len(found) :])
        return f"its {len(kept)} bytes were restored"


def append_lines(path: Path, *models: BaseModel) -> None:
    """Append schemas to a file that this process does not keep open.

    Raises:
        OSError: it cannot be written.
    """
    with closing(LineWriter(path)) as writer:
        for model in models:
            writer.write(model)


def read_lines(path: Path, offset: int = 0, limit_bytes: int = 16 << 20, *, longest: int | None = None) -> FileLines:
    """Read complete lines of an appended file from ``offset`` on, and the offset after the last of them.

    Reads about ``limit_bytes`` at most. A path without a regular file has no lines. For ``longest``, see
    :func:`rlhf_core.files.reading.lines_of`.
    """
    try:
        with open_regular(path) as file:
            return lines_of(file, offset, limit_bytes, longest=longest)
    except (FileNotFoundError, NotADirectoryError, UnfitFile):
        return FileLines([], offset)


@dataclass(frozen=True)
class FilePosition:
    """Position in an appended file, and the fingerprints by which a reader recognises the file.

    A file is recognised by its content. Its inode is weaker evidence: a restored copy has another one, and a file that
    was truncated and rewritten has the same one.
    """

    offset: int = 0
    tail: int = 0
    """Fingerprint of the last bytes before the offset; 0 if unknown."""
    head: int = 0
    """Fingerprint of the first bytes; 0 if unknown."""


def read_on(path: Path, place: FilePosition, limit_bytes: int = 16 << 20) -> tuple[list[FileLine], FilePosition, bool]:
    """Read complete lines of an appended file after a position, the position after them, and whether the file was
    replaced.

    A file that was truncated or replaced is read from its beginning: its bytes before the position are not the ones
    that were read. A file rewritten with the same lines is continued. A missing file has no lines, nor does a path that
    is not a regular file, nor a file that is shorter than before: another machine may see an older version of it for a
    while.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            if size < place.offset:
                is_other = bool(place.head) and size >= _HEAD_BYTES and _mark(file, 0, _HEAD_BYTES) != place.head
                if not is_other:
                    return [], place, False
            else:
                is_other = bool(place.tail) and _tail(file, place.offset) != place.tail
            begin = FilePosition() if is_other else place
            lines, end = lines_of(file, begin.offset, limit_bytes)
            head = _mark(file, 0, _HEAD_BYTES) if end >= _HEAD_BYTES else 0
            return lines, FilePosition(end, _tail(file, end), head), is_other
    except (FileNotFoundError, NotADirectoryError, UnfitFile):
        return [], place, False


def tail_mark(path: Path, offset: int) -> int:
    """Fingerprint of the last bytes before an offset, to recognise a file; 0 if it cannot be computed."""
    try:
        with open_regular(path) as file:
            return _tail(file, offset)
    except OSError:
        return 0


def is_as_read(path: Path, offset: int, mark: int) -> bool:
    """Return False if the bytes before an offset do not have this fingerprint. A shorter file counts as unchanged: it
    may be an older version, as seen from another machine."""
    try:
        with open_regular(path) as file:
            return not mark or file.seek(0, os.SEEK_END) < offset or _tail(file, offset) == mark
    except OSError:
        return True  # missing, unreachable, or not a file: its next reader reports it


_HEAD_BYTES = 64
_TAIL_BYTES = 256


def _tail(file: BinaryIO, end: int) -> int:
    return _mark(file, max(0, end - _TAIL_BYTES), end) if end else 0


def _mark(file: BinaryIO, begin: int, end: int) -> int:
    file.seek(begin)
    digest = hashlib.blake2b(file.read(end - begin), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 or 1  # fits a signed integer of 64 bits


def parse_lines(lines: Iterable[FileLine], schema: type[Model]) -> Iterator[Model]:
    """Parse JSON lines; skips lines that are torn, of another schema or too long."""
    for line in lines:
        if line.text is None:
            continue
        try:
            yield schema.model_validate_json(line.text)
        except ValidationError:
            continue


def read_blocks(path: Path, offset: int = 0, longest: int | None = None) -> Iterator[tuple[list[FileLine], int]]:
    """Yield all complete lines of an appended file from ``offset`` on, in blocks, each with the offset after it."""
    while True:
        lines, end = read_lines(path, offset, longest=longest)
        if end == offset:
            return
        yield lines, end
        offset = end


def read_models(path: Path, schema: type[Model]) -> list[Model]:
    """Read and parse all complete lines of an appended file."""
    return [model for lines, _ in read_blocks(path) for model in parse_lines(lines, schema)]


def read_tail(path: Path, limit_bytes: int) -> str:
    """Read the end of a text file, starting at the beginning of a line; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            content = file.read(limit_bytes)
    except OSError:
        return ""
    if size > limit_bytes:
        content = content[content.find(b"\n") + 1 :]
    return content.decode("utf-8", errors="replace")
