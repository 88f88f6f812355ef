"""Attacks on the Prefect server of a site: as another user, without the password, and from a page in a browser."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import websockets.exceptions
import websockets.sync.client
from prefect_template import REGISTERED, give_prefect_database
from signing_in import authorization, chromium
from site_stranger import as_stranger, needs_root, page_of_a_stranger
from sites import Site

from flows.server import temporary as temporary_server
from flows.server.guards import MAX_BODY_BYTES

pytestmark = pytest.mark.end_to_end

MB = 1 << 20


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with a running server and default settings, apart from the port."""
    with Site(tmp_path_factory.mktemp("site")).running(services=False) as site:
        site.serve("server")
        yield site


@pytest.fixture(scope="module")
def paused(site: Site) -> str:
    """A flow run that waits for an answer."""
    _, flow = site.ask("/flows/", {"name": "asks"})
    _, run = site.ask("/flow_runs/", {"flow_id": flow["id"], "state": {"type": "RUNNING"}})
    site.ask(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "PAUSED"}, "force": True})
    assert site.flow_state(run["id"]) == "Paused"
    return str(run["id"])


def deployment(site: Site) -> dict[str, Any]:
    """A deployment whose flow runs would run a program chosen by the sender."""
    _, flow = site.ask("/flows/", {"name": "evil"})
    return {"name": "evil", "flow_id": flow["id"], "pull_steps": [], "entrypoint": "evil.py:run"}


# ---------------------------------------------------------------------------------------------------------------------
# Without the password


@needs_root
def test_another_user_of_the_machine_changes_nothing_and_reads_nothing(site: Site, paused: str) -> None:
    content = deployment(site)
    questions: list[tuple[str, Any]] = [
        (f"/flow_runs/{paused}/resume", {"run_input": {"approve": True, "by": "Head of Safety", "reason": ""}}),
        ("/deployments/", content),
        ("/deployments/filter", {}),
        ("/admin/settings", None),
        ("/csrf-token?client=stranger", None),
    ]
    for auth in ("", "rlhf:guessed", "rlhf:"):
        found = as_stranger(lambda auth=auth: [site.ask(*question, auth=auth)[0] for question in questions])
        assert found == [401] * len(questions)
    assert as_stranger(lambda: site.ask("/health", auth="")) == [200, True], "its existence may be visible"
    assert as_stranger(lambda: (site.home / "prefect" / "auth").read_text()) == "PermissionError"
    assert site.flow_state(paused) == "Paused"
    assert site.ask("/deployments/filter", {})[1] == []


def test_with_the_password_the_same_is_done(site: Site, paused: str) -> None:
    """Negative control of the test above: only the password was missing."""
    assert site.ask(f"/flow_runs/{paused}/resume", {})[0] == 201
    status, made = site.ask("/deployments/", deployment(site))
    assert status == 201
    assert site.ask(f"/deployments/{made['id']}", method="DELETE")[0] == 204


@pytest.mark.parametrize("path", ["events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled"])
def test_a_websocket_without_the_password_is_closed(site: Site, path: str) -> None:
    assert websocket(site, path, "rlhf:guessed") == "closed"
    assert websocket(site, path, site.password) == "auth_success", "negative control"


def websocket(site: Site, path: str, password: str) -> str:
    """Answer of a websocket to a password."""
    url = f"ws://127.0.0.1:{site.port}/api/{path}"
    try:
        with websockets.sync.client.connect(url, subprotocols=["prefect"]) as connection:  # type: ignore[list-item]
            connection.send(json.dumps({"type": "auth", "token": password}))
            return str(json.loads(connection.recv(timeout=20))["type"])
    except websockets.exceptions.InvalidStatus as refused:
        return str(refused.response.status_code)
    except websockets.exceptions.ConnectionClosed:
        return "closed"


# ---------------------------------------------------------------------------------------------------------------------
# Names


