"""A temporary Prefect server for the duration of a run, used if none is configured and ``rlhf up`` has not started
one."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flows.server.guards import MAX_SOCKET_BYTES
from flows.server.proxies import exemption
from flows.server.settings import (
    accepts_password,
    access_settings,
    answers,
    answers_in_time,
    new_password,
)
from rlhf_core.errors import PrefectUnavailable
from rlhf_core.history.database import refuse_network_file_system
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.services.presence import private_folder
from rlhf_core.services.processes import terminate, wait_until

STARTUP_TIMEOUT_S = 180.0
"""Time that the server has to answer. Its first start creates a database: 20 s, longer on a busy machine."""

STOP_TIMEOUT_S = 5.0
"""Time between SIGTERM and SIGKILL."""
DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"

NO_PREFECT = "Run without Prefect: add --no-prefect."


@contextmanager
def prefect_server(home: Path, log: Callable[[str], None]) -> Iterator[str]:
    """Provide a server for the block: the configured one, or a temporary one. Yields its address.

    Args:
        home: folder of this user (``RLHF_HOME``); holds database and log of a temporary server.
        log: called with progress messages.

    Raises:
        PrefectUnavailable: there is none, and none could be started.
        UnsafeDatabase: the database of a temporary one would be on a network file system.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    configured = PREFECT_API_URL.value()
    if configured:
        _require_answer(configured)
        yield configured
        return
    log(
        "there is no Prefect server (`rlhf up` starts one): a temporary one is started for this run; --no-prefect runs "
        "without. If this terminal closes, the job continues, but new attempts wait for `rlhf resume`"
    )
    auth = new_password()  # for this server only: other users of the machine can reach its port
    with (
        _temporary_server(home / "prefect", auth) as url,
        temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth}),
    ):
        os.environ.update(exemption(url))
        try:
            yield url
        finally:
            _send_what_is_queued()


def _send_what_is_queued() -> None:
    """Let Prefect's background senders finish while their server is running; at exit they would retry for a minute."""
    from prefect.events.worker import EventsWorker

    for name in ("prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            handler.flush()
    EventsWorker.drain_all(timeout=5)


def _require_answer(url: str) -> None:
    if not answers_in_time(url):
        raise PrefectUnavailable(f"the Prefect server at {url} (PREFECT_API_URL) does not answer. {NO_PREFECT}")
    accepts_password(url)


@contextmanager
def _temporary_server(folder: Path, auth: str) -> Iterator[str]:
    try:
        private_folder(folder)
        log = (folder / "server.log").open("wb")
    except OSError as error:
        raise PrefectUnavailable(f"cannot write {folder}: {error.strerror}. {NO_PREFECT}") from None
    with log:
        url, process = _start(folder, log.fileno(), auth)
        try:
            yield url
        finally:
            _stop(process)


def _start(folder: Path, log: int, auth: str) -> tuple[str, "subprocess.Popen[bytes]"]:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while True:
        port = _free_port()
        url = f"http://127.0.0.1:{port}/api"
        process = subprocess.Popen(
            _command(port),
            env=_environment(folder, auth),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C is meant for the run, which still needs its server while it is being cancelled.
            start_new_session=True,
            umask=0o077,  # its database holds secrets and their encryption key
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        try:
            if _starts_in_time(url, process, deadline - time.monotonic()):
                return url, process
        except BaseException:
            _stop(process)
            raise
        _stop(process)
        # It exited: its port was taken, or two servers were creating the same database. Retry until the deadline.
        if time.monotonic() > deadline:
            raise PrefectUnavailable(
                f"a temporary Prefect server did not start within {STARTUP_TIMEOUT_S:g} s; its log is "
                f"{folder / 'server.log'}. {NO_PREFECT}"
            )
        time.sleep(1.0)


def _starts_in_time(url: str, process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    return wait_until(lambda: process.poll() is not None or answers(url), seconds, 0.2) and process.poll() is None


def _command(port: int) -> list[str]:
    # Like prefect.server.api.server.SubprocessASGIServer, but started here so that it has its own session, and
    # imports nothing from this process's working folder.
    serve = ["-P", "-m", "rlhf_core.garbage", "uvicorn", "--factory", "flows.server.app:create_app", "--lifespan", "on"]
    serve += ["--host", "127.0.0.1", "--port", str(port), "--ws-max-size", str(MAX_SOCKET_BYTES)]
    return [sys.executable, *serve, "--log-level", "error"]


def _environment(folder: Path, auth: str) -> Mapping[str, str]:
    environment = {
        **os.environ,
        **access_settings(auth),
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }
    if "PREFECT_HOME" not in os.environ and DATABASE not in os.environ:
        file = folder / "prefect.db"
        refuse_network_file_system(file, "Prefect's database", DATABASE)
        environment[DATABASE] = f"sqlite+aiosqlite:///{file}"
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    terminate(process.pid, lambda: process.poll() is None, STOP_TIMEOUT_S)
