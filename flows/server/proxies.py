"""Requests to a Prefect server on this machine, which must bypass any proxy set in the environment.

Clusters commonly set ``http_proxy``, and neither urllib nor Prefect's clients exempt even loopback from it. The proxy
would look for the server on its own machine, and would receive the password. Servers elsewhere are reached as the user
has configured it.
"""

import http.client
import ipaddress
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from urllib.parse import urlsplit

import psutil


def status_of(url: str, timeout_s: float, headers: Mapping[str, str] = MappingProxyType({})) -> int | None:
    """HTTP status of the response to a GET request, without a proxy if the server is on this machine; None without a
    response of HTTP, and for an invalid URL."""
    try:
        direct = [urllib.request.ProxyHandler({})] if is_here(url) else []
        request = urllib.request.Request(url, headers=dict(headers))
        with urllib.request.build_opener(*direct).open(request, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, http.client.HTTPException):
        return None


def exemption(url: str) -> dict[str, str]:
    """Environment variable that exempts a server on this machine from proxies, for Prefect's own clients.

    Empty if there is nothing to exempt.
    """
    # The lower-case variable overrides the other one, even if it is empty.
    name = "no_proxy" if "no_proxy" in os.environ else "NO_PROXY"
    exempt = [host for one in os.environ.get(name, "").split(",") if (host := one.strip())]
    # urllib interprets * as all hosts only if it is the only entry.
    if exempt == ["*"] or _host(url) in exempt or not urllib.request.getproxies() or not is_here(url):
        return {}
    return {name: ",".join([*exempt, _host(url)])}


def is_here(url: str) -> bool:
    """True if an address is on this machine: loopback, this machine's name, or an address of an interface."""
    host = _host(url)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in _own_names()
    return address.is_loopback or str(address) in _own_addresses()


def _host(url: str) -> str:
    """Host of an address in lower case; empty if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@cache
def _own_names() -> frozenset[str]:
    return frozenset({"localhost", socket.gethostname().lower(), socket.getfqdn().lower()})


def _own_addresses() -> set[str]:
    interfaces = psutil.net_if_addrs().values()
    # Link-local addresses end with % and the name of their interface.
    return {entry.address.partition("%")[0] for entries in interfaces for entry in entries}
