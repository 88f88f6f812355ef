"""Status of one rank of another program: a small memory-mapped file between the rank and the worker that follows it.

Both ends map the same 64-bit words, each written by one side alone. Loaded in the rank as a top-level module, with the
standard library alone.
"""

import mmap
import os
import struct
import time

MAGIC = 0x726C68666D6401
WORDS = 16

PATH_VARIABLE = "RLHF_RANK_STATUS"
"""Environment variable with the path of the files, without the local rank at its end."""

# Written by the rank.
PID, GROUP, ENTERED, LEFT, ANSWERED, BEATS, BEAT_NS, STEP, PHASE = range(1, 10)
# Written by the worker.
QUESTION, SAVE, STOP = range(10, 13)

NO_GROUP, HAS_GROUP = 1, 2
"""Values of ``GROUP`` once torch is loaded: the rank has joined no process group, or has. Before that it is 0."""

_INT64 = struct.Struct("q")


class RankFile:
    """The words of one rank."""

    def __init__(self, path: str, create: bool = False) -> None:
        """Map the file.

        Raises:
            OSError: it is not there, or cannot be made.
            ValueError: it is none of ours.
        """
        self.path = path
        size = WORDS * _INT64.size
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, size)
            self._words = memoryview(mmap.mmap(descriptor, size)).cast("q")
        finally:
            os.close(descriptor)
        if create:
            self._words[0] = MAGIC
        elif self._words[0] != MAGIC:
            raise ValueError("found " + hex(self._words[0]) + " at the begin of " + path + ", expected " + hex(MAGIC))

    def get(self, word: int) -> int:
        """Read one word."""
        return self._words[word]

    def set(self, word: int, value: int) -> None:
        """Write one word, with one store."""
        self._words[word] = value

    @property
    def answer_path(self) -> str:
        """Path of the content of the flight recorder, as the rank writes it on request."""
        return self.path + ".recorder"


def rank_path(prefix: str, local_rank: int) -> str:
    """Path of the file of one rank."""
    return prefix + "-" + str(local_rank)


def own_file() -> "RankFile | None":
    """File of the rank that this process is; None where it is none, or only a helper of one."""
    prefix, local_rank = os.environ.get(PATH_VARIABLE), os.environ.get("LOCAL_RANK", "")
    if not prefix or not local_rank.isdigit():
        return None
    try:
        found = RankFile(rank_path(prefix, int(local_rank)))
    except (OSError, ValueError):
        return None
    # A rank hands its environment on to processes that it starts; the first one is the rank.
    if found.get(PID) == 0:
        found.set(PID, os.getpid())
    return found if found.get(PID) == os.getpid() else None


def now_ns() -> int:
    """Monotonic time of the node in nanoseconds, as both ends read it."""
    return time.monotonic_ns()
