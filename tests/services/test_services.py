"""The services of a site, really: two at once, killed, stopped, asked without a password, looked at in a browser."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from shop_floor import Floor, free_port, until

from flows.services import SERVICES

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def floor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Floor]:
    """A site whose server other machines reach, started by two people at once."""
    floor = Floor(tmp_path_factory.mktemp("site"), free_port(), host="0.0.0.0")
    # Prefect's own ear for cancellations goes deaf in an outage of any length here, as it does at its default in 45 s.
    floor.variables = {"PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    floor.write_settings()
    try:
        both = [floor.start("up") for _ in range(2)]
        said = [process.communicate(timeout=150) for process in both]
        assert [process.returncode for process in both] == [0, 0], f"{said}\n{floor.logs()}"
        (floor.home / "said").write_text("\n".join(text for pair in said for text in pair))
        yield floor
    finally:
        floor.kill_all()


def test_two_at_once_start_one_of_each(floor: Floor) -> None:
    said = (floor.home / "said").read_text()
    for name in SERVICES:
        assert said.count(f"starting the {name}") == 1
        assert f"{name}: was running" in said, "the other one found it there"
    serving = [" ".join(one.cmdline()) for one in floor.processes()]
    assert [sum(f"serve {name}" in line for line in serving) for name in SERVICES] == [1] * len(SERVICES)
    assert {one["state"] for name, one in floor.status().items() if name in SERVICES} == {"running"}


def test_up_again_changes_nothing_but_the_settings_that_changed(floor: Floor) -> None:
    before = floor.pids()
    floor.max_runs = 7
    floor.write_settings()
    floor.rlhf("up")
    assert floor.pids() == before
    assert floor.ask("/work_pools/rlhf")[1]["concurrency_limit"] == 7
    queues = floor.ask("/work_pools/rlhf/queues/filter", {})[1]
    assert {one["name"]: one["priority"] for one in queues} == {"high": 1, "default": 2, "low": 3}


def test_a_service_is_never_there_twice(floor: Floor) -> None:
    found = floor.rlhf("serve", "worker", code=2)
    assert f"process {floor.pids()['worker']}" in found.stderr


def test_the_api_asks_for_the_password(floor: Floor) -> None:
    assert floor.ask("/work_pools/rlhf")[0] == 200
    assert floor.ask("/work_pools/rlhf", auth="")[0] == 401
    assert floor.ask("/work_pools/rlhf", auth="rlhf:wrong")[0] == 401
    assert (floor.home / "prefect" / "auth").stat().st_mode & 0o777 == 0o600
    said = (floor.home / "said").read_text()
    assert "`rlhf password` prints it" in said
    assert floor.password not in said
    assert floor.rlhf("password").stdout.strip() == floor.password


def test_a_run_uses_the_server_of_the_site(floor: Floor) -> None:
    code = """
from flows.server import connect
from flows.temporary_server import prefect_server
from rlhf_core.config import load_site
site = load_site()
connect(site)
with prefect_server(site.home, print) as url:
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        print(url, client.read_work_pool("rlhf").name)
"""
    assert floor.python(code) == f"http://127.0.0.1:{floor.port}/api rlhf"


# ---------------------------------------------------------------------------------------------------------------------
# The UI


class Outside:
    """A proxy that everything which is not on this machine would go through; it writes down who was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(4096).decode(errors="replace").split()
                if len(request) > 1 and not request[1].endswith(ITS_OWN_BUSINESS):
                    self.asked.append(request[1])
                connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    def close(self) -> None:
        self._listener.close()


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium is not installed")
ITS_OWN_BUSINESS = (".google.com:443", "content-autofill.googleapis.com:443", ".gvt1.com:443")
"""Whom the browser itself asks, whatever page it shows."""

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
MARKDOWN = f"# Shown\n\n![inside](data:image/png;base64,{PIXEL})\n\n![outside](http://images.example.com/a.png)\n"


def look_around(floor: Floor, outside: Outside, artifact: str, *, guarded: bool) -> tuple[list[int], str]:
    """Look at pages of both UIs in a browser. Returns the widths of the pictures in an artifact, and its text."""
    from playwright.sync_api import Route, sync_playwright

    base = f"http://127.0.0.1:{floor.port}"

    def without_policy(route: Route) -> None:
        answer = route.fetch()
        headers = {name: value for name, value in answer.headers.items() if name != "content-security-policy"}
        route.fulfill(response=answer, headers=headers)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER,
            args=["--no-sandbox"],
            proxy={"server": f"http://127.0.0.1:{outside.port}", "bypass": "127.0.0.1"},
        )
        page = browser.new_page()
        page.set_default_timeout(30_000)
        if not guarded:
            page.route(lambda url: url.startswith(base) and "/api/" not in url, without_policy)
        page.goto(base)
        page.evaluate(f"localStorage.setItem('prefect-password', btoa('{floor.password}'))")
        page.goto(f"{base}/v2/dashboard")
        page.get_by_text("Work Pools").first.wait_for()
        page.goto(f"{base}/artifacts/artifact/{artifact}")
        page.get_by_text("Shown").first.wait_for()
        page.wait_for_load_state("networkidle")
        widths = page.eval_on_selector_all("img[alt=inside]", "all => all.map(one => one.naturalWidth)")
        text = page.inner_text("body")
        browser.close()
    return widths, text


