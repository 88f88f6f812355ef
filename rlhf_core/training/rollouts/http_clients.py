"""HTTP clients for engines, which are in the allocation and speak plain HTTP, and the lines of their responses."""

import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx

_OPTIONS: dict[str, Any] = {
    # A proxy from the environment must not be used, nor see the token.
    "trust_env": False,
    "limits": httpx.Limits(max_connections=None),
    # Without certificates: to load them takes every new client 20 to 40 ms of CPU time, and none is ever needed.
    "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
}


def engine_http(**options: Any) -> httpx.Client:
    """Create a client for engines with further options of httpx."""
    return httpx.Client(**_OPTIONS, **options)


def async_engine_http(**options: Any) -> httpx.AsyncClient:
    """Create an asynchronous client for engines with further options of httpx."""
    return httpx.AsyncClient(**_OPTIONS, **options)


async def response_lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield lines as they arrive, without their line ends; the last one may be incomplete.

    ``httpx.Response.aiter_lines`` also splits where ``str.splitlines`` does, for instance at U+2028. JSON may contain
    such characters unescaped (RFC 8259, section 7), and completions do.
    """
    begun: list[bytes] = []
    async for chunk in answer.aiter_bytes():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end])
            begun = []
        begun.append(rest)
    if last := b"".join(begun):
        yield last