def asked(site: Site, method: str = "GET", path: str = "/api/health", body: str = "", **headers: str) -> int:
    """Status of a request with custom headers, including the password."""
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, {**authorization(site.password), **named})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4200", "127.0.0.1.evil.example", "10.0.0.7", "[::2]", ""]
)
def test_a_name_that_is_not_the_servers_is_refused(site: Site, host: str) -> None:
    assert asked(site, path="/", host=host) == 400
    assert asked(site, host=host) == 400
    assert asked(site, "POST", "/api/flows/filter", "{}", host=host) == 400
    assert websocket_named(site, host) == 403


def websocket_named(site: Site, host: str, origin: str = "") -> int:
    """Status of a handshake under another name, or from a page."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=20) as connection:
        lines = ["GET /api/events/out HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"]
        lines += ["Sec-WebSocket-Protocol: prefect", *([f"Origin: {origin}"] if origin else [])]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.recv(4096).split()[1])


def test_names_of_loopback_are_served(site: Site) -> None:
    """Negative control of the test above."""
    for host in ("127.0.0.1", f"localhost:{site.port}", "LOCALHOST", "[::1]:9"):
        assert asked(site, path="/", host=host) == 200
        assert websocket_named(site, host) == 101


def test_what_a_page_of_another_origin_sends_is_refused(site: Site) -> None:
    host = f"127.0.0.1:{site.port}"
    for origin in ("http://evil.example", f"http://127.0.0.1:{site.port + 1}", f"http://localhost:{site.port}", "null"):
        assert asked(site, "POST", "/api/flows/filter", "{}", origin=origin) == 403
        assert asked(site, "POST", "/api/flows/filter", "{}", referer=f"{origin}/page") == 403
        assert websocket_named(site, host, origin) == 403
    assert websocket_named(site, host, f"http://{host}") == 101, "negative control"
    assert site.ask("/flows/filter", {})[0] == 200


def test_what_writes_needs_a_token_beside_the_password(site: Site) -> None:
    """Otherwise, a page that has obtained the password in some other way could write without reading."""
    assert asked(site, "POST", "/api/flows/", '{"name": "tokenless"}', content_type="application/json") == 403
    assert "tokenless" not in flows(site)


def flows(site: Site) -> set[str]:
    return {one["name"] for one in site.ask("/flows/filter", {})[1]}


PAGE = """
<form id=form method=post enctype="text/plain" action="{api}/flows/" target=_blank>
<input name='{{"name": "by-form", "x": "' value='"}}'></form>
<script>
async function attack() {{
    const found = [];
    const body = name => JSON.stringify({{name}});
    const headers = {{"Authorization": "{authorization}", "Content-Type": "application/json"}};
    for (const options of [
        {{method: "POST", mode: "no-cors", body: body("by-simple-request")}},
        {{method: "POST", body: body("with-password"), headers}},
        {{method: "GET", headers}},
    ]) {{
        try {{ found.push((await fetch("{api}/flows/", options)).type) }} catch (error) {{ found.push("blocked") }}
    }}
    document.getElementById("form").submit();
    return found;
}}
</script>
"""


def test_a_page_on_another_port_can_neither_write_nor_read(site: Site) -> None:
    """This holds even for a page that knows the password, in the browser of a signed-in user, under a name that it
    controls."""
    header = authorization(site.password)["authorization"]
    base = f"http://127.0.0.1:{site.port}"
    mapped = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    page_of_the_stranger = page_of_a_stranger(PAGE.format(api=f"{base}/api", authorization=header))
    with page_of_the_stranger as evil, chromium(mapped) as browser:
        context = browser.new_context()
        page = context.new_page()
        page.goto(evil)
        with context.expect_page() as opened:
            assert page.evaluate("attack()") == ["opaque", "blocked", "blocked"]
        opened.value.wait_for_load_state()
        assert not {"by-form", "by-simple-request", "with-password"} & flows(site)
        rebound = page.goto(f"http://evil.example:{site.port}/")
        assert rebound is not None
        assert rebound.status == 400
        # Negative control: a page of the server itself is served, asks for the password, and may write with it.
        page.goto(f"{base}/v2/dashboard")
        page.locator("input[type=password]").fill(site.password)
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Deployments").first.wait_for()
        assert page.evaluate(OWN_PAGE, header) == 201
    assert "by-own-page" in flows(site)


OWN_PAGE = """async header => {
    const token = await (await fetch("/api/csrf-token?client=page", {headers: {"Authorization": header}})).json();
    const headers = {"Authorization": header, "Content-Type": "application/json",
                     "Prefect-Csrf-Token": token.token, "Prefect-Csrf-Client": "page"};
    return (await fetch("/api/flows/", {method: "POST", body: '{"name": "by-own-page"}', headers})).status;
}"""


# ---------------------------------------------------------------------------------------------------------------------
# Bodies


def sent(site: Site, num_mb: int, *, chunked: bool, auth: str = "") -> int:
    """Status of a request with a long body, which is sent as long as the server accepts it."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as connection:
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {num_mb * MB}"
        lines = ["POST /api/flows/ HTTP/1.1", f"Host: 127.0.0.1:{site.port}", "Content-Type: application/json", length]
        lines += [f"Authorization: {value}" for value in authorization(auth).values()]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        piece = b"%x\r\n%s\r\n" % (MB, b" " * MB) if chunked else b" " * MB
        try:
            for _ in range(num_mb):
                connection.sendall(piece)
            connection.sendall(b"0\r\n\r\n" if chunked else b"")
        except (BrokenPipeError, ConnectionResetError):
            pass
        return int(connection.recv(4096).split()[1])


