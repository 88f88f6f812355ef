"""Clients of the Prefect API for this program."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SyncClientContext
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_TLS_INSECURE_SKIP_VERIFY, PREFECT_API_URL

from rlhf_core.errors import PrefectUnavailable


def api_client() -> SyncPrefectClient:
    """Client for a ``with`` block: the one of the flow in which this is called, if there is one, otherwise a new one.

    A new one does not read the certificate authorities again: Prefect reads them for each client, which takes far
    longer than a request.
    """
    if SyncClientContext.get() is not None or PREFECT_API_TLS_INSECURE_SKIP_VERIFY.value():
        return get_client(sync_client=True)
    trust = _trusting(PREFECT_API_SSL_CERT_FILE.value())
    return get_client(httpx_settings={"verify": trust}, sync_client=True)


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
