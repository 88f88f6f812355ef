"""The curves of a run as a picture, drawn by a process of its own.

A drawing takes a second or two of processor time and a hundred megabytes; neither may be the controller's, which has a
lease to keep, and may have fifty neighbours on its machine. Its process is given the path of a run directory, and
gives a PNG back.
"""

import base64
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_core.run_dir import RunDir

EVERY_S = 30.0
"""Least time between two pictures."""

AGE_SHARE = 0.02
"""The older a run, the less a picture changes in half a minute: the next one may wait for this share of its age."""

DRAWING_S = 60.0
"""Longest time of a drawing; what takes longer is ended."""

MAX_BYTES = 150_000
"""A larger picture is not shown: the server keeps it in its database."""


@dataclass
class Curves:
    """When to draw, and the picture."""

    run_dir: RunDir
    clock: Callable[[], float] = time.monotonic
    _began: float | None = None
    _drawn_at: float | None = None
    _drawn: tuple[int, int, int] | None = None

    def is_due(self, place: tuple[int, int, int], *, last: bool = False) -> bool:
        """Whether it is time for a picture.

        Args:
            place: attempt, restart and step: nothing new is drawn where nothing was done.
            last: the run has ended.
        """
        now = self.clock()
        self._began = now if self._began is None else self._began
        if place == self._drawn or not place[-1]:
            return False
        wait_s = max(EVERY_S, AGE_SHARE * (now - self._began))
        return last or self._drawn_at is None or now - self._drawn_at >= wait_s

    def draw(self, place: tuple[int, int, int]) -> str:
        """The picture as a data URI; empty where it could not be drawn: a run goes on without."""
        self._drawn_at, self._drawn = self.clock(), place
        picture = picture_of(self.run_dir)
        if not picture or len(picture) > MAX_BYTES:
            return ""
        return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def picture_of(run_dir: RunDir, timeout_s: float = DRAWING_S) -> bytes:
    """The PNG; empty where there is nothing to draw, or the drawing failed or took too long."""
    command = [sys.executable, "-P", "-m", "rlhf_core.render.curves_image", str(run_dir.root)]
    try:
        # A group of its own: a Ctrl-C is for the run.
        drawn = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, process_group=0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return drawn.stdout if drawn.returncode == 0 else b""
