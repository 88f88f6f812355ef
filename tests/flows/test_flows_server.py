"""The temporary Prefect server: started, found missing, and never left behind. A small HTTP server stands in for it."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from flows.server import settings as server
from flows.server import temporary as temporary_server
from rlhf_core.config.site import load_site
from rlhf_core.errors import PrefectUnavailable, UnsafeDatabase
from rlhf_core.history import database

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_server, "_command", lambda port: [sys.executable, "-c", HEALTHY, str(port)])


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.usefixtures("stand_in")
def test_a_temporary_server_lives_as_long_as_the_block(tmp_path: Path) -> None:
    from prefect.settings import PREFECT_API_URL

    before, messages = children(), []
    with temporary_server.prefect_server(tmp_path, messages.append) as url:
        assert PREFECT_API_URL.value() == url
        (process,) = [one for one in children() if one not in before]
        assert os.getsid(process.pid) == process.pid, "a Ctrl-C must not reach it"
    assert not process.is_running()
    assert "--no-prefect" in messages[0]
    assert not PREFECT_API_URL.value()


def test_a_server_that_does_not_start_is_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_server, "_command", lambda port: [sys.executable, "-c", "raise SystemExit('no')"])
    monkeypatch.setattr(temporary_server, "STARTUP_TIMEOUT_S", 3.0)  # a loaded machine starts slowly
    with (
        pytest.raises(PrefectUnavailable, match="--no-prefect") as caught,
        temporary_server.prefect_server(tmp_path, lambda text: None),
    ):
        pytest.fail("there is no server")
    assert str(tmp_path / "prefect" / "server.log") in str(caught.value)
    assert "no" in (tmp_path / "prefect" / "server.log").read_text()


def test_a_configured_server_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.setattr(server, "ANSWER_TIMEOUT_S", 0.1)
    url = "http://127.0.0.1:9/api"
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(PrefectUnavailable, match=url),
        temporary_server.prefect_server(tmp_path, lambda text: pytest.fail(text)),
    ):
        pytest.fail("there is no server")


START_AND_WAIT = """
import sys, time
from pathlib import Path
from flows.server import temporary as temporary_server
temporary_server._command = lambda port: [sys.executable, "-c", sys.argv[1], str(port)]
url, process = temporary_server._start(Path(sys.argv[2]), 1, "rlhf:none")
print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_controller_leaves_no_server_behind(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, HEALTHY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    process = psutil.Process(int(owner.stdout.readline()))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    gone, _ = psutil.wait_procs([process], timeout=20)
    assert gone == [process]


def test_settings_of_the_user_take_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server.logging, "raiseExceptions", True)
    mine = {"PREFECT_HOME": "/mine", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "DEBUG"}
    monkeypatch.setattr(os, "environ", mine)
    server.quiet_settings(tmp_path)
    assert os.environ["PREFECT_HOME"] == "/mine"
    assert os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] == "DEBUG"
    assert os.environ["DO_NOT_TRACK"] == "1"
    assert "PREFECT_API_DATABASE_CONNECTION_URL" not in temporary_server._environment(tmp_path, "rlhf:none")
    del mine["PREFECT_HOME"]
    assert temporary_server._environment(tmp_path, "rlhf:none")["PREFECT_API_DATABASE_CONNECTION_URL"].endswith(
        f"{tmp_path}/prefect.db"
    )


def test_prefects_sqlite_is_refused_on_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a history elsewhere, nothing else refuses a home folder on NFS."""
    (tmp_path / "rlhf.toml").write_text(f"[prefect]\nport = {temporary_server._free_port()}\n")
    site = load_site({"RLHF_HOME": str(tmp_path), "RLHF_DATABASE_URL": "postgresql://user@host/database"})
    monkeypatch.delenv("PREFECT_HOME")
    for kind in ("ext4", "nfs4"):
        table = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n31 27 0:40 / {tmp_path} rw - {kind} somewhere rw\n"
        (tmp_path / "mountinfo").write_text(table)
        monkeypatch.setattr(database, "MOUNT_TABLE", tmp_path / "mountinfo")
        for check in (
            lambda: server.require_port_and_disk(site),
            lambda: temporary_server._environment(tmp_path / "prefect", "rlhf:secret"),
        ):
            with nullcontext() if kind == "ext4" else pytest.raises(UnsafeDatabase, match=r"Prefect's .*RLHF_HOME"):
                check()
