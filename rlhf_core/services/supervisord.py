"""The supervisord of a home folder on this machine: its generated configuration, its process, and calls to it.

All its files are in ``services``, a folder private to this user, and it listens on a unix socket there, not on a port.
Paths in the configuration are relative to the home folder, supervisord's working directory, because a socket path is
limited to 107 characters and supervisord interprets ``%`` and ``;``. The kernel tells which process listens on the
socket, so no pid file is needed.

File names include the name of the machine, because machines that share a home folder may each run services of it.
"""

import configparser
import contextlib
import http.client
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import xmlrpc.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.errors import ServiceFailed
from rlhf_core.files import private as private_files
from rlhf_core.files.appended import read_tail
from rlhf_core.files.whole import write_text
from rlhf_core.services.presence import OURS, STARTED_BY, private_folder
from rlhf_core.services.processes import started_ticks, terminate, wait_until

ANSWER_TIMEOUT_S = 10.0
"""Time that supervisord has to answer a call. No call takes long."""
START_TIMEOUT_S = 60.0
MAX_LOG_SIZE = "20MB"
"""Size at which a log is rotated; the previously rotated one is removed."""

START_S = 60
"""A program that exits within this time after its start is restarted after a pause that grows by one second each
time."""

ENDLESS = 1_000_000_000
"""Number of consecutive failed starts after which supervisord gives up; practically unlimited."""

ALREADY_STARTED = 60
"""Fault of supervisord's XML-RPC interface."""

