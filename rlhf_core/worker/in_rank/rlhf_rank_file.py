"""Status of one rank of an external trainer: a small memory-mapped file shared by the rank and its worker.

Both sides map the same 64-bit words; each word is written by one side only. The rank loads this file as a top-level
module, so it uses the standard library alone.
"""

import mmap
import os
import struct

MAGIC = 0x726C68666D6402
WORDS = 16

PATH_VARIABLE = "RLHF_RANK_STATUS"
"""Environment variable with the path of the files, without the local rank that ends it."""

# Written by the rank. ENTERED and LEFT are numbers of the default process group, which are compared with those of other
# ranks; LEFT is the smaller one while the rank is in a collective of any group. MOVES grows with those of all groups.
PID, GROUP, ENTERED, LEFT, ANSWERED, BEATS, STEP, PHASE = range(1, 9)
MOVES = 12
# Written by the worker. STOP is 1 once the rank is to save and stop. LAUNCHER is the process id of the launch line on
# the node, which the worker that starts it writes for all ranks.
QUESTION, STOP, LAUNCHER = range(9, 12)

NO_GROUP, HAS_GROUP = 1, 2
"""Values of ``GROUP`` once torch is loaded: the rank has joined no process group, or has joined one. 0 before that."""
LAUNCHER_ENDED = -1
"""Value of ``LAUNCHER`` once the launch line has ended."""

_INT64 = struct.Struct("q")


class RankFile:
    """The words of one rank."""

    def __init__(self, path: str, create: bool = False) -> None:
        """Map the file.

        Raises:
            OSError: the file does not exist or cannot be created.
            ValueError: it is not a rank file.
        """
        self.path = path
        size = WORDS * _INT64.size
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                # All of it now: writing to a page that memory has no room for would kill the process (SIGBUS).
                os.posix_fallocate(descriptor, 0, size)
            self._words = memoryview(mmap.mmap(descriptor, size)).cast("q")
        except OSError as error:
            error.filename = path  # the system names a file only when it is opened
            raise
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
        """Write one word, in a single store."""
        self._words[word] = value

    @property
    def answer_path(self) -> str:
        """Path to which the rank writes its flight recorder on request."""
        return self.path + ".recorder"


def rank_path(prefix: str, local_rank: int) -> str:
    """Path of the file of one rank."""
    return prefix + "-" + str(local_rank)


def own_file() -> "RankFile | None":
    """The file of this process's rank; None if the process is not a rank but, for example, a helper of one."""
    prefix, local_rank = os.environ.get(PATH_VARIABLE), os.environ.get("LOCAL_RANK", "")
    if not prefix or not local_rank.isdigit():
        return None
    try:
        found = RankFile(rank_path(prefix, int(local_rank)))
    except (OSError, ValueError):
        return None
    # Processes started by a rank inherit its environment; the first process to get here is the rank. If it has ended,
    # it was a helper, such as a check of the environment by the script that starts the program.
    if not _is_there(found.get(PID)):
        found.set(PID, os.getpid())
    return found if found.get(PID) == os.getpid() else None


def _is_there(pid: int) -> bool:
    if pid == 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it belongs to another user
    return True
