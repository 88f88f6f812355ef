"""Copies one rank's output, which a torch launcher writes to separate files, into the worker's log.

This lets ``rlhf logs`` show each rank separately and attributes an error to the rank that raised it. Programs that
start their ranks differently leave all output in the log of the node's first worker.
"""

import contextlib
import os
from pathlib import Path

COPY_BYTES = 1 << 20
"""Maximum number of bytes copied at once."""


class RankOutput:
    """Copies new output from one rank's files."""

    def __init__(self, folder: Path, local_rank: int, *, follows: bool) -> None:
        """Args:
        folder: Folder given to the launcher (``PET_LOG_DIR``).
        follows: False if the rank writes into the worker's log itself.
        """
        self._folder = folder
        self._pattern = f"*/attempt_*/{local_rank}/*.log"
        self._follows = follows
        self._offsets: dict[Path, int] = {}

    def copy(self) -> None:
        """Copy new output to standard output. If a file system fails or is full, it is tried again at the next call."""
        if not self._follows:
            return
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.glob(self._pattern)):
                self._copy(path)

    def _copy(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            while content := file.read(COPY_BYTES):
                written = 0
                while written < len(content):
                    written += os.write(1, content[written:])
                self._offsets[path] = file.tell()
