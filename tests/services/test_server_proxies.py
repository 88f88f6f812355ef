"""Proxy variables: our requests and Prefect's reach a server on this machine without a proxy."""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_stand_in import QuietHandler, serving

from flows.server import proxies
from flows.server import settings as server
from rlhf_core.config.site import load_site

PROXY = "http://127.0.0.1:9"
"""Nothing listens there."""

PREFECT_CLIENTS = """
import json, os, sys
from rlhf_core.garbage import collect_rarely
collect_rarely()
from prefect.client.orchestration import get_client
from websockets.proxy import get_proxy
from websockets.uri import parse_uri
for environment in json.loads(sys.argv[2]):
    os.environ.clear()
    os.environ.update(environment)
    with get_client(sync_client=True) as client:
        found = [client.api_healthcheck(), get_proxy(parse_uri("ws://" + sys.argv[1] + "/events"))]
    print(json.dumps(list(map(str, found))))
"""
"""Error of a request, and proxy of a websocket, in each environment."""


class Healthy(QuietHandler):
    """A server that reports itself healthy."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def port() -> Iterator[int]:
    with serving(Healthy) as port:
        yield port


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment of a cluster with proxies."""
    foreign = ("RLHF_", "PREFECT_")
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(foreign) and not name.lower().endswith("_proxy")
    }
    own = {**plain, "HOME": str(tmp_path), "http_proxy": PROXY, "ALL_PROXY": PROXY}
    monkeypatch.setattr(os, "environ", own)
    return own


def test_a_local_server_is_reached_directly(port: int) -> None:
    url = f"http://127.0.0.1:{port}/api"
    with pytest.raises(urllib.error.URLError):
        urllib.request.build_opener().open(f"{url}/health", timeout=2.0)
    assert server.answers(url)
    assert not server.requires_password(url)


def test_what_is_no_server_has_no_status() -> None:
    assert proxies.status_of("http://localhost:42OO/api", 1.0) is None, "letters in place of zeros"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        server_of_ssh = threading.Thread(target=_greet, args=(listening,), daemon=True)
        server_of_ssh.start()
        assert proxies.status_of(address, 5.0) is None
        server_of_ssh.join(5.0)


def _greet(listening: socket.socket) -> None:
    listening.settimeout(5.0)
    connection, _ = listening.accept()
    with connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.recv(1000)


def test_a_remote_server_is_reached_through_the_proxy(port: int, environment: dict[str, str]) -> None:
    environment["http_proxy"] = f"http://127.0.0.1:{port}"
    assert server.answers("http://prefect.invalid:4200/api"), "the proxy answers in its place"
    assert proxies.exemption("http://prefect.invalid:4200/api") == {}


def test_clients_of_prefect_reach_a_local_server_directly(
    port: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    environment |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "NO_PROXY": "example.com"}
    site = load_site({"RLHF_HOME": str(tmp_path / "home")})
    proxied = dict(environment)
    served = proxied | server.service_settings(site)
    server.connect(site)
    environments = [proxied, served, environment]
    assert served["PREFECT_API_URL"] == environment["PREFECT_API_URL"]  # which a process reads only once
    assert [one["NO_PROXY"] for one in environments[1:]] == ["example.com,127.0.0.1"] * 2
    command = [sys.executable, "-c", PREFECT_CLIENTS, f"127.0.0.1:{port}", json.dumps(environments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    control, *direct = map(json.loads, done.stdout.splitlines())
    assert control[1] == PROXY, "negative control"
    assert control[0] != "None"
    assert direct == [["None", "None"]] * 2, done.stderr


@pytest.mark.parametrize(
    ("given", "exempted"),
    [
        ({}, {"NO_PROXY": "127.0.0.1"}),
        ({"NO_PROXY": "a, b"}, {"NO_PROXY": "a,b,127.0.0.1"}),
        ({"NO_PROXY": "a", "no_proxy": ""}, {"no_proxy": "127.0.0.1"}),
        ({"no_proxy": "127.0.0.1"}, {}),
        ({"no_proxy": "*"}, {}),
    ],
)
def test_exemptions_of_the_user_are_kept(
    given: dict[str, str], exempted: dict[str, str], environment: dict[str, str]
) -> None:
    environment |= given
    assert proxies.exemption("http://127.0.0.1:4200/api") == exempted


def test_without_a_proxy_the_environment_stays_as_it_is(environment: dict[str, str]) -> None:
    del environment["http_proxy"], environment["ALL_PROXY"]
    assert proxies.exemption("http://127.0.0.1:4200/api") == {}


def test_addresses_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "_own_names", lambda: {"localhost", "login1", "login1.cluster"})
    monkeypatch.setattr(proxies, "_own_addresses", lambda: {"10.0.0.5"})
    here = ["localhost", "127.0.0.2", "[::1]", "login1", "LOGIN1.cluster", "10.0.0.5"]
    assert [host for host in here if not proxies.is_here(f"http://{host}:4200/api")] == []
    elsewhere = ["login2", "10.0.0.6", "[::2]", "", "[broken"]
    assert [host for host in elsewhere if proxies.is_here(f"http://{host}:4200/api")] == []
