"""Parts of the services: the process that is signalled, the source of the password, the server that is used."""

import asyncio
import base64
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from http_stand_in import QuietHandler, serving

from flows import services, worker
from flows.server import required, temporary
from flows.server import settings as server
from rlhf_core.cli.commands import services as service_commands
from rlhf_core.config.site import Site, load_site
from rlhf_core.errors import BadInput, PrefectUnavailable
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.machine.process_identity import started_ticks
from rlhf_core.schemas.site import is_private
from rlhf_core.services import presence
from rlhf_core.services.presence import ServiceFiles, ServiceRecord, ServiceState, holding, service_status
from rlhf_core.services.supervisord import Program, Supervisord


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site without settings, in an environment that belongs to this test."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("RLHF_", "PREFECT_"))}
    monkeypatch.setattr(os, "environ", {**plain, "HOME": str(tmp_path)})
    monkeypatch.setattr(server.logging, "raiseExceptions", True)
    return load_site({"RLHF_HOME": str(tmp_path / "home")})


def open_to_others(site: Site) -> Site:
    return replace(site, prefect=site.prefect.model_copy(update={"host": "0.0.0.0"}))


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def record_of(home: Path, pid: int) -> ServiceRecord:
    """Record of a service with this process."""
    with holding(home, "worker"):
        mine = read_model(ServiceFiles(home, "worker").record, ServiceRecord)
    assert mine is not None
    return mine.model_copy(update={"pid": pid, "started_ticks": started_ticks(pid)})


# ---------------------------------------------------------------------------------------------------------------------
# Processes


@pytest.mark.parametrize("change", [{"started_ticks": 1}, {"boot_id": "another"}, {"host": "elsewhere"}])
def test_a_process_that_only_has_the_same_id_is_never_signalled(
    tmp_path: Path, stranger: "subprocess.Popen[bytes]", change: dict[str, object]
) -> None:
    record = record_of(tmp_path, stranger.pid).model_copy(update=change)
    assert record.end(timeout_s=0.1) is False
    assert stranger.poll() is None


def test_the_process_of_the_record_is_signalled(tmp_path: Path, stranger: "subprocess.Popen[bytes]") -> None:
    """Negative control of the previous test."""
    assert record_of(tmp_path, stranger.pid).end(timeout_s=20) is False
    assert stranger.wait() == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert record_of(tmp_path, process.pid).end(timeout_s=0.2) is True
        assert process.wait() == -signal.SIGKILL


def test_the_states_of_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_status(tmp_path, "worker").state is ServiceState.STOPPED
    with holding(tmp_path, "worker") as beat:
        assert service_status(tmp_path, "worker").state is ServiceState.STARTING
        beat()
        assert service_status(tmp_path, "worker").state is ServiceState.RUNNING
        assert service_status(tmp_path, "worker").pid == os.getpid()
        monkeypatch.setattr(presence, "HEARTBEAT_TIMEOUT_S", -1.0)
        assert service_status(tmp_path, "worker").state is ServiceState.SILENT
        files = ServiceFiles(tmp_path, "worker")
        mine = read_model(files.record, ServiceRecord)
        assert mine is not None
        write_model(files.record, mine.model_copy(update={"host": "elsewhere"}))
        assert service_status(tmp_path, "worker").state is ServiceState.ELSEWHERE
        write_model(files.record, mine.model_copy(update={"started_ticks": 1}))
        assert service_status(tmp_path, "worker").state is ServiceState.STARTING, "the record is of an earlier process"
    assert service_status(tmp_path, "worker").state is ServiceState.STOPPED
    with holding(tmp_path, "worker"):
        assert service_status(tmp_path, "worker").state is ServiceState.STARTING, (
            "the beat of an earlier process is no evidence"
        )