_GLOBAL = """\
; Made by `rlhf up`, and made again by each of its calls: changes are lost.
[unix_http_server]
file=/proc/self/cwd/services/{socket}
chmod=0600

[supervisord]
logfile=logs/{log}
logfile_maxbytes={size}
logfile_backups=1
pidfile=services/{pidfile}
nodaemon=true
silent=true
minfds=256
minprocs=1
nocleanup=true

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""

_PROGRAM = """
[program:{name}]
command={command}
priority={priority}
autostart=true
autorestart={restarts}
startsecs={start_s}
startretries={retries}
stopwaitsecs={stop_timeout_s}
redirect_stderr=true
stdout_logfile=logs/{name}.log
stdout_logfile_maxbytes={size}
stdout_logfile_backups=1
"""

_HEALTH = """
[eventlistener:health]
command={command}
events=TICK_5
priority=1
autorestart=true
startretries=1000000000
stdout_logfile=NONE
stderr_logfile=logs/health.log
stderr_logfile_maxbytes={size}
stderr_logfile_backups=1
"""


@dataclass(frozen=True)
class Program:
    """A service as a supervisord program. It is started by ``rlhf serve NAME``."""

    name: str
    priority: int
    """Programs with a lower value start earlier and end later."""
    stop_timeout_s: int
    """Time between SIGTERM and SIGKILL."""


class SupervisordFault(ServiceFailed):
    """supervisord did not start, does not answer, or refused a call."""

    code: int = 0
    """Fault code of a refused call."""


class Supervisord:
    """The supervisord of a home folder on this machine, running or not."""

    def __init__(self, home: Path) -> None:
        base = f"supervisord-{socket.gethostname()}"
        self._home = home
        self._folder = home / "services"
        self._socket = f"{base}.sock"
        self.config = self._folder / f"{base}.conf"
        self.log = home / "logs" / f"{base}.log"

    # -----------------------------------------------------------------------------------------------------------------
    # Process

    def pid(self) -> int:
        """Its process id; 0 if none listens. The process may be stopped and not answer."""
        with contextlib.suppress(OSError), self._open(ANSWER_TIMEOUT_S) as connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", credentials)
            return int(pid) if uid == os.geteuid() else 0
        return 0

    def answers(self) -> bool:
        """True if it answers calls."""
        try:
            return bool(self.call("getState")["statename"] == "RUNNING")
        except SupervisordFault:
            return False

    def start(self, environment: Mapping[str, str]) -> None:
        """Start it together with the programs in its configuration. It outlives this process.

        Args:
            environment: Environment of the programs, including later restarts.

        Raises:
            SupervisordFault: it did not start.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "supervisor.supervisord", "-c", str(self.config)],
                env={**environment, "RLHF_HOME": str(self._home), STARTED_BY: OURS},
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # keeps a Ctrl-C or the end of this terminal away from it
            )
        wait_until(lambda: process.poll() is not None or self.answers(), START_TIMEOUT_S, 0.1)
        if process.poll() is not None or not self.answers():
            process.kill()
            raise SupervisordFault(f"supervisord did not start; its log is {self.log}:\n{read_tail(self.log, 2000)}")

    def foreign_variables(self, environment: Mapping[str, str]) -> list[str]:
        """Names of ``RLHF_*``, ``PREFECT_*`` and ``PATH`` variables whose values differ from ``environment``."""
        try:
            theirs = psutil.Process(self.pid()).environ()
        except psutil.Error:
            return []
        names = {name for name in (*theirs, *environment) if name.startswith(("RLHF_", "PREFECT_")) or name == "PATH"}
        return sorted(name for name in names - {"RLHF_HOME", STARTED_BY} if theirs.get(name) != environment.get(name))

    def shut_down(self, timeout_s: float) -> None:
        """Stop all programs in order, then supervisord itself; kill it if that takes longer than ``timeout_s``.

        With 0, it is killed at once, and its programs receive SIGTERM
        (:func:`rlhf_core.services.processes.die_with_parent`).
        """
        pid = self.pid()
        if not pid:
            return
        ticks = started_ticks(pid)
        terminate(pid, lambda: ticks is not None and started_ticks(pid) == ticks, timeout_s)

    # -----------------------------------------------------------------------------------------------------------------
    # Configuration

    def programs(self) -> tuple[str, ...]:
        """Names of its configured programs; empty if `rlhf up` was never called, and after `rlhf down`."""
        parser = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error):
            parser.read(self.config, encoding="utf-8")
        return tuple(name.removeprefix("program:") for name in parser.sections() if name.startswith("program:"))

    def configure(self, programs: Sequence[Program], check_interval_s: float) -> None:
        """Write the configuration.

        Args:
            programs: Programs to run.
            check_interval_s: Seconds between two health checks; 0 disables restarts.
        """
        private_folder(self._folder)
        if not programs:
            self.config.unlink(missing_ok=True)
            return
        (self._home / "logs").mkdir(parents=True, exist_ok=True)
        names = {"socket": self._socket, "log": self.log.name, "pidfile": f"{self.config.stem}.pid"}
        text = _GLOBAL.format(**names, size=MAX_LOG_SIZE)
        for one in programs:
            text += _PROGRAM.format(
                name=one.name,
                command=_command("rlhf_core.cli.main", "serve", one.name),
                priority=one.priority,
                restarts="true" if check_interval_s else "false",
                retries=ENDLESS if check_interval_s else 0,
                start_s=START_S,
                stop_timeout_s=one.stop_timeout_s,
                size=MAX_LOG_SIZE,
            )
        if check_interval_s:
            ends = [f"{one.name}={one.stop_timeout_s}" for one in programs]
            text += _HEALTH.format(
                command=_command("rlhf_core.services.health", str(check_interval_s), *ends), size=MAX_LOG_SIZE
            )
        write_text(self.config, text, private_files.FILE_MODE)

    def reload(self) -> None:
        """Load programs added to the configuration, and drop removed ones that have ended.

        A running program is left alone, even if its section has changed.
        """
        [[added, _, removed]] = self.call("reloadConfig")
        for name in added:
            self.call("addProcessGroup", name)
        for name in removed:
            self.call("stopProcessGroup", name)
            self.call("removeProcessGroup", name)

    # -----------------------------------------------------------------------------------------------------------------
    # Programs

    def process(self, name: str) -> tuple[str, int]:
        """State of a program under supervisord's name for it, and its pid; 0 if it has none.

        Raises:
            SupervisordFault: no program has this name, or supervisord does not answer.
        """
        found = self.call("getProcessInfo", name)
        return str(found["statename"]), int(found["pid"])

    def start_program(self, name: str) -> None:
        """Start a program that is not running, without waiting for a scheduled restart."""
        if self.process(name)[0] == "BACKOFF":
            self.call("stopProcess", name, True)
        try:
            self.call("startProcess", name, False)
        except SupervisordFault as fault:
            if fault.code != ALREADY_STARTED:
                raise

    def stop_program(self, name: str, timeout_s: float) -> None:
        """Stop a program and wait until it has ended; supervisord kills it if it takes too long."""
        with contextlib.suppress(SupervisordFault):  # it was not running
            self.call("stopProcess", name, False)
        with contextlib.suppress(SupervisordFault):
            self.call("signalProcess", name, "CONT")  # a stopped process receives no other signal
        wait_until(lambda: not self.process(name)[1], timeout_s)

    def call(self, method: str, *arguments: str | bool) -> Any:
        """Call a method of supervisord's XML-RPC interface.

        Raises:
            SupervisordFault: the call was refused, or not answered in time.
        """
        connection = _UnixConnection(self)
        body = xmlrpc.client.dumps(arguments, f"supervisor.{method}").encode()
        try:
            connection.request("POST", "/RPC2", body, {"Content-Type": "text/xml"})
            (result,), _ = xmlrpc.client.loads(connection.getresponse().read())
        except xmlrpc.client.Fault as fault:
            refusal = SupervisordFault(f"supervisord: {method}: {fault.faultString}")
            refusal.code = fault.faultCode
            raise refusal from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SupervisordFault(f"supervisord does not answer: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        return result

    def ends(self, name: str, since: datetime) -> list[str]:
        """Descriptions of a program's unrequested exits, from its log: ``exit status 1``."""
        line = re.compile(rf"^(\S+ \S+),\d+ \w+ exited: {re.escape(name)} \((.*?)(?:; .*)?\)$")
        found = []
        for text in read_tail(self.log, 1 << 20).splitlines() if self.log.is_file() else ():
            if (match := line.match(text)) and datetime.fromisoformat(match[1]) >= since:
                found.append(match[2])
        return found

    def recent_ends(self, name: str) -> list[str]:
        """A program's unrequested exits within the last hour."""
        return self.ends(name, datetime.now() - timedelta(hours=1))

    def _open(self, timeout_s: float | None) -> socket.socket:
        """Connect to its socket, by a path of any length."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(f"/proc/self/fd/{folder}/{self._socket}")
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(folder)
        return connection


class _UnixConnection(http.client.HTTPConnection):
    """A connection to the unix socket of a supervisord."""

    def __init__(self, supervisord: Supervisord) -> None:
        super().__init__("localhost", timeout=ANSWER_TIMEOUT_S)
        self._supervisord = supervisord

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = self._supervisord._open(self.timeout)


def _command(module: str, *arguments: str) -> str:
    """Command line of a module, as supervisord's configuration has it."""
    return shlex.join([sys.executable, "-P", "-m", module, *arguments]).replace("%", "%%")
