"""Reader of ``control.jsonl``. An unreadable line is an error, since the state of the run is a fold over all lines.

There is one exception: a line that was unfinished when its writer was killed was never acted upon, and is skipped. It
can only be the last one, since the next controller removes it before it writes. Version 0.1 terminated it with a
newline instead, so a journal of that version may also have a truncated line in the middle.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from rlhf_core.errors import JournalDamaged
from rlhf_core.files.appended import read_blocks, read_lines
from rlhf_core.files.reading import UnfitFile, open_regular
from rlhf_core.schemas.journal import JOURNAL_VERSION, JournalLine

MAX_LINE_BYTES = 16 << 20
"""Longest line of a journal. A placement names every node of the cluster, with some hundred bytes for each."""
_BLOCK_BYTES = 1 << 20


class Scanned(NamedTuple):
    """Line with its position in the file."""

    begin: int
    """Offset of its first byte."""
    end: int
    """Offset of the byte after it."""
    line: JournalLine


def read_journal(path: Path) -> list[JournalLine]:
    """Read all complete lines of a journal, without those that controllers wrote after they had lost the run; empty if
    there is no file.

    Raises:
        JournalDamaged: a line cannot be read.
    """
    kept: list[JournalLine] = []
    token = 0
    for found in scan_journal(path):
        if found.line.token >= token:
            token = found.line.token
            kept.append(found.line)
    return kept


def scan_journal(path: Path, offset: int = 0) -> Iterator[Scanned]:
    """Yield all complete lines of a journal from byte ``offset`` on.

    Raises:
        JournalDamaged: a line cannot be read; those before it have been yielded.
    """
    _require_a_file(path)
    for lines, end in read_blocks(path, offset, MAX_LINE_BYTES):
        for index, (begin, text) in enumerate(lines):
            if text is None:
                why = f"it is longer than {MAX_LINE_BYTES} bytes, the limit of the journal"
                raise JournalDamaged(_in_words(path, begin, why))
            try:
                line = _parse(text)
            except ValueError as error:
                following = lines[index + 1 :] or read_lines(path, end, longest=MAX_LINE_BYTES).lines
                if _is_cut_short(text) and following and _is_of_version_0_1(following[0].text or b""):
                    continue
                raise JournalDamaged(_in_words(path, begin, str(error))) from None
            yield Scanned(begin, begin + len(text) + 1, line)


def _require_a_file(path: Path) -> None:
    try:
        open_regular(path).close()
    except UnfitFile as error:
        raise JournalDamaged(
            f"{path} is not a readable journal: {error.strerror}. Without it the state of the run is unknown. Restore "
            "it from a backup of the run directory"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        return


def remove_unfinished_line(path: Path) -> None:
    """Remove the unfinished line of a killed writer. For the holder of the run's lease, before it writes.

    Raises:
        OSError: the file cannot be read or written.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            whole = _end_of_last_line(file, size)
    except FileNotFoundError:
        return
    if whole < size:
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _parse(text: bytes) -> JournalLine:
    """Parse one line.

    Raises:
        ValueError: it is not a line of a known version; the message says why.
    """
    try:
        line = JournalLine.model_validate_json(text)
    except ValidationError as error:
        _refuse_newer(_version(text))
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    _refuse_newer(line.version)
    return line


def _version(text: bytes) -> int:
    """Read the version of a line, whatever else it contains."""
    try:
        content = from_json(text)
    except ValueError:
        return JOURNAL_VERSION
    found = content.get("version") if isinstance(content, dict) else None
    return found if isinstance(found, int) else JOURNAL_VERSION


def _refuse_newer(version: int) -> None:
    if version > JOURNAL_VERSION:
        raise ValueError(
            f"found version {version} of the journal, expected at most {JOURNAL_VERSION}: a newer rlhf-flows wrote it. "
            "Use that version for this run"
        )


def _is_cut_short(text: bytes) -> bool:
    """True if it is an incomplete JSON object."""
    try:
        return isinstance(from_json(text, allow_partial=True), dict)
    except ValueError:
        return False


def _is_of_version_0_1(text: bytes) -> bool:
    try:
        return "version" not in _parse(text).model_fields_set
    except ValueError:
        return False


def _in_words(path: Path, begin: int, why: str) -> str:
    with open_regular(path) as file:
        blocks = (file.read(min(_BLOCK_BYTES, begin - start)) for start in range(0, begin, _BLOCK_BYTES))
        number = sum(block.count(b"\n") for block in blocks) + 1
    return (
        f"{path}, line {number} cannot be read: {why}. Without it the state of the run is unknown and no action is "
        "taken. Restore the line from a backup of the run directory. If there is no backup, keep a copy of the file, "
        f"delete the line (`sed -i {number}d {path}`), check the remaining state with `rlhf show`, then `rlhf resume "
        f"{path.parent.name}`"
    )
