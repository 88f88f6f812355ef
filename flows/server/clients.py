"""Clients of the Prefect API for this program."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SyncClientContext
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_TLS_INSECURE_SKIP_VERIFY, PREFECT_API_URL

from rlhf_core.errors import PrefectUnavailable

_TOKEN = ("csrf_client_id", "csrf_token", "csrf_token_expiration")
"""Attributes of Prefect's clients: what identifies them in requests that write, which the server asks for."""

_latest: dict[str, Any] = {}
"""Latest client of each server that this process made."""


def api_client() -> SyncPrefectClient:
    """Client for a ``with`` block: the one of the flow in which this is called, if there is one, otherwise a new one.

    A new one does not read the certificate authorities again: Prefect reads them for each client, which takes far
    longer than a request. Nor does it ask for a token if an earlier one has: the server stores each token.
    """
    if SyncClientContext.get() is not None or PREFECT_API_TLS_INSECURE_SKIP_VERIFY.value():
        return get_client(sync_client=True)
    trust = _trusting(PREFECT_API_SSL_CERT_FILE.value())
    client = get_client(httpx_settings={"verify": trust}, sync_client=True)
    _take_token(client)
    return client


def _take_token(client: SyncPrefectClient) -> None:
    """Give a client the token of the latest one. If the server does not know it any more, Prefect asks for another."""
    server, own = str(client.api_url), client._client
    before = _latest.get(server)
    if before is not None and before.csrf_token:
        for name in _TOKEN:
            setattr(own, name, getattr(before, name))
    _latest[server] = own


@contextmanager
def commanding_client() -> Iterator[SyncPrefectClient]:
    """Client for the commands of users, who need one sentence if the server fails: it may be starting, or without its
    database.

    Raises:
        PrefectUnavailable: the server does not answer, or answers with an error of its own.
    """
    try:
        with api_client() as client:
            yield client
    except httpx.HTTPStatusError as error:
        if not error.response.is_server_error:
            raise
        raise _unavailable(f"answers with HTTP status {error.response.status_code}") from error
    except httpx.TransportError as error:
        raise _unavailable(f"does not answer ({type(error).__name__})") from error


def _unavailable(found: str) -> PrefectUnavailable:
    return PrefectUnavailable(
        f"the Prefect server at {PREFECT_API_URL.value()} {found}. Its log says more (logs/server.log of RLHF_HOME on "
        "its machine); try again"
    )


@cache
def _trusting(authorities: str | None) -> ssl.SSLContext:
    if authorities:
        return ssl.create_default_context(cafile=authorities)
    return httpx.create_ssl_context(trust_env=False)
