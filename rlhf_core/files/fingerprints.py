"""Fingerprints of files and folders: to verify that nodes read the same data, and that nothing has changed since."""

import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size are read completely; larger ones are sampled."""
PIECES = 64
PIECE_BYTES = 64 << 10
NOT_THERE = "not there"
"""Fingerprint of a path that does not exist."""


def fingerprint(path: Path, max_files: int | None = None) -> str:
    """Hash of a file, or of all files below a folder with their names; "not there" if the path is neither.

    Of a file above 64 MiB, only its size and 64 evenly spread pieces of 64 KiB are hashed: a change in between goes
    unseen.

    Args:
        max_files: of a folder with more files, only this many names and sizes are hashed. Default: no limit.

    Raises:
        OSError: a file cannot be read, which says nothing about its content.
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        if path.is_dir():
            _add_folder(digest, path, max_files)
        elif path.exists() and not path.is_file():
            return "not a regular file"
        else:
            _add_file(digest, path)
    except FileNotFoundError:
        return NOT_THERE
    return digest.hexdigest()


def fingerprint_or_problem(path: Path, max_files: int | None = None) -> str:
    """Return :func:`fingerprint`, or the reason for having none, as a fact to show and to compare between nodes."""
    try:
        return fingerprint(path, max_files)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _add_folder(digest: "hashlib._Hash | hashlib.blake2b", path: Path, max_files: int | None) -> None:
    inside = (file for file in _below(path) if file.is_file() and file.suffix != ".pyc")
    files = list(itertools.islice(inside, None if max_files is None else max_files + 1))
    whole = max_files is None or len(files) <= max_files
    for file in sorted(files):
        digest.update(os.fsencode(file.relative_to(path)))
        if whole:
            _add_file(digest, file)
        else:
            digest.update(file.stat().st_size.to_bytes(8, "little"))


def _below(path: Path) -> Iterator[Path]:
    """Everything below a folder but folders, in the same order on all nodes: only the first part of it may count."""
    for folder, folders, files in os.walk(path):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(files))


def _add_file(digest: "hashlib._Hash | hashlib.blake2b", path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        step, length = (size, size) if size <= WHOLE_FILE_BYTES else (size // PIECES, PIECE_BYTES)
        for offset in range(0, size, max(step, 1)):
            file.seek(offset)
            digest.update(file.read(length))
