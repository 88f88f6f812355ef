"""Exit codes of ranks in the log of torch's launcher.

torchrun, and launchers built on it such as ``accelerate launch``, poll their ranks every 0.1 s. A rank that exits just
before such a poll is reaped before its worker can read the exit code; the launcher's log still holds it.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_core.files.appended import read_tail

TAIL_BYTES = 256 << 10
"""Part of the log that is searched, in bytes: the launcher writes these lines last."""
POLL_INTERVAL_S = 0.1


def await_exit_code(log: Path, pid: int, timeout_s: float, has_launcher_exited: Callable[[], bool]) -> int | None:
    """Exit code of a rank once its launcher has logged it; None if the launcher exits without doing so.

    The launcher first ends its other ranks, so the line comes some time after the exit.

    Args:
        timeout_s: Longest wait, in seconds: the launcher logs nothing of a rank that exited with 0, and may outlive it.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        is_last = has_launcher_exited() or time.monotonic() > deadline
        code = reported_exit_code(log, pid)
        if code is not None or is_last:
            return code
        time.sleep(POLL_INTERVAL_S)


def reported_exit_code(log: Path, pid: int) -> int | None:
    """Exit code of a rank according to its launcher, negative for a signal; None if the log does not contain it.

    Two forms are recognised (``torch.distributed.elastic``, torch 2.13): the line written when the first rank failed,
    ``failed (exitcode: -9) local_rank: 1 (pid: 4711) of binary: ...``, and the summary of all failures,
    ``exitcode  : -9 (pid: 4711)``.
    """
    found = re.search(rf"\bexitcode\s*: (-?\d+)(?:\) local_rank: \d+)? \(pid: {pid}\)", read_tail(log, TAIL_BYTES))
    return int(found[1]) if found else None