@needs_browser
def test_the_ui_works_and_no_request_leaves_the_machine(floor: Floor) -> None:
    made = floor.ask("/artifacts/", {"key": "shown", "type": "markdown", "data": MARKDOWN})[1]
    outside = Outside()
    widths, text = look_around(floor, outside, made["id"], guarded=True)
    outside.close()
    assert widths == [1], "a picture that stands in the page is shown"
    assert "Shown" in text
    assert outside.asked == []


@needs_browser
def test_without_the_policy_requests_leave_the_machine(floor: Floor) -> None:
    """Negative control of the test before."""
    made = floor.ask("/artifacts/", {"key": "shown", "type": "markdown", "data": MARKDOWN})[1]
    outside = Outside()
    look_around(floor, outside, made["id"], guarded=False)
    outside.close()
    assert any("images.example.com" in one for one in outside.asked)
    assert any("amplitude.com" in one for one in outside.asked)


# ---------------------------------------------------------------------------------------------------------------------
# Ended, killed, stopped


def test_a_worker_that_is_ended_lets_its_flow_runs_let_go(floor: Floor, tmp_path: Path) -> None:
    run = floor.start_flow(tmp_path / "a")
    pid = int(until(lambda: (tmp_path / "a" / "begun").exists() and (tmp_path / "a" / "begun").read_text()))
    floor.rlhf("down", "worker")
    assert not psutil.pid_exists(pid)
    assert (tmp_path / "a" / "let go").exists(), "its lease would be given back here"
    assert not (tmp_path / "a" / "done").exists()
    assert until(lambda: floor.state_of(run) == "Crashed"), "the server was told"
    floor.rlhf("up")


def test_a_flow_run_outlives_a_killed_worker_and_down_ends_it(floor: Floor, tmp_path: Path) -> None:
    goes_on, is_ended = floor.start_flow(tmp_path / "a", "goes-on"), floor.start_flow(tmp_path / "b", "is-ended")
    until(lambda: (tmp_path / "a" / "begun").exists() and (tmp_path / "b" / "begun").exists())
    os.kill(floor.pids()["worker"], signal.SIGKILL)
    (tmp_path / "a" / "go").touch()
    assert until(lambda: floor.state_of(goes_on) == "Completed")
    assert floor.state_of(is_ended) == "Running"
    floor.rlhf("down", "worker")
    assert (tmp_path / "b" / "let go").exists()
    floor.rlhf("up")


STATES = """
from rlhf_core.config import load_site
from rlhf_core.services import presence
presence.HEARTBEAT_TIMEOUT_S = 4.0
print(*(presence.look(load_site().home, name).state for name in ("server", "worker")))
"""


def test_an_outage_of_the_server_ends_neither_worker_nor_flow_runs(floor: Floor, tmp_path: Path) -> None:
    run = floor.start_flow(tmp_path / "a", "through-an-outage")
    is_cancelled = floor.start_flow(tmp_path / "b", "cancelled-after-it")
    until(lambda: (tmp_path / "a" / "begun").exists() and (tmp_path / "b" / "begun").exists())
    before = floor.pids()
    os.kill(before["server"], signal.SIGKILL)
    (tmp_path / "a" / "go").touch()
    until(lambda: (tmp_path / "a" / "done").exists())
    floor.rlhf("up")
    assert {name: pid for name, pid in floor.pids().items() if name != "server"} == {
        name: pid for name, pid in before.items() if name != "server"
    }
    assert until(lambda: floor.state_of(run) == "Completed")
    # The worker, which found no server for so long, still hears of cancellations.
    floor.cancel(is_cancelled)
    assert until(lambda: floor.state_of(is_cancelled) == "Cancelled")
    assert (tmp_path / "b" / "let go").exists()


SHORT_TIMEOUTS = """
from flows import services
from rlhf_core.config import load_site
from rlhf_core.services import lifecycle, presence
presence.HEARTBEAT_TIMEOUT_S, lifecycle.ANSWER_TIMEOUT_S = 4.0, 1.0
print([one.what for one in services.up(load_site(), ("server", "worker"), print)])
"""


def test_services_that_do_not_answer_are_replaced(floor: Floor) -> None:
    before = floor.pids()
    os.kill(before["worker"], signal.SIGSTOP)
    os.kill(before["server"], signal.SIGSTOP)
    until(lambda: floor.python(STATES) == "silent silent")
    said = floor.python(SHORT_TIMEOUTS)
    assert "['replaced', 'replaced']" in said
    after = floor.pids()
    assert {after["server"], after["worker"]}.isdisjoint(before.values())
    assert not any(psutil.pid_exists(before[name]) for name in ("server", "worker"))


