"""Drawing the curves of a run in a separate process, so that the controller can keep renewing its lease.

The time and memory of a drawing are confined to that process, and this one never loads the plotting library.
"""

import subprocess
import sys

from rlhf_core.run_dir.run import RunDir

DRAWING_TIMEOUT_S = 60.0
"""Timeout of a drawing, in seconds."""


def draw_in_process(run_dir: RunDir, timeout_s: float = DRAWING_TIMEOUT_S) -> bytes:
    """Draw the curves in a separate process. The result is empty if there is nothing to draw or the drawing failed."""
    command = [sys.executable, "-P", "-m", "rlhf_core.control.views.curves", str(run_dir.root)]
    try:
        # A separate process group, because Ctrl-C is meant for the run.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, process_group=0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
