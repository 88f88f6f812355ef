"""The real services of a site: two at once, killed, stopped, requested without a password, and shown in a browser."""

import os
import signal
import socket
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from process_tools import ASKING_INTERVAL_S, until
from signing_in import PAGE_TIMEOUT_MS, chromium
from sites import TIMEOUT_S, Site

from flows.services import SERVICES

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with a server that other machines can reach, started by two users at once."""
    site = Site(tmp_path_factory.mktemp("site"), host="0.0.0.0")
    # Here, Prefect's observer of cancellations fails in an outage of any length; by default, in one of 45 s.
    # The proxy, which is down, is for addresses on other machines.
    site.variables = {"PREFECT_RUNNER_POLL_FREQUENCY": "1", "http_proxy": "http://127.0.0.1:9"}
    with site.running(services=False):
        both = [site.start("up") for _ in range(2)]
        output = [process.communicate(timeout=TIMEOUT_S) for process in both]
        assert [process.returncode for process in both] == [0, 0], f"{output}\n{site.logs()}"
        (site.home / "output").write_text("\n".join(text for pair in output for text in pair))
        yield site


def start_flow(site: Site, folder: Path, name: str = "waits") -> str:
    """Make the worker run the sample flow; returns the id of the flow run."""
    folder.mkdir()
    _, flow = site.ask("/flows/", {"name": name})
    deployment = {
        "name": name,
        "flow_id": flow["id"],
        "entrypoint": "sample_flow.py:waits",
        "path": str(Path(__file__).parent),
        "work_pool_name": "rlhf",
        "work_queue_name": "high",
        "parameter_openapi_schema": {},
        "enforce_parameter_schema": False,
    }
    status, made = site.ask("/deployments/", deployment)
    assert status in (200, 201), f"{status} {made}\n{site.logs()}"
    status, run = site.ask(f"/deployments/{made['id']}/create_flow_run", {"parameters": {"folder": str(folder)}})
    assert status in (200, 201), f"{status} {run}\n{site.logs()}"
    return str(run["id"])


def test_two_at_once_start_one_of_each(site: Site) -> None:
    output = (site.home / "output").read_text()
    for name in SERVICES:
        assert output.count(f"starting the {name}") == 1
        assert f"{name}: was running" in output, "the other one found it there"
    serving = site.commands()
    assert [sum(f"serve {name}" in line for line in serving) for name in SERVICES] == [1] * len(SERVICES)
    assert {one["state"] for name, one in site.status().items() if name in SERVICES} == {"running"}


def test_up_again_changes_nothing_but_the_settings_that_changed(site: Site) -> None:
    before = site.pids()
    site.max_runs = 7
    site.write_settings()
    site.rlhf("up")
    assert site.pids() == before
    assert site.ask("/work_pools/rlhf")[1]["concurrency_limit"] == 7
    queues = site.ask("/work_pools/rlhf/queues/filter", {})[1]
    assert {one["name"]: one["priority"] for one in queues} == {"high": 1, "default": 2, "low": 3}


def test_a_service_never_runs_twice(site: Site) -> None:
    found = site.rlhf("serve", "worker", code=2)
    assert f"process {site.pids()['worker']}" in found.stderr


def test_the_api_requires_the_password(site: Site) -> None:
    assert site.ask("/work_pools/rlhf")[0] == 200
    assert site.ask("/work_pools/rlhf", auth="")[0] == 401
    assert site.ask("/work_pools/rlhf", auth="rlhf:wrong")[0] == 401
    assert (site.home / "prefect" / "auth").stat().st_mode & 0o777 == 0o600
    output = (site.home / "output").read_text()
    assert "`rlhf password` prints it" in output
    assert site.password not in output
    assert site.rlhf("password").stdout.strip() == site.password


def test_a_run_uses_the_server_of_the_site(site: Site) -> None:
    code = """
