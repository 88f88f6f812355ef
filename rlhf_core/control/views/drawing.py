"""Drawing the curves of a run in a process of its own: a controller has a lease to renew.

The time and the memory of a drawing end with that process, and this one never loads what draws.
"""

import subprocess
import sys

from rlhf_core.run_dir.run import RunDir

DRAWING_TIMEOUT_S = 60.0
"""Longest time of a drawing, in seconds."""


def draw_in_process(run_dir: RunDir, timeout_s: float = DRAWING_TIMEOUT_S) -> bytes:
    """Draw the curves in a process of its own; empty where there is nothing to draw, or the drawing failed."""
    command = [sys.executable, "-P", "-m", "rlhf_core.control.views.curves", str(run_dir.root)]
    try:
        # A group of its own: Ctrl-C is for the run.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, process_group=0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
