"""``rlhf up`` and ``rlhf down``: start missing services, replace silent ones, and stop them."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlhf_core.errors import BadInput, ServiceFailed
from rlhf_core.files.appended import read_tail
from rlhf_core.files.whole import is_disk_full
from rlhf_core.services.presence import OURS, ServiceFiles, ServiceState, ServiceStatus, alone, service_status
from rlhf_core.services.processes import wait_until
from rlhf_core.services.supervisord import Program, Supervisord

Log = Callable[[str], None]

READY_TIMEOUT_S = 180.0
"""Time that a service has to become ready. The server's first start creates a database: 20 s, longer on a busy
machine."""
ANSWER_TIMEOUT_S = 10.0
"""Time that a silent service has to send a heartbeat before it is replaced."""
LAST_MOMENT_S = 1.0
"""Time for which the socket of a killed process may still answer after its pipes are closed."""
POLL_INTERVAL_S = 0.2
FULL_BYTES = 50 << 20
"""Free space below which a service that ends probably lacked room: the first start of a server writes 35 MB."""

EARLIER_NAMES = {"keeper": "daemon"}
"""Names of services in version 0.1, with their current names."""


@dataclass(frozen=True)
class Service(Program):
    """A service, with its hooks around start and stop."""

    is_well: Callable[[], bool] = lambda: True
    """Called if the service sends heartbeats: True if it also does its work, within ``ANSWER_TIMEOUT_S``. Raises if a
    user has to act first."""
    before_start: Callable[[], None] = lambda: None
    """Raises if the service cannot be started."""
    after_ready: Callable[[], None] = lambda: None
    after_end: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class StartedService:
    """Result of ``up`` for one service."""

    name: str
    pid: int
    what: str
    """``was running``, ``started``, or ``replaced`` for a service that did not answer."""


class Lifecycle:
    """Starts and stops the services of a home folder on this machine."""

    def __init__(self, home: Path, services: Sequence[Service], check_interval_s: float, log: Log) -> None:
        """Describe the services.

        Args:
            home: Home folder.
            services: All services, in start order.
            check_interval_s: Seconds between two health checks; 0 disables automatic restarts.
            log: Called with a message about each start and stop.
        """
        self._home = home
        self._services = services
        self._check_interval_s = check_interval_s
        self._log = log
        self._supervisord = Supervisord(home)

    def up(self, names: Sequence[str]) -> list[StartedService]:
        """Start missing services, replace those that do not answer, and wait until each is ready.

        Raises:
            BadInput: a service runs on another machine, or its ``before_start`` raised it.
            ServiceFailed: a service did not become ready, and the message includes the end of its log; or the disk of
                the home folder is full.
        """
        # Copied before this command silences itself, which would leave the services' logs empty.
        environment = dict(os.environ)
        with _naming_a_full_disk(self._home), alone(self._home):
            if self._supervisord.pid() and not self._supervisord.answers():
                self._log("supervisord does not respond and is replaced")
                self._supervisord.shut_down(0)
            if foreign := self._supervisord.foreign_variables(environment):
                self._log(
                    "the services keep the environment of the `rlhf up` that started the first of them, which differs "
                    f"in {', '.join(foreign)}; run `rlhf down`, then `rlhf up` to update it"
                )
            if not self._supervisord.pid():
                self._configure([])
                self._end_orphans([one.name for one in self._services])
            done = []
            for service in self._services:
                if service.name in names:
                    done.append(self._ensure(service, environment))
                    service.after_ready()
            return done

    def down(self, names: Sequence[str]) -> list[str]:
        """Stop services in reverse order, and supervisord with the last one. Return the names of those stopped.

        Raises:
            BadInput: a service is managed by something other than ``rlhf up``, or runs on another machine.
        """
        services = [one for one in reversed(self._services) if one.name in names]
        with alone(self._home):
            found = {one.name: service_status(self._home, one.name) for one in services}
            for status in found.values():
                _require_ours(status)
            orphans = [] if self._supervisord.pid() else self._end_orphans(names)
            self._configure([name for name in self._supervisord.programs() if name not in names])
            for service in services:
                self._end(service, found[service.name])
            self._forget()
            for service in services:
                service.after_end()
                files = ServiceFiles(self._home, service.name)
                files.record.unlink(missing_ok=True)
                files.heartbeat.unlink(missing_ok=True)
        there = [name for name, status in found.items() if status.state is not ServiceState.STOPPED]
        return list(dict.fromkeys((*orphans, *there)))

    # -----------------------------------------------------------------------------------------------------------------
    # One service

    def _ensure(self, service: Service, environment: Mapping[str, str]) -> StartedService:
        found = self._settled(service.name)
        if found.state is ServiceState.RUNNING and service.is_well():
            return StartedService(service.name, found.pid, "was running")
        replaced = found.state is not ServiceState.STOPPED
        if replaced:
            _require_ours(found)
            self._log(f"the {service.name} (process {found.pid}) does not respond and is replaced")
            self._end(service, found)
        self._log(f"starting the {service.name}")
        service.before_start()
        return StartedService(service.name, self._start(service, environment), "replaced" if replaced else "started")

    def _settled(self, name: str) -> ServiceStatus:
        """State of a service, once a starting one is ready or gone and a silent one has had time to answer."""
        found = service_status(self._home, name)
        if found.state is ServiceState.ELSEWHERE:
            _require_ours(found)
        if found.state is ServiceState.STOPPED:
            wait_until(
                lambda: self._state(name) is not ServiceState.STOPPED or not self._supervisord.has_process(name),
                READY_TIMEOUT_S,
            )
        if self._state(name) is ServiceState.STARTING:
            wait_until(lambda: self._state(name) is not ServiceState.STARTING, READY_TIMEOUT_S)
        if self._state(name) is ServiceState.SILENT:
            wait_until(lambda: self._state(name) is ServiceState.RUNNING, ANSWER_TIMEOUT_S)
        return service_status(self._home, name)

    def _state(self, name: str) -> ServiceState:
        return service_status(self._home, name).state

    def _start(self, service: Service, environment: Mapping[str, str]) -> int:
        begun = datetime.now()
        log = ServiceFiles(self._home, service.name).log
        begin = log.stat().st_size if log.is_file() else 0
        others = [name for name in self._supervisord.programs() if name != service.name]
        self._configure([*others, service.name])
        if self._supervisord.pid():
            self._supervisord.reload()
            self._supervisord.start_program(service.name)
        else:
            self._supervisord.start(environment)
        pid = self._wait_until_ready(service.name)
        if pid:
            return pid
        ends = self._supervisord.ends(service.name, begun.replace(microsecond=0))
        how = _in_words(ends[-1]) if ends else f"was not ready within {READY_TIMEOUT_S:g} s"
        if ends:  # otherwise it may still become ready
            self._supervisord.stop_program(service.name, service.stop_timeout_s)
            self._configure(others)
            self._forget()
        tail = read_tail(log, min(4000, max(0, log.stat().st_size - begin))) if log.is_file() else ""
        output = _without_frames(tail)
        raise ServiceFailed(
            f"the {service.name} {how}; {_room(self._home)}its log is {log}:\n{output or '(it is empty)'}"
        )

    def _wait_until_ready(self, name: str) -> int:
        """The service's process once it is ready; 0 if it ended first or was not ready in time."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        first = 0
        while time.monotonic() < deadline:
            found = service_status(self._home, name)
            state, pid = self._supervisord.process(name)
            if found.state is ServiceState.RUNNING and found.pid == pid:
                return pid
            first = first or pid
            if (first and pid != first) or state in ("BACKOFF", "EXITED", "FATAL"):
                return 0
            time.sleep(POLL_INTERVAL_S)
        return 0

    def _end(self, service: Service, found: ServiceStatus) -> None:
        """Stop a service, whether supervisord runs it or its process is orphaned."""
        record = found.record if found.record is not None and found.record.is_alive else None
        if record is not None:
            self._log(f"ending the {service.name} (process {found.pid})")
        if self._supervisord.answers() and self._supervisord.has_process(service.name):
            self._supervisord.stop_program(service.name, service.stop_timeout_s + ANSWER_TIMEOUT_S)
        if record is not None and record.end(service.stop_timeout_s):
            self._log(f"the {service.name} did not end by itself and was killed")

    def _end_orphans(self, names: Sequence[str]) -> list[str]:
        """Stop services left by a supervisord that is gone, or by version 0.1. Return the names."""
        # Services of version 0.1 restart each other as long as this file exists.
        (self._home / "services" / "wanted.json").unlink(missing_ok=True)
        timeouts_s = {one.name: one.stop_timeout_s for one in self._services}
        ended = []
        for name in (*EARLIER_NAMES, *reversed(timeouts_s)):
            if EARLIER_NAMES.get(name, name) not in names:
                continue
            found = service_status(self._home, name)
            if found.record is not None and found.record.started_by == OURS and found.record.is_alive:
                self._log(f"ending the {name} (process {found.pid}), which has no supervisord")
                found.record.end(timeouts_s[EARLIER_NAMES.get(name, name)])
                ended.append(name)
        return ended

    def _configure(self, names: Sequence[str]) -> None:
        self._supervisord.configure([one for one in self._services if one.name in names], self._check_interval_s)

    def _forget(self) -> None:
        """Remove the programs missing from supervisord's configuration; shut it down with the last one."""
        if not self._supervisord.programs():
            self._supervisord.shut_down(sum(one.stop_timeout_s for one in self._services))
        elif self._supervisord.answers():
            self._supervisord.reload()


