"""The processes of the site daemon that export runs to experiment trackers, one for each tracker."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

from rlhf_core.condition_log import ConditionLog
from rlhf_core.config.site import Site
from rlhf_core.control.adopt import site_variables

log = logging.getLogger("rlhf.daemon")

PROGRAM = "rlhf_core.control.exporters.program"
"""Module of the processes. Started by its name: it loads what draws reports, which the daemon does without."""

RESTART_INTERVAL_S = 60.0
"""Shortest time between two starts of a process, in seconds."""

STOP_TIMEOUT_S = 5.0
"""Time to wait for the end of a killed process, in seconds. One that waits for a file system may not end."""

HANG_S = 600.0
"""Time in seconds that a tracker may take for what is new of one run. After that, the process exits."""

HUNG = 3
"""Exit code of a process whose tracker took longer."""

TO_BE_CORRECTED = 2
"""Exit code of a process that would end again until an administrator has corrected something."""


class Exporters:
    """Processes that are started again when they end."""

    def __init__(self, site: Site, clock: Callable[[], float] = time.monotonic) -> None:
        self._site = site
        self._clock = clock
        self._ends = ConditionLog(log.warning)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started_s: dict[str, float] = {}

    def keep(self) -> None:
        """Start the processes that are missing. Never waits for one."""
        for tracker in self._site.export.trackers:
            process = self._processes.get(tracker)
            code = process.poll() if process is not None else None
            if process is not None and code is None:
                continue
            if code is not None:
                self._ends.log_change(f"the export to {tracker} has ended: {_reason(code)}", tracker)
            is_due = self._clock() - self._started_s.get(tracker, -RESTART_INTERVAL_S) >= RESTART_INTERVAL_S
            if is_due and code != TO_BE_CORRECTED:
                self._start(tracker)

    def stop(self) -> None:
        """End the processes. They may be ended at any point: a new one compares what the tracker has."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        self._processes.clear()

    def _start(self, tracker: str) -> None:
        self._started_s[tracker] = self._clock()
        command = [sys.executable, "-P", "-m", PROGRAM, tracker, str(os.getpid())]
        environment = {**os.environ, **site_variables(self._site)}
        try:
            self._processes[tracker] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2)
        except OSError as error:  # no memory, for instance
            self._ends.log_change(f"the export to {tracker} could not be started: {error.strerror}", tracker)


def _reason(code: int) -> str:
    if code == HUNG:
        return f"the tracker did not answer for {HANG_S:.0f} s; it is begun again, and catches up"
    if code == TO_BE_CORRECTED:
        return "correct what the line above says, and restart the daemon; it catches up then"
    return f"exit code {code}; it is begun again, and catches up"
