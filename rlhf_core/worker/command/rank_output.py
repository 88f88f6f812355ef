"""Output of one rank, which a launcher of torch's writes to files of its own: copied into the worker's log.

With it ``rlhf logs`` shows each rank by itself, and an error is attributed to the rank that raised it. Programs that
start their ranks in another way leave all output in the log of the first worker of the node.
"""

import os
from pathlib import Path

COPY_BYTES = 1 << 20
"""Most bytes copied at once."""


class RankOutput:
    """Copies what is new of the files of one rank."""

    def __init__(self, folder: Path, local_rank: int, *, follows: bool) -> None:
        """Args:
        folder: Folder that was given to the launcher (``PET_LOG_DIR``).
        follows: False where the rank writes into the worker's log itself.
        """
        self._folder = folder
        self._pattern = f"*/attempt_*/{local_rank}/*.log"
        self._follows = follows
        self._offsets: dict[Path, int] = {}

    def copy(self) -> None:
        """Copy what is new to standard output. A disk that is full loses it, and nothing else."""
        if not self._follows:
            return
        for path in sorted(self._folder.glob(self._pattern)):
            try:
                self._copy(path)
            except OSError:
                return

    def _copy(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            while content := file.read(COPY_BYTES):
                written = 0
                while written < len(content):
                    written += os.write(1, content[written:])
                self._offsets[path] = file.tell()