from flows.server.settings import connect
from flows.server.temporary import prefect_server
from rlhf_core.config.site import load_site
site = load_site()
connect(site)
with prefect_server(site.home, print) as url:
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        print(url, client.read_work_pool("rlhf").name)
"""
    assert site.python(code) == f"http://127.0.0.1:{site.port}/api rlhf"


# ---------------------------------------------------------------------------------------------------------------------
# The UI


@pytest.mark.parametrize("path", ["/", "/runs", "/v2/"])
def test_every_page_has_our_style_when_compressed_for_a_browser(site: Site, path: str) -> None:
    answer = httpx.get(f"http://127.0.0.1:{site.port}{path}", headers={"Accept": "text/html"}, trust_env=False)
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.text.count("text-overflow:ellipsis") == 1


class Outside:
    """A proxy that receives every request to another machine and records the requested hosts."""

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


ITS_OWN_BUSINESS = (".google.com:443", "content-autofill.googleapis.com:443", ".gvt1.com:443")
"""Whom the browser itself asks, whatever page it shows."""

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
MARKDOWN = f"# Shown\n\n![inside](data:image/png;base64,{PIXEL})\n\n![outside](http://images.example.com/a.png)\n"


def visit_pages(site: Site, outside: Outside, artifact: str, *, guarded: bool) -> tuple[list[int], str]:
    """Visit pages of both UIs in a browser; returns the widths of the pictures in an artifact, and its text."""
    base = f"http://127.0.0.1:{site.port}"

    def without_policy(route: Any) -> None:
        answer = route.fetch()
        headers = {name: value for name, value in answer.headers.items() if name != "content-security-policy"}
        route.fulfill(response=answer, headers=headers)

    with chromium(proxy={"server": f"http://127.0.0.1:{outside.port}", "bypass": "127.0.0.1"}) as browser:
        page = browser.new_page()
        page.set_default_timeout(PAGE_TIMEOUT_MS)
        if not guarded:
            # Only pages: each of their many scripts would pass through this process.
            page.route(lambda url: url.startswith(base) and not {"api", "assets"} & set(url.split("/")), without_policy)
        page.goto(base)
        page.evaluate(f"localStorage.setItem('prefect-password', btoa('{site.password}'))")
        page.goto(f"{base}/v2/dashboard")
        page.get_by_text("Work Pools").first.wait_for()
        page.goto(f"{base}/artifacts/artifact/{artifact}")
        page.get_by_text("Shown").first.wait_for()
        page.wait_for_load_state("networkidle")
        widths = page.eval_on_selector_all("img[alt=inside]", "all => all.map(one => one.naturalWidth)")
        text = page.inner_text("body")
    return widths, text


def test_the_ui_works_and_no_request_leaves_the_machine(site: Site) -> None:
    made = site.ask("/artifacts/", {"key": "shown", "type": "markdown", "data": MARKDOWN})[1]
    outside = Outside()
    widths, text = visit_pages(site, outside, made["id"], guarded=True)
    outside.close()
    assert widths == [1], "a picture that stands in the page is shown"
    assert "Shown" in text
    assert outside.asked == []


def test_without_the_policy_requests_leave_the_machine(site: Site) -> None:
    """Negative control of the previous test."""
    made = site.ask("/artifacts/", {"key": "shown", "type": "markdown", "data": MARKDOWN})[1]
    outside = Outside()
    visit_pages(site, outside, made["id"], guarded=False)
    outside.close()
    assert any("images.example.com" in one for one in outside.asked)
    assert any("amplitude.com" in one for one in outside.asked)


# ---------------------------------------------------------------------------------------------------------------------
# Ended, killed, stopped


def test_a_stopped_worker_lets_its_flow_runs_clean_up(site: Site, tmp_path: Path) -> None:
    run = start_flow(site, tmp_path / "a")
    pid = int(until(lambda: (tmp_path / "a" / "begun").exists() and (tmp_path / "a" / "begun").read_text()))
    for name, process in {**site.pids(), "flow run": pid}.items():
        maps = Path(f"/proc/{process}/maps").read_text()
        assert "pydantic" in maps, name
        assert "/pandas/" not in maps, f"{name}: Prefect imports it, which takes longer than the rest of Prefect"
    site.rlhf("down", "worker")
    assert not psutil.pid_exists(pid)
    assert (tmp_path / "a" / "let go").exists(), "its lease would be given back here"
    assert not (tmp_path / "a" / "done").exists()
    assert until(lambda: site.flow_state(run) == "Crashed", interval_s=ASKING_INTERVAL_S), "the server was told"
    site.rlhf("up", "worker")


def test_a_flow_run_outlives_a_killed_worker_and_down_ends_it(site: Site, tmp_path: Path) -> None:
    goes_on, is_ended = start_flow(site, tmp_path / "a", "goes-on"), start_flow(site, tmp_path / "b", "is-ended")
    until(lambda: (tmp_path / "a" / "begun").exists() and (tmp_path / "b" / "begun").exists())
    os.kill(site.pids()["worker"], signal.SIGKILL)
    (tmp_path / "a" / "go").touch()
    assert until(lambda: site.flow_state(goes_on) == "Completed", interval_s=ASKING_INTERVAL_S)
    assert site.flow_state(is_ended) == "Running"
    site.rlhf("down", "worker")
    assert (tmp_path / "b" / "let go").exists()
    site.rlhf("up", "worker")


def test_an_outage_of_the_server_ends_neither_worker_nor_flow_runs(site: Site, tmp_path: Path) -> None:
    run = start_flow(site, tmp_path / "a", "through-an-outage")
    is_cancelled = start_flow(site, tmp_path / "b", "cancelled-after-it")
    until(lambda: (tmp_path / "a" / "begun").exists() and (tmp_path / "b" / "begun").exists())
    lease = take_slot(site, "outlives-the-server")
    before = site.pids()
    os.kill(before["server"], signal.SIGKILL)
    (tmp_path / "a" / "go").touch()
    until(lambda: (tmp_path / "a" / "done").exists())
    site.rlhf("up")
    assert {name: pid for name, pid in site.pids().items() if name != "server"} == {
        name: pid for name, pid in before.items() if name != "server"
    }
    assert until(lambda: site.flow_state(run) == "Completed", interval_s=ASKING_INTERVAL_S)
    # The worker still receives cancellations after such a long outage.
    site.cancel(is_cancelled)
    assert until(lambda: site.flow_state(is_cancelled) == "Cancelled", interval_s=ASKING_INTERVAL_S)
    assert (tmp_path / "b" / "let go").exists()
    assert site.ask(f"/v2/concurrency_limits/leases/{lease}/renew", {"lease_duration": 300})[0] == 204
    site.ask("/v2/concurrency_limits/decrement-with-lease", {"lease_id": lease})
    assert site.ask("/v2/concurrency_limits/outlives-the-server")[1]["active_slots"] == 0


def take_slot(site: Site, limit: str) -> str:
    """Make a limit of one and take its only slot; returns the lease of the slot."""
    site.ask("/v2/concurrency_limits/", {"name": limit, "limit": 1})
    taken = {"names": [limit], "slots": 1, "mode": "concurrency", "lease_duration": 300}
    status, found = site.ask("/v2/concurrency_limits/increment-with-lease", taken)
    assert status == 200, found
    return str(found["lease_id"])


@dataclass(frozen=True)
class Killed:
    """The site before and after a kill of everything."""

    pids: dict[str, int]
    """The services before."""
    states: set[str]
    """States of the services after the kill."""
    old: str
    """Flow run that ended 40 days ago."""
    young: str
    """Flow run that ended 20 days ago."""


@pytest.fixture(scope="module")
def killed(site: Site) -> Killed:
    """The site started again after a kill of everything; from now on, dead services are restarted."""
    pids = site.pids()
    _, flow = site.ask("/flows/", {"name": "ended"})
    ended = {"flow_id": flow["id"], "state": {"type": "COMPLETED"}}
    old, young = (str(site.ask("/flow_runs/", ended)[1]["id"]) for _ in range(2))
    site.kill_all()
    with sqlite3.connect(site.home / "prefect" / "prefect.db") as database:
        for run, days in ((old, 40), (young, 20)):
            ended_at = (datetime.now(UTC) - timedelta(days=days)).strftime("%Y-%m-%d %H:%M:%S.%f")
            database.execute("UPDATE flow_run SET end_time = ? WHERE id = ?", (ended_at, run))
    database.close()
    states = {str(one["state"]) for one in site.status().values()}
    site.restart_s = 0.5
    site.write_settings()
    site.rlhf("up")
    return Killed(pids, states, old, young)


def test_after_a_kill_of_everything_all_services_are_back_without_leftovers(site: Site, killed: Killed) -> None:
    assert killed.states == {"stopped"}
    assert set(site.pids()) == set(SERVICES)
    assert set(site.pids().values()).isdisjoint(killed.pids.values())
    assert until(lambda: site.flow_state(killed.old) == "404", interval_s=ASKING_INTERVAL_S), (
        "Prefect keeps what has ended for 30 days"
    )
    assert site.flow_state(killed.young) == "Completed"


@pytest.mark.usefixtures("killed")
def test_a_dead_service_is_restarted_and_counted(site: Site) -> None:
    """As the settings of the site say; the rest is in test_services_supervised.py."""
    pid, num_restarts = site.pids()["daemon"], site.status()["daemon"]["restarts"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: site.pids().get("daemon") not in (None, pid))
    assert site.status()["daemon"]["restarts"] == num_restarts + 1


def test_the_password_is_nowhere_and_down_leaves_nothing_behind(site: Site) -> None:
    """The last test of this site."""
    secret = site.password.partition(":")[2]
    assert len(secret) > 20
    lines = site.commands()
    found = site.rlhf("down")
    assert all(name in found.stdout for name in SERVICES)
    assert site.processes() == []
    assert site.rlhf("down").stdout.startswith("nothing was running")
    with_secret = [path for path in site.home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert with_secret == [site.home / "prefect" / "auth"]
    assert not (site.home / ".prefect").exists(), "the files of Prefect that belong to the person are left alone"
    assert "database is locked" not in (site.home / "logs" / "server.log").read_text()
    assert not [line for line in lines if secret in line]
