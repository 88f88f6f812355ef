"""HTTP clients for engines, which are in the allocation and speak plain HTTP."""

import ssl
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