def grown_mb(site: Site, work: Callable[[], None]) -> float:
    """Largest growth of the server's memory during the requests, in MB."""
    (process,) = [one for one in site.processes() if "serve" in one.cmdline()]
    before, over = process.memory_info().rss, threading.Event()
    seen = [before]

    def poll() -> None:
        while not over.wait(0.01):
            seen.append(process.memory_info().rss)

    polling = threading.Thread(target=poll)
    polling.start()
    work()
    over.set()
    polling.join()
    return (max(seen) - before) / MB


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_without_the_password_costs_no_memory(site: Site, chunked: bool) -> None:
    statuses: list[int] = []
    sent(site, 1, chunked=chunked)  # created once for all senders
    grown = grown_mb(site, lambda: statuses.append(sent(site, 50, chunked=chunked)))
    assert statuses == [401]
    assert grown < 8, f"{grown:.1f} MB for 50 MB"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_with_the_password_too(site: Site, chunked: bool) -> None:
    num_mb = MAX_BODY_BYTES // MB
    statuses: list[int] = []
    grown = grown_mb(site, lambda: statuses.append(sent(site, 4 * num_mb, chunked=chunked, auth=site.password)))
    assert statuses == [413]
    assert grown < 2.5 * num_mb, f"{grown:.1f} MB"
    assert sent(site, num_mb, chunked=chunked, auth=site.password) == 403, "negative control: only the token is missing"


# ---------------------------------------------------------------------------------------------------------------------
# The server of a plain `rlhf run`


def command_lines_below() -> list[str]:
    """Command lines of the running processes started by this one; leftovers of other tests may be dead."""
    lines = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(one.cmdline()))
    return lines


@needs_root
def test_the_temporary_server_of_a_run_has_a_password_that_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING

    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    give_prefect_database(tmp_path / "prefect")
    for name, value in REGISTERED.items():
        monkeypatch.setenv(name, value)
    printed: list[str] = []
    with temporary_server.prefect_server(tmp_path, printed.append) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        stranger = Site(tmp_path, port)
        for path, content in (("/flows/", {"name": "stranger"}), ("/flow_runs/filter", {})):
            assert as_stranger(lambda path=path, content=content: stranger.ask(path, content, auth="")[0]) == 401
        assert asked(stranger, host="evil.example") == 400
        password = PREFECT_API_AUTH_STRING.value()
        assert password
        assert password not in "".join(printed)
        lines = command_lines_below()
        assert lines, "at least the server"
        assert not any(password in line for line in lines)
        with get_client(sync_client=True) as client:
            client.create_flow_from_name("own")
            assert [flow.name for flow in client.read_flows()] == ["own"]
    assert not PREFECT_API_AUTH_STRING.value()