def test_a_service_lock_is_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "LOCK_TIMEOUT_S", 0.1)
    with (
        holding(tmp_path, "worker"),
        pytest.raises(BadInput, match=f"process {os.getpid()}"),
        holding(tmp_path, "worker"),
    ):
        pytest.fail("there are two")


def test_reading_the_state_blocks_no_start(tmp_path: Path) -> None:
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            service_status(tmp_path, "worker")

    with holding(tmp_path, "worker"):
        pass
    watcher = threading.Thread(target=poll)
    watcher.start()
    try:
        for _ in range(50):
            with holding(tmp_path, "worker"):
                pass
    finally:
        stop.set()
        watcher.join()


def test_a_service_on_another_host_is_neither_started_nor_stopped(site: Site) -> None:
    with holding(site.home, "worker"):
        files = ServiceFiles(site.home, "worker")
        mine = read_model(files.record, ServiceRecord)
        assert mine is not None
        write_model(files.record, mine.model_copy(update={"host": "login2"}))
        for act in (services.up, services.down):
            with pytest.raises(BadInput, match="runs on login2"):
                act(site, ("worker",))


def test_a_worker_is_not_started_for_an_unresponsive_server(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(server, "answers", lambda url: False)
    away = "http://prefect.example.com/api"
    monkeypatch.setattr(required, "accepts_password", lambda url: False)
    with pytest.raises(PrefectUnavailable, match=r"this site has none yet\. `rlhf up` starts the server of this site"):
        services.up(site, ("worker",))
    os.environ["PREFECT_API_URL"] = away
    with pytest.raises(PrefectUnavailable, match=rf"at {away} does not answer.*unset PREFECT_API_URL"):
        services.up(site)
    assert service_status(site.home, "worker").state is ServiceState.STOPPED


def test_a_used_port_is_named_with_its_owner(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        site = replace(site, prefect=site.prefect.model_copy(update={"port": port}))
        with pytest.raises(BadInput, match=rf"port {port}: .*process {os.getpid()}"):
            services.up(site, ("server",))
    assert service_status(site.home, "server").state is ServiceState.STOPPED


def test_a_long_log_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of the flow runs; supervisord rotates those of the services."""
    log = tmp_path / "flow-runs.log"
    worker._put_aside(log)
    log.write_text("short")
    worker._put_aside(log)
    assert log.read_text() == "short"
    monkeypatch.setattr(worker, "MAX_LOG_BYTES", 3)
    worker._put_aside(log)
    assert not log.exists()
    assert (log.parent / "flow-runs.log.1").read_text() == "short"
    supervisord = Supervisord(tmp_path)
    supervisord.configure([Program("server", 10, 15)], 5.0)
    lines = supervisord.config.read_text().splitlines()
    assert {"stdout_logfile=logs/server.log", "stdout_logfile_maxbytes=20MB", "stdout_logfile_backups=1"} <= set(lines)


def test_a_former_name_of_a_service_is_accepted_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert service_commands._current_names(["keeper", "worker"]) == ["daemon", "worker"]
    assert "the keeper is now called daemon" in capsys.readouterr().err
    assert service_commands._current_names(["daemon"]) == ["daemon"]
    assert capsys.readouterr().err == ""


def test_services_without_a_supervisord_are_reported(site: Site) -> None:
    assert not services.lacks_supervisord(site)
    os.environ["RLHF_STARTED_BY"] = "systemd"
    with holding(site.home, "worker"):
        assert not services.lacks_supervisord(site), "systemd does"
    os.environ["RLHF_STARTED_BY"] = "rlhf up"
    with holding(site.home, "worker"):
        assert services.lacks_supervisord(site)


def test_the_exit_code_of_the_status_shows_whether_a_service_is_down(site: Site) -> None:
    assert services.down_ones(site) == ["server", "worker", "daemon"]
    with holding(site.home, "worker") as beat:
        assert services.down_ones(site, ["worker"]) == ["worker"], "it is not ready"
        beat()
        assert services.down_ones(site, ["worker"]) == []
        assert services.down_ones(site) == ["server", "daemon"]
    os.environ["PREFECT_API_URL"] = "http://prefect.example.com/api"
    assert services.down_ones(site) == ["worker", "daemon"], "the server is not ours"


# ---------------------------------------------------------------------------------------------------------------------
# Password


def test_a_password_that_cannot_be_stored_is_reported_with_a_remedy(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(server, "create_once", full)
    with pytest.raises(BadInput, match=r"No space left on device\. Make its folder writable, with room in it, or set"):
        server.password(site)


def test_the_source_of_the_password(site: Site) -> None:
    public = open_to_others(site)
    made = server.password(site)
    assert made.startswith("rlhf:")
    assert len(made) > 30
    assert server.password_file(site).stat().st_mode & 0o777 == 0o600
    assert server.password(public) == made
    assert server.password(site) == made, "server and clients agree whatever the host is set to"
    os.environ["RLHF_PREFECT_AUTH"] = "me:given"
    assert server.password(public) == "me:given"
    assert server.server_settings(public)["PREFECT_SERVER_API_AUTH_STRING"] == "me:given"
    assert server.service_settings(public)["PREFECT_API_AUTH_STRING"] == "me:given"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "node1"])
def test_every_server_requires_a_password(site: Site, host: str) -> None:
    site = replace(site, prefect=site.prefect.model_copy(update={"host": host}))
    assert server.server_settings(site)["PREFECT_SERVER_API_AUTH_STRING"] == server.password(site)


def test_a_password_configured_in_prefect_is_kept(site: Site) -> None:
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = "me:of-my-server"
    assert server.password(site) == "me:of-my-server"
    assert not server.password_file(site).exists()
    os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"] = server.own_url(site), "me:my-own"
    assert "PREFECT_API_AUTH_STRING" not in server.client_settings(site, server.own_url(site))


def test_a_password_in_the_active_profile_of_prefect_is_kept(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / ".prefect"
    folder.mkdir()
    profile = f'PREFECT_API_URL = "{server.own_url(site)}"\nPREFECT_API_AUTH_STRING = "me:my-own"\n'
    (folder / "profiles.toml").write_text(f'active = "mine"\n[profiles.mine]\n{profile}')
    os.environ["PREFECT_HOME"] = str(folder)
    assert "PREFECT_API_AUTH_STRING" not in server.client_settings(site, server.own_url(site))


def test_concurrent_processes_get_the_same_password(site: Site) -> None:
    public, found = open_to_others(site), []
    together = threading.Barrier(8)

    def asks() -> None:
        together.wait()
        found.append(server.password(public))

    threads = [threading.Thread(target=asks) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in server.password_file(site).parent.iterdir()] == ["auth"]


def test_an_invalid_or_readable_password_is_refused(site: Site) -> None:
    path = server.password_file(site)
    path.parent.mkdir(parents=True)
    path.write_text("")
    path.chmod(0o600)
    with pytest.raises(BadInput, match="is empty"):
        server.password(open_to_others(site))
    path.write_text("rlhf:known")
    path.chmod(0o640)
    with pytest.raises(BadInput, match="chmod 600"):
        server.password(site)


def test_jobs_get_none_of_the_secrets(site: Site) -> None:
    os.environ["RLHF_PREFECT_AUTH"] = "me:given"
    site = replace(site, prefect=site.prefect.model_copy(update={"database_url": "postgresql+asyncpg://u:given@h/n"}))
    settings = {**server.service_settings(site), **server.server_settings(site)}
    secret = {name for name, value in {**settings, **os.environ}.items() if "given" in value}
    assert len(secret) == 4
    assert all(is_private(name) for name in secret)


# ---------------------------------------------------------------------------------------------------------------------
# Choice of the server


def test_a_configured_server_wins_and_does_not_get_the_password_of_the_site(site: Site) -> None:
    server.password(open_to_others(site))
    os.environ["PREFECT_API_URL"] = "http://prefect.example.com/api"
    assert server.connect(site) == "http://prefect.example.com/api"
    assert "PREFECT_API_AUTH_STRING" not in os.environ
    assert services.wanted_services(site, ()) == ("worker", "daemon"), "no server of our own is needed"
    os.environ["RLHF_PREFECT_AUTH"] = "me:given"
    server.connect(site)
    assert os.environ["PREFECT_API_AUTH_STRING"] == "me:given"


def test_without_any_server_there_is_none(site: Site) -> None:
    assert server.connect(site) == ""
    assert "PREFECT_API_URL" not in os.environ
    assert services.wanted_services(site, ()) == ("server", "worker", "daemon")
    with pytest.raises(BadInput, match="'sever'"):
        services.wanted_services(site, ("sever",))


def test_the_address_of_an_unresponsive_server_is_reported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "answers", lambda url: False)
    monkeypatch.setattr(required, "accepts_password", lambda url: False)
    with pytest.raises(PrefectUnavailable, match="no Prefect server is configured, and this site has none yet"):
        required.require(site)
    Supervisord(site.home).configure([Program("server", 10, 15)], 5.0)
    own = rf"does not answer at {server.own_url(site)}: its process is gone. `rlhf up` starts it again"
    with pytest.raises(PrefectUnavailable, match=own):
        required.require(site)
    waits = rf"{server.own_url(site)}: (it|process {os.getpid()}) is starting. `rlhf up` waits until it is ready"
    with monkeypatch.context() as unregistered:
        unregistered.setattr(Supervisord, "process", lambda *_: ("STARTING", 4711))
        with pytest.raises(PrefectUnavailable, match=waits):
            required.require(site)
    with holding(site.home, "server"):
        with pytest.raises(PrefectUnavailable, match=waits):
            required.require(site)
        monkeypatch.setattr(presence.socket, "gethostname", lambda: "another")
        with pytest.raises(PrefectUnavailable, match=r"it runs on .*\. PREFECT_API_URL has to name it here"):
            required.require(site)
    os.environ["PREFECT_API_URL"] = "http://prefect.example.com/api"
    with pytest.raises(PrefectUnavailable, match=r"at http://prefect.example.com/api does not answer"):
        required.require(site)


class _Guarded(QuietHandler):
    """A server of a site: health is public, the rest requires me:right."""

    def do_GET(self) -> None:
        right = f"Basic {base64.b64encode(b'me:right').decode()}"
        allowed = self.path == "/api/health" or self.headers["Authorization"] == right
        self.send_response(200 if allowed else 401)
        self.end_headers()


@pytest.fixture
def guarded() -> Iterator[str]:
    with serving(_Guarded) as port:
        yield f"http://127.0.0.1:{port}/api"


def test_a_server_that_refuses_the_password_is_reported_with_the_variable_to_set(site: Site, guarded: str) -> None:
    """A member of a team has the address of its server, but not yet the password."""
    os.environ["PREFECT_API_URL"] = guarded
    with pytest.raises(PrefectUnavailable, match=rf"{guarded} requires a password: set RLHF_PREFECT_AUTH to what"):
        required.require(site)
    os.environ["PREFECT_API_AUTH_STRING"] = "me:wrong"
    with pytest.raises(PrefectUnavailable, match="does not accept the password in PREFECT_API_AUTH_STRING"):
        required.require(site)
    with pytest.raises(PrefectUnavailable, match="does not accept the password"):
        temporary._require_answer(guarded)
    os.environ["PREFECT_API_KEY"] = "another way in"
    required.require(site)
    del os.environ["PREFECT_API_KEY"], os.environ["PREFECT_API_AUTH_STRING"]
    os.environ["RLHF_PREFECT_AUTH"] = "me:right"
    required.require(site)
    assert site.home.is_dir(), "Prefect warns if it cannot make a folder in it"


def test_the_temporary_files_of_a_worker_are_in_the_home_folder(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, those of the first user who starts a worker would keep all others from it."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(worker, "_wait_for_server", lambda: None)
    monkeypatch.setattr(worker.work_pool, "set_up", lambda site, warn: None)
    monkeypatch.setattr(worker, "_work", lambda site, beat: asyncio.sleep(0))
    left = site.home / "prefect" / "temporary" / "runner_storage" / "of a killed worker"
    left.mkdir(parents=True)
    worker.serve(site, lambda: None)
    assert Path(tempfile.gettempdir()).is_relative_to(site.home)
    assert not left.exists()


REFUSED = [
    (["submit", "quickstart", "--set", "loops.main.num_stepz=3"], 2, 'did you mean "loops.main.num_steps"'),
    (["submit", "quickstart", "--set", "name=MyRun"], 2, 'for instance "myrun"'),
    (["submit", "My.Deployment"], 2, "there is no such file"),
    (["deploy", "quickstart", "--set", "seed=x"], 2, "1 problem in --set"),
    (["submit", "quickstart"], 1, "`rlhf up` starts"),
]
"""Requests, each with its exit code and words of its error."""

REQUESTS = """
import contextlib, io, json, sys
from rlhf_core.cli.main import execute
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = execute(arguments)
    print(json.dumps([code, "prefect" in sys.modules, errors.getvalue()]))
"""


def test_invalid_requests_are_refused_before_prefect_is_imported(site: Site) -> None:
    """The import takes seconds of CPU time."""
    found = subprocess.run(
        [sys.executable, "-c", REQUESTS, json.dumps([arguments for arguments, _, _ in REFUSED])],
        env={**os.environ, "RLHF_HOME": str(site.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    for line, (arguments, expected, message) in zip(found.stdout.splitlines(), REFUSED, strict=True):
        code, is_imported, error = json.loads(line)
        assert (code, is_imported) == (expected, False), arguments
        assert message in " ".join(error.split())


def test_something_else_on_the_port_is_not_the_server_of_the_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "answers", lambda url: True)
    assert server.connect(site) == ""
    with holding(site.home, "server"):
        assert server.connect(site) == server.own_url(site)
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"


def test_the_active_profile_of_prefect_is_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".prefect"
    folder.mkdir()
    (folder / "profiles.toml").write_text(
        'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://team/api"\n[profiles.mine]\n'
    )

    def found(**further: str) -> str:
        monkeypatch.setattr(os, "environ", {"PREFECT_HOME": str(folder), **further})
        return server.configured_url()

    assert found() == "http://team/api"
    assert found(PREFECT_PROFILE="mine") == ""
    assert found(PREFECT_API_URL="http://a/api") == "http://a/api"
    (folder / "profiles.toml").write_text("not TOML")
    assert found() == ""


def test_addresses(site: Site) -> None:
    def at(**settings: object) -> Site:
        return replace(site, prefect=site.prefect.model_copy(update=settings))

    assert server.own_url(at(host="::")) == "http://[::1]:4200/api"
    assert server.own_url(at(host="10.0.0.5", port=80)) == "http://10.0.0.5:80/api"
    assert server.ui_url(at(host="127.0.0.1")) == "http://127.0.0.1:4200"
    assert server.ui_url(at(url="https://prefect.example.com/")) == "https://prefect.example.com"


def test_the_worker_tolerates_only_an_outage_of_the_server() -> None:
    import asyncio

    import httpx

    def answer(status: int) -> httpx.HTTPStatusError:
        request = httpx.Request("GET", "http://server/api")
        return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))

    def asked(error: Exception, stopped: bool = False) -> object:
        async def work() -> str:
            raise error

        async def call() -> object:
            stop = asyncio.Event()
            if stopped:
                stop.set()
            return await worker._outage_tolerant(work, stop)()

        return asyncio.run(call())

    assert asked(httpx.ConnectError("no server")) == []
    assert asked(answer(503)) == []
    with pytest.raises(httpx.HTTPStatusError):
        asked(answer(401))
    with pytest.raises(ZeroDivisionError):
        asked(ZeroDivisionError())
    assert asked(ZeroDivisionError(), stopped=True) == [], "nothing new is started"


def test_active_runs_need_no_history(site: Site) -> None:
    assert service_commands._active_runs(site) == []
    assert not (site.home / "history.db").exists(), "asking makes none"


def test_the_beat_is_read_whole(tmp_path: Path) -> None:
    """A concurrent reader sees the old beat or the new one."""
    stop, seen = threading.Event(), set()
    with holding(tmp_path, "worker") as beat:
        beat()

        def reads() -> None:
            while not stop.is_set():
                seen.add(service_status(tmp_path, "worker").state)

        reader = threading.Thread(target=reads)
        reader.start()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            beat()
        stop.set()
        reader.join()
    assert seen == {ServiceState.RUNNING}


def test_only_retries_of_a_busy_sqlite_are_not_logged() -> None:
    import logging

    from prefect.server.models import block_registration, deployments
    from prefect.server.orchestration import rules
    from prefect.server.utilities import worker_channel

    from flows.server.app import RETRYING_LOGGERS, SERVER_LOGGER, is_news

    def line(error: Exception | None, logger: str = "docket", file: str = "") -> logging.LogRecord:
        info = (type(error), error, None) if error else None
        return logging.LogRecord(logger, logging.ERROR, file, 1, "again", (), info)

    locked = OSError("(sqlite3.OperationalError) database is locked")
    assert not is_news(line(locked))
    assert is_news(line(OSError("database disk image is malformed")))
    assert is_news(line(None))
    assert {worker_channel.logger.name, deployments.logger.name} <= set(RETRYING_LOGGERS)
    assert not is_news(line(locked, rules.logger.name, rules.__file__))
    assert is_news(line(locked, block_registration.logger.name, block_registration.__file__)), "it does not retry"
    assert {rules.logger.name, block_registration.logger.name} == {SERVER_LOGGER}


def test_the_copied_pages_of_the_ui_get_a_style_once(tmp_path: Path) -> None:
    from flows.server.app import STYLE, style_pages

    page = tmp_path / "v1" / "index.html"
    page.parent.mkdir()
    page.write_text("<html><head></head><body></body></html>")
    script = tmp_path / "v1" / "index.js"
    script.write_text("</head>")
    for _ in range(2):  # the server starts again with the same copy
        style_pages(tmp_path)
        assert page.read_text() == f"<html><head>{STYLE}</head><body></body></html>"
    assert script.read_text() == "</head>"
    style_pages(tmp_path / "missing")


STOPPED = """
import os, random, signal, threading, time
from flows.serving import stop_on_signals

def send(after_s):
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGTERM)

for _ in range(40):
    stop = stop_on_signals()
    threading.Thread(target=send, args=(random.uniform(0.0, 0.01),)).start()
    while not stop.wait(0.0):
        pass
print("stopped 40 times")
"""


def test_a_signal_that_arrives_in_a_wait_stops_the_daemon() -> None:
    ended = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == "stopped 40 times"


STUCK = """
import atexit, os, signal, time
from flows import serving

serving.DAEMON_STOP_TIMEOUT_S = 0.5
atexit.register(time.sleep, 60)  # as the senders of Prefect's client
stop = serving.stop_on_signals()
os.kill(os.getpid(), signal.SIGTERM)
stop.wait()
print("told to stop", flush=True)
{action}
"""


@pytest.mark.parametrize("action", ["time.sleep(60)", ""], ids=["in an action", "at its exit"])
def test_a_daemon_whose_client_still_retries_ends_all_the_same(action: str) -> None:
    command = [sys.executable, "-c", STUCK.format(action=action)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.strip() == "told to stop"