def test_after_a_kill_of_everything_all_is_back_and_what_is_old_is_gone(floor: Floor) -> None:
    before = floor.pids()
    long_ago = (datetime.now(UTC) - timedelta(days=40)).strftime("%Y-%m-%d %H:%M:%S.%f")
    runs = floor.ask("/flow_runs/filter", {})[1]
    old, young = [one["id"] for one in runs if one["state"]["type"] in ("COMPLETED", "CRASHED")][:2]
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(psutil.pid_exists(pid) for pid in before.values()))
    with sqlite3.connect(floor.home / "prefect" / "prefect.db") as database:
        database.execute("UPDATE flow_run SET end_time = ? WHERE id = ?", (long_ago, old))
    database.close()
    assert {one["state"] for one in floor.status().values()} == {"stopped"}
    floor.rlhf("up")
    assert set(floor.pids()) == set(SERVICES)
    assert set(floor.pids().values()).isdisjoint(before.values())
    assert until(lambda: floor.state_of(old) == "404"), "Prefect keeps what has ended for 30 days"
    assert floor.state_of(young) != "404"


def test_the_password_is_nowhere_and_down_leaves_nothing_behind(floor: Floor) -> None:
    """The last test of this site."""
    secret = floor.password.partition(":")[2]
    assert len(secret) > 20
    lines = [" ".join(process.cmdline()) for process in floor.processes()]
    found = floor.rlhf("down")
    assert all(name in found.stdout for name in SERVICES)
    assert floor.processes() == []
    assert floor.rlhf("down").stdout.startswith("nothing was running")
    with_secret = [path for path in floor.home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert with_secret == [floor.home / "prefect" / "auth"]
    assert not (floor.home / ".prefect").exists(), "the files of Prefect that belong to the person are left alone"
    assert "database is locked" not in (floor.home / "logs" / "server.log").read_text()
    assert not [line for line in lines if secret in line]


# ---------------------------------------------------------------------------------------------------------------------
# Without a server


def test_what_has_died_is_started_again(tmp_path: Path) -> None:
    """Although the server takes long; but not what `rlhf down` has ended."""
    floor = Floor(tmp_path / "site", free_port(), restart_s=0.5)
    floor.write_settings()
    floor.rlhf("up")
    try:
        before = floor.pids()
        for name in ("server", "worker"):
            os.kill(before[name], signal.SIGKILL)
        until(lambda: set(floor.pids()) == set(SERVICES) and not set(floor.pids().values()) & {before["server"]})
        until(lambda: {one["state"] for one in floor.status().values()} == {"running"})
        between = floor.pids()
        assert between["daemon"] == before["daemon"]
        assert {between["server"], between["worker"]}.isdisjoint(before.values())
        restarts = [floor.status()[name]["restarts"] for name in SERVICES]
        assert restarts[0] >= 1, floor.logs()
        assert restarts[1] >= 1, floor.logs()
        assert restarts[2] == 0, floor.logs()
        os.kill(between["daemon"], signal.SIGKILL)
        until(lambda: floor.pids().get("daemon") not in (None, between["daemon"]))
        floor.rlhf("down", "worker")
        until(lambda: floor.status()["daemon"]["state"] == "running")
        assert floor.status()["worker"]["state"] == "stopped"
    finally:
        floor.rlhf("down")
        left = floor.processes()
        for process in left:
            process.kill()
    assert left == []


def test_a_port_that_is_taken_is_named_with_who_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        floor = Floor(tmp_path / "site", port)
        floor.write_settings()
        found = floor.rlhf("up", "server", code=2)
    assert f"port {port}" in found.stderr
    assert f"process {os.getpid()}" in found.stderr
    assert {one["state"] for one in floor.status().values()} == {"stopped"}


def test_a_service_that_does_not_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    floor = Floor(tmp_path / "site", free_port())
    floor.write_settings()
    with (floor.home / "rlhf.toml").open("a") as file:
        file.write('\ndatabase_url = "sqlite+aiosqlite:////proc/none/prefect.db"')
    found = floor.rlhf("up", "server", code=1)
    assert "the server ended with exit code" in found.stderr
    assert str(floor.home / "logs" / "server.log") in found.stderr
    assert "unable to open database file" in found.stderr


def test_a_service_that_something_else_keeps_running_is_not_ended(tmp_path: Path) -> None:
    floor = Floor(tmp_path / "site", free_port())
    floor.write_settings()
    process = floor.start("serve", "worker", RLHF_STARTED_BY="systemd")  # it waits for its server
    try:
        until(lambda: floor.pids().get("worker") == process.pid)
        found = floor.rlhf("down", code=2)
        assert "kept running by systemd" in found.stderr
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_help_needs_no_prefect() -> None:
    """``rlhf --help`` stays fast."""
    code = "import sys; from rlhf_core.cli import main; print('prefect' in sys.modules, 'flows' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False False"
