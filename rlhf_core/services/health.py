"""The health check of the services that ``rlhf up`` started: an event listener of supervisord.

supervisord starts again what has ended; it does not see a process that is stopped, or whose server answers nothing.
This one does, by the heartbeats. It ends such a process, and supervisord starts it again. When supervisord itself is
killed, the end of its pipe is read here at once, and a new one is started.

It runs as ``python -m rlhf_core.services.health INTERVAL_S NAME=STOP_TIMEOUT_S...`` and speaks the protocol of event
listeners (https://supervisord.org/events.html). Whatever it cannot do it tries again at the next event.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from rlhf_core.services.lifecycle import bring_back
from rlhf_core.services.presence import OURS, ServiceState, ServiceStatus, look
from rlhf_core.survival import Survived

SILENCE_TIMEOUT_S = 90.0
"""Time for which a service must have been silent before it is ended. `rlhf up` waits less: its user is there, and a
machine that is busy, or was suspended, makes services silent that are well."""


class HealthCheck:
    """Ends the services that are silent."""

    def __init__(
        self,
        home: Path,
        stop_timeouts_s: Mapping[str, float],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check nothing yet.

        Args:
            home: Home folder of the services.
            stop_timeouts_s: Time that each service has between SIGTERM and SIGKILL, by its name.
            interval_s: Seconds between two checks.
        """
        self._home = home
        self._stop_timeouts_s = stop_timeouts_s
        self._interval_s = interval_s
        self._clock = clock
        self._checked_at = float("-inf")
        self._silent_since: dict[tuple[str, int], float] = {}

    def check_if_due(self) -> None:
        """Check, unless the last check was less than an interval ago."""
        if self._clock() - self._checked_at >= self._interval_s:
            self._checked_at = self._clock()
            self.check()

    def check(self) -> None:
        """Send SIGTERM to what has been silent for long, and SIGKILL to what does not end by it."""
        found = [look(self._home, name) for name in self._stop_timeouts_s]
        silent = [
            one
            for one in found
            if one.state is ServiceState.SILENT and one.record is not None and one.record.started_by == OURS
        ]
        now = self._clock()
        self._silent_since = {self._key(one): self._silent_since.get(self._key(one), now) for one in silent}
        for one in silent:
            excess_s = now - self._silent_since[self._key(one)] - SILENCE_TIMEOUT_S
            if excess_s >= 0:
                self._end(one, kill=excess_s >= self._stop_timeouts_s[one.name])

    def _key(self, status: ServiceStatus) -> tuple[str, int]:
        return status.name, status.pid

    def _end(self, status: ServiceStatus, *, kill: bool) -> None:
        how = "killed" if kill else "ended"
        _log(f"the {status.name} (process {status.pid}) has sent no heartbeat for {SILENCE_TIMEOUT_S:g} s and is {how}")
        if status.record is not None and status.record.is_alive:
            os.kill(status.pid, signal.SIGKILL if kill else signal.SIGTERM)
            os.kill(status.pid, signal.SIGCONT)  # a stopped process receives nothing else


def listen(events: IO[str], answers: IO[str], on_tick: Callable[[], None]) -> None:
    """Take events from supervisord until it is gone.

    Args:
        events: Its events: a line of ``key:value`` pairs each, and as many characters as ``len`` says.
        answers: Told that this process is ready for an event, and that it is done with it.
        on_tick: Called at each event.
    """
    # Where it is killed while this process starts or checks, the pipe for the answers is the first to show it.
    with contextlib.suppress(BrokenPipeError):
        while True:
            answers.write("READY\n")
            answers.flush()
            header = dict(pair.split(":", 1) for pair in events.readline().split())
            if not header:
                return
            events.read(int(header["len"]))
            with Survived() as found:  # of a full disk, say: the check is made again at the next event
                on_tick()
            if found.error is not None:
                _log(f"the services could not be checked: {found.problem}")
            answers.write("RESULT 2\nOK")
            answers.flush()


def _log(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def main() -> None:
    """Check the services of ``RLHF_HOME`` for as long as supervisord lives, and bring it back when it was killed."""
    home = Path(os.environ["RLHF_HOME"])
    stop_timeouts_s = {name: float(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
    check = HealthCheck(home, stop_timeouts_s, float(sys.argv[1]))
    listen(sys.stdin, sys.stdout, check.check_if_due)
    bring_back(home, stop_timeouts_s)


if __name__ == "__main__":
    main()
