"""The Prefect server of a run: the configured one, or a temporary one for as long as the run lasts."""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.errors import PrefectUnavailable

STARTUP_TIMEOUT_S = 180.0
"""How long a temporary server may take to answer. Its first start makes a database: 20 s, longer on a busy machine."""

ANSWER_TIMEOUT_S = 10.0
"""How long a configured server may take to say that it is there."""

NO_PREFECT = "Run without Prefect: add --no-prefect."


def quiet_settings(home: Path) -> None:
    """Set what Prefect reads when it is imported: no telemetry, no log lines into the progress display.

    Its files go under ``home`` unless this user has settings in a Prefect home already. Call it before ``flows.run`` is
    imported.
    """
    quiet = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Log lines still reach the server, where they belong to the flow run.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL": "CRITICAL",
    }
    if not (Path.home() / ".prefect" / "profiles.toml").exists():
        quiet["PREFECT_HOME"] = str(home / "prefect")
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    # A log line that cannot be sent to a lost server is no news for the terminal: flows.tasks says that it was lost.
    logging.raiseExceptions = False


@contextmanager
def prefect_server(home: Path, say: Callable[[str], None]) -> Iterator[str]:
    """Make a server usable for the block: the configured one, or a temporary one. Yields its address.

    Args:
        home: folder of this user (``RLHF_HOME``); database and log of a temporary server lie in it.
        say: told what is done.

    Raises:
        PrefectUnavailable: there is none, and none could be started.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured = PREFECT_API_URL.value()
    if configured:
        _require_answer(configured)
        yield configured
        return
    say(
        "no Prefect server is configured (PREFECT_API_URL): a temporary one is started for this run; "
        "--no-prefect runs without"
    )
    with _temporary_server(home / "prefect") as url, temporary_settings({PREFECT_API_URL: url}):
        try:
            yield url
        finally:
            _send_what_is_queued()


def server_answers() -> bool:
    """Whether the Prefect server in use answers; at most two seconds."""
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if not url:
        return False
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0):
            return True
    except urllib.error.HTTPError:
        return True  # it may want a key for this, as a hosted one does; but it is there
    except (OSError, ValueError):
        return False


def _send_what_is_queued() -> None:
    """Let Prefect's background senders finish while their server is there; at exit they would try for a minute."""
    from prefect.events.worker import EventsWorker

    for name in ("prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            handler.flush()
    EventsWorker.drain_all(timeout=5)


def _require_answer(url: str) -> None:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not _answers(url):
        if time.monotonic() > deadline:
            raise PrefectUnavailable(f"the Prefect server at {url} (PREFECT_API_URL) does not answer. {NO_PREFECT}")
        time.sleep(0.5)


@contextmanager
def _temporary_server(folder: Path) -> Iterator[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "server.log").open("wb")
    except OSError as error:
        raise PrefectUnavailable(f"cannot write {folder}: {error.strerror}. {NO_PREFECT}") from None
    with log:
        url, process = _start(folder, log.fileno())
        try:
            yield url
        finally:
            _stop(process)


def _start(folder: Path, log: int) -> tuple[str, "subprocess.Popen[bytes]"]:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while True:
        port = _free_port()
        url = f"http://127.0.0.1:{port}/api"
        process = subprocess.Popen(
            _command(port),
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C is for the run, which still needs its server while it is being cancelled.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            if _wait_for_answer(url, process, deadline):
                return url, process
        except BaseException:
            _stop(process)
            raise
        _stop(process)
        # It ended: its port was taken in between, or two servers were making the same database. Try again until late.
        if time.monotonic() > deadline:
            raise PrefectUnavailable(
                f"a temporary Prefect server did not start within {STARTUP_TIMEOUT_S:g} s; its log is "
                f"{folder / 'server.log'}. {NO_PREFECT}"
            )
        time.sleep(1.0)


def _wait_for_answer(url: str, process: "subprocess.Popen[bytes]", deadline: float) -> bool:
    while time.monotonic() < deadline and process.poll() is None:
        if _answers(url):
            return True
        time.sleep(0.2)
    return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _command(port: int) -> list[str]:
    # As prefect.server.api.server.SubprocessASGIServer does it; started here so that it has a session of its own.
    factory = "prefect.server.api.server:create_app"
    serve = ["-m", "uvicorn", "--factory", factory, "--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, *serve, "--log-level", "error", "--lifespan", "on"]


def _environment(folder: Path) -> Mapping[str, str]:
    environment = {
        **os.environ,
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }
    if "PREFECT_HOME" not in os.environ:
        environment.setdefault("PREFECT_API_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{folder / 'prefect.db'}")
    return environment


def _die_with_parent() -> None:
    """Between fork and exec: the server ends when this process does, however that ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
