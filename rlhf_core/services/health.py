"""Health check of the services that ``rlhf up`` started: an event listener of supervisord.

supervisord restarts programs that exit, but does not notice a stopped process or a server that no longer answers. The
health check finds these by their missing heartbeats and ends them, and supervisord restarts them. If supervisord itself
is killed, the health check sees the closed pipe at once and starts a new one.

It runs as ``python -m rlhf_core.services.health INTERVAL_S NAME=STOP_TIMEOUT_S...`` and speaks the protocol of event
listeners (https://supervisord.org/events.html). Anything that fails is retried at the next event.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from rlhf_core.services.lifecycle import restart_supervisord
from rlhf_core.services.presence import OURS, ServiceState, ServiceStatus, service_status
from rlhf_core.survival import Survived

SILENCE_TIMEOUT_S = 90.0
"""Silence after which the health check ends a service. `rlhf up` waits less, because its user is present; this limit is
longer because healthy services go silent on a machine that is busy or was suspended."""
START_TIMEOUT_S = 600.0
"""Time without a first heartbeat after which the health check ends a service. A server may have to migrate its database
before it sends one."""
_TIMEOUTS_S = {ServiceState.SILENT: SILENCE_TIMEOUT_S, ServiceState.STARTING: START_TIMEOUT_S}


class HealthCheck:
    """Ends services that have gone silent, or never become ready."""

    def __init__(
        self,
        home: Path,
        stop_timeouts_s: Mapping[str, float],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up the check without running it.

        Args:
            home: Home folder of the services.
            stop_timeouts_s: Time between SIGTERM and SIGKILL for each service, by name.
            interval_s: Seconds between two checks.
        """
        self._home = home
        self._stop_timeouts_s = stop_timeouts_s
        self._interval_s = interval_s
        self._clock = clock
        self._checked_at = float("-inf")
        self._silent_since: dict[tuple[str, int, ServiceState], float] = {}

    def check_if_due(self) -> None:
        """Run the check, unless the last one was less than an interval ago."""
        if self._clock() - self._checked_at >= self._interval_s:
            self._checked_at = self._clock()
            self.check()

    def check(self) -> None:
        """Send SIGTERM to services that have been silent too long, and SIGKILL to those that do not end."""
        found = [service_status(self._home, name) for name in self._stop_timeouts_s]
        silent = [
            one
            for one in found
            if one.state in _TIMEOUTS_S and one.record is not None and one.record.started_by == OURS
        ]
        now = self._clock()
        self._silent_since = {self._key(one): self._silent_since.get(self._key(one), now) for one in silent}
        for one in silent:
            excess_s = now - self._silent_since[self._key(one)] - _TIMEOUTS_S[one.state]
            if excess_s >= 0:
                self._end(one, kill=excess_s >= self._stop_timeouts_s[one.name])

    def _key(self, status: ServiceStatus) -> tuple[str, int, ServiceState]:
        return status.name, status.pid, status.state

    def _end(self, status: ServiceStatus, *, kill: bool) -> None:
        how = "killed" if kill else "ended"
        timeout_s = _TIMEOUTS_S[status.state]
        _log(f"the {status.name} (process {status.pid}) has sent no heartbeat for {timeout_s:g} s and is {how}")
        if status.record is not None and status.record.is_alive:
            os.kill(status.pid, signal.SIGKILL if kill else signal.SIGTERM)
            os.kill(status.pid, signal.SIGCONT)  # a stopped process receives no other signal


def listen(events: IO[str], answers: IO[str], on_tick: Callable[[], None]) -> None:
    """Process events from supervisord until it is gone.

    Args:
        events: Its events: for each a line of ``key:value`` pairs, followed by ``len`` characters.
        answers: Receives a line when this process is ready for an event, and one when it is done with it.
        on_tick: Called at each event.
    """
    # If supervisord is killed while this process starts or checks, the pipe for the answers shows it first.
    with contextlib.suppress(BrokenPipeError):
        while True:
            answers.write("READY\n")
            answers.flush()
            header = dict(pair.split(":", 1) for pair in events.readline().split())
            if not header:
                return
            events.read(int(header["len"]))
            with Survived() as found:  # a full disk, for example: the check runs again at the next event
                on_tick()
            if found.error is not None:
                _log(f"failed to check the services: {found.problem}")
            answers.write("RESULT 2\nOK")
            answers.flush()


def _log(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def main() -> None:
    """Check the services of ``RLHF_HOME`` as long as supervisord lives, and restart supervisord if it was killed."""
    home = Path(os.environ["RLHF_HOME"])
    stop_timeouts_s = {name: float(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
    check = HealthCheck(home, stop_timeouts_s, float(sys.argv[1]))
    listen(sys.stdin, sys.stdout, check.check_if_due)
    restart_supervisord(home, stop_timeouts_s)


if __name__ == "__main__":
    main()