def restart_supervisord(home: Path, stop_timeouts_s: Mapping[str, float]) -> None:
    """Restart a killed supervisord with the programs it had; does nothing after ``rlhf down``.

    Args:
        home: Home folder.
        stop_timeouts_s: Time between SIGTERM and SIGKILL for each service, by name.
    """
    supervisord = Supervisord(home)
    with alone(home):
        wait_until(lambda: not supervisord.pid(), LAST_MOMENT_S)
        if not supervisord.programs() or supervisord.pid():
            return
        for name, timeout_s in reversed(list(stop_timeouts_s.items())):
            found = service_status(home, name)
            if found.record is not None and found.record.started_by == OURS:
                found.record.end(timeout_s)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("SUPERVISOR_")}
        supervisord.start(ours)


def _require_ours(status: ServiceStatus) -> None:
    """Refuse to stop a service that another supervisor manages, because it would restart it at once."""
    if status.record is None:
        return
    if status.state is ServiceState.ELSEWHERE:
        raise BadInput(
            f"the {status.name} of this home folder runs on {status.record.host} (process {status.pid}): end it there, "
            "or use another RLHF_HOME here"
        )
    if status.record.started_by != OURS:
        raise BadInput(
            f"the {status.name} (process {status.pid}) is managed by {status.record.started_by}: end it there, for "
            f"instance with `systemctl stop rlhf-{status.name}`"
        )


@contextlib.contextmanager
def _naming_a_full_disk(home: Path) -> Iterator[None]:
    """Name the home folder if its disk is full: the error of a write names no file.

    Raises:
        ServiceFailed: it is full.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise ServiceFailed(
            f"cannot write in RLHF_HOME, {home}: {error.strerror}. Make room there, then run `rlhf up` again"
        ) from None


def _room(home: Path) -> str:
    """Advice for a service that ended on a disk that is nearly full; empty if there is room."""
    free = shutil.disk_usage(home).free
    if free >= FULL_BYTES:
        return ""
    return f"RLHF_HOME, {home}, has {free / 2**20:.1f} MiB free: make room there, then run `rlhf up` again; "


def _in_words(end: str) -> str:
    """Format ``exit status 1`` as the end of a sentence."""
    return f"ended with exit code {end.removeprefix('exit status ')}" if end.startswith("exit status") else f"was {end}"


def _without_frames(log: str) -> str:
    """Leave out the frames of tracebacks, which are indented: a server on a database that does not answer ends with
    fifty lines of them around its one error."""
    return "\n".join(line for line in log.splitlines() if line[:1].strip())
