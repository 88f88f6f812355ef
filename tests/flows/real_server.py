"""A real Prefect server with its UI, for as long as a test session lasts: what is pressed in a browser needs one."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from signing_in import sign_in

START_TIMEOUT_S = 400
"""A start takes 15 s alone and minutes beside other work; one that fails ends its process, and is seen at once."""


@dataclass(frozen=True)
class RealServer:
    """Where it is, and where its files are."""

    url: str
    home: Path
    password: str = "rlhf:of-these-tests"

    @property
    def api(self) -> str:
        return f"{self.url}/api"

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """What is done in the block is told this server."""
        settings = {PREFECT_API_URL: self.api, PREFECT_API_AUTH_STRING: self.password}
        with temporary_settings(settings), pytest.MonkeyPatch.context() as patch:
            for name, value in self.variables.items():
                patch.setenv(name, value)  # for what looks for a server without importing Prefect
            yield

    @property
    def variables(self) -> dict[str, str]:
        """Variables that a program needs to use it."""
        return {"PREFECT_API_URL": self.api, "PREFECT_API_AUTH_STRING": self.password}


@contextmanager
def real_server(home: Path) -> Iterator[RealServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RealServer(f"http://127.0.0.1:{port}", home)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RLHF_"))}
    environment |= {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    environment |= {**server.variables, "PREFECT_SERVER_API_AUTH_STRING": server.password}
    environment |= {
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_UI_API_URL": "/api",
        "PREFECT__SERVER_FINAL": "1",
    }
    environment |= {"PREFECT_UI_STATIC_DIRECTORY": str(home / "ui"), "PYTHONPATH": str(Path(__file__).parents[2])}
    # As `rlhf serve server` serves it: with Prefect's own command no schedule would plan anything (SQLAlchemy 2.1).
    command = [sys.executable, "-m", "uvicorn", "--factory", "flows.server_app:create_app", "--lifespan", "on"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    with server.log.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(server):
            assert process.poll() is None, server.log.read_text()
            assert time.monotonic() < deadline, server.log.read_text()
            time.sleep(0.3)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(server: RealServer) -> bool:
    try:
        with urllib.request.urlopen(f"{server.api}/health", timeout=2):
            return True
    except OSError:
        return False


def browser() -> str | None:
    """The browser of this machine."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


@contextmanager
def page_of(server: RealServer, path: str) -> Iterator[Any]:
    """A page of its UI in a real browser; without one the test is skipped."""
    executable = browser()
    if executable is None:
        pytest.skip("there is no browser on this machine (chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1400, "height": 1200})
        sign_in(page, server.password)
        page.set_default_timeout(45_000)
        page.goto(f"{server.url}{path}", wait_until="domcontentloaded")
        yield page
        chromium.close()
