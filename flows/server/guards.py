"""Checks of every request to a site's Prefect server before Prefect sees it: its sender, its page of origin, and its
size.

The password is not a cookie, so a page of another site cannot borrow it from a browser. These checks are further
defences: a server that answers to any name can be read by a page whose name is pointed at it (DNS rebinding), and a
body that is read before its sender is authenticated lets any client use up memory.
"""

import base64
import binascii
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 16 << 20
"""Longest request body. The longest one that Prefect's own clients send, a batch of log lines, has 4 MB."""

MAX_SOCKET_BYTES = 4 << 20
"""Longest websocket message; only the first one authenticates the sender. An event has 1.5 MB at most."""

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing and whose body is not read."""

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Names:
    """Accepted names of a server."""

    hosts: frozenset[str]
    """Host names and addresses, without ports."""
    origins: frozenset[str] = frozenset()
    """Further origins whose pages may write, for instance ``https://runs.example.com`` of a proxy."""
    any_address: bool = False
    """True to accept every numeric address: a page cannot give itself one as its name."""

    def serves(self, host: str) -> bool:
        """True if a ``Host`` header names this server."""
        name = _host_name(host)
        return name in self.hosts or (self.any_address and _is_address(name))

    def trusts(self, origin: str, host: str) -> bool:
        """True if a page of ``origin`` may write to the server addressed as ``host``."""
        try:
            parts = urlsplit(origin)
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            return False
        if parts.scheme not in _PORTS or not parts.hostname:
            return False
        if f"{parts.scheme}://{parts.netloc.lower()}" in self.origins:
            return True
        named, own_port = _host_name(host), _port(host, _PORTS[parts.scheme])
        return (_host_name(parts.netloc), port) == (named, own_port)


class Known:
    """ASGI wrapper that only answers to the server's own names, and accepts writes only from its own pages."""

    def __init__(self, app: App, names: Names) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests to one of the server's names that were not sent by a page of another site."""
        problem = self._problem(scope) if scope["type"] in ("http", "websocket") else ""
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "refused"})
        else:
            await refuse(send, 400 if problem.startswith("Host") else 403, problem)

    def _problem(self, scope: Scope) -> str:
        host = _header(scope, b"host")
        if not self._names.serves(host):
            return (
                f"Host: found {host[:200]!r}, which is no name of this server; where it is one, say so as hosts under "
                f"[prefect] in rlhf.toml"
            )
        if scope["type"] == "http" and scope["method"] in READING:
            return ""
        origin = _header(scope, b"origin") or _header(scope, b"referer")
        if origin and not self._names.trusts(origin, host):
            return f"Origin: found {origin[:200]!r}; only pages of this server may write to it"
        return ""


class Authenticated:
    """ASGI wrapper that reads no body before its sender has given the password."""

    def __init__(self, app: App, password: str) -> None:
        """Require ``password``, as ``user:password``."""
        self._app = app
        self._password = password.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests with the password, and requests without a body, for which Prefect itself checks the
        password."""
        if scope["type"] == "http" and scope["method"] not in READING and not self._has_password(scope):
            await refuse(send, 401, "Unauthorized")
        else:
            await self._app(scope, receive, send)

    def _has_password(self, scope: Scope) -> bool:
        scheme, _, given = _header(scope, b"authorization").partition(" ")
        try:
            decoded = base64.b64decode(given.strip(), validate=True)
        except (binascii.Error, ValueError):
            return False
        return scheme.lower() == "basic" and hmac.compare_digest(decoded, self._password)


class Limited:
    """ASGI wrapper that limits the size of bodies, whatever length the sender declares."""

    def __init__(self, app: App, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass requests on; answer those with too long a body with 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._refuse(send)
            return
        num_bytes, begun = 0, False

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise _TooLong
            return message

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLong:
            if begun:
                raise
            await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        await refuse(send, 413, f"the body of a request may have {self._max_bytes:,} bytes")


class _TooLong(Exception):
    """The body exceeds the limit."""


async def refuse(send: Send, status: int, why: str) -> None:
    """Answer with a status and a sentence, in the form that Prefect's clients and pages expect."""
    body = json.dumps({"detail": why, "exception_message": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def names_of(hosts: Collection[str], origins: Collection[str] = (), *, any_address: bool = False) -> Names:
    """Names of a server in normalised form, in addition to those of loopback."""
    named = frozenset(_host_name(host) for host in hosts if host)
    trusted = frozenset(origin.rstrip("/").lower() for origin in origins if origin)
    return Names(named | {"localhost", "127.0.0.1", "[::1]"}, trusted, any_address)


def _header(scope: Scope, name: bytes) -> str:
    """The value of a header; empty if it is missing. A repeated header yields a value that matches nothing."""
    return b", ".join(value for key, value in scope["headers"] if key == name).decode("latin-1")


def _host_name(host: str) -> str:
    """Name of a host without its port, in lower case; an IPv6 address in brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    if name.count(":") > 1:
        return f"[{name}]"
    return name.partition(":")[0].rstrip(".")


def _port(host: str, default: int) -> int:
    _, colon, port = host.strip().rpartition("]")[2].rpartition(":")
    return int(port) if colon and port.isdigit() else default


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
